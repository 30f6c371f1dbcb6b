// Attention on tensor cores over caches of int8 with wide values, or latent rows.
#include "flash.cuh"

FLASH_WIDE_KERNELS(int8, Int8)
