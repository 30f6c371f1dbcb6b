// Attention on tensor cores over caches of f16 with values of up to 256 elements.
#include "flash.cuh"

FLASH_WIDE_KERNELS(f16, F16)
