// Attention on tensor cores over caches of int8 with values of up to 512 elements, or latent rows.
#include "flash.cuh"

FLASH_512_KERNELS(int8, Int8)
