// Attention on tensor cores over caches of fp8.
#include "flash.cuh"

FLASH_KERNELS(fp8, Fp8)
