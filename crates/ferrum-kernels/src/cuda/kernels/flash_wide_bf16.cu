// Attention on tensor cores over caches of bf16 with values of up to 256 elements.
#include "flash.cuh"

FLASH_WIDE_KERNELS(bf16, BF16)
