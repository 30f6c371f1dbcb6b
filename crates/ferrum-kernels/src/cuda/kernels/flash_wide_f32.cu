// Attention on tensor cores over caches of f32 with values of up to 256 elements.
#include "flash.cuh"

FLASH_WIDE_KERNELS(f32, F32)
