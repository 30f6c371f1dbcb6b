// Attention on tensor cores over caches of bf16.
#include "flash.cuh"

FLASH_KERNELS(bf16, BF16)
