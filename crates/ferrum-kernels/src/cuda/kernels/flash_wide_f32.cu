// Attention on tensor cores over caches of f32 with wide values, or latent rows.
#include "flash.cuh"

FLASH_WIDE_KERNELS(f32, F32)
