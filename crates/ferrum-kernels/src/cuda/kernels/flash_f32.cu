// Attention on tensor cores over caches of f32.
#include "flash.cuh"

FLASH_KERNELS(f32, F32)
