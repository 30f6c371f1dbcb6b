// Attention on tensor cores over caches of f32 with values of up to 512 elements, or latent rows.
#include "flash.cuh"

FLASH_512_KERNELS(f32, F32)
