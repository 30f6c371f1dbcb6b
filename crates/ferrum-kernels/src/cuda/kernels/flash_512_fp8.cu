// Attention on tensor cores over caches of fp8 with values of up to 512 elements, or latent rows.
#include "flash.cuh"

FLASH_512_KERNELS(fp8, Fp8)
