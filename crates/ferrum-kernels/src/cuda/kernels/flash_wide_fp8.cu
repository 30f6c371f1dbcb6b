// Attention on tensor cores over caches of fp8 with wide values, or latent rows.
#include "flash.cuh"

FLASH_WIDE_KERNELS(fp8, Fp8)
