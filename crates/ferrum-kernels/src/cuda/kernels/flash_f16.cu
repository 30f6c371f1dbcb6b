// Attention on tensor cores over caches of f16.
#include "flash.cuh"

FLASH_KERNELS(f16, F16)
