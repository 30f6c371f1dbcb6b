// Attention of many rows on compute capability 9.0 over caches of bf16.
#include "flash_group.cuh"

FLASH_GROUP_KERNELS(bf16, BF16)
