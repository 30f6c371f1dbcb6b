// Attention on tensor cores over caches of bf16 with values of up to 512 elements, or latent rows.
#include "flash.cuh"

FLASH_512_KERNELS(bf16, BF16)
LATENT_KERNEL(bf16, BF16)
