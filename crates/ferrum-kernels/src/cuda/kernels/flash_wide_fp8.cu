// Attention on tensor cores over caches of fp8 with values of up to 256 elements.
#include "flash.cuh"

FLASH_WIDE_KERNELS(fp8, Fp8)
