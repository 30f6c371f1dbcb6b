// Attention on tensor cores over caches of int8.
#include "flash.cuh"

FLASH_KERNELS(int8, Int8)
