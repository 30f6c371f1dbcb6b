// Attention on tensor cores over caches of f16 with values of up to 512 elements, or latent rows.
#include "flash.cuh"

FLASH_512_KERNELS(f16, F16)
LATENT_KERNEL(f16, F16)
