// Attention of many rows on compute capability 9.0 over caches of f16.
#include "flash_group.cuh"

FLASH_GROUP_KERNELS(f16, F16)
