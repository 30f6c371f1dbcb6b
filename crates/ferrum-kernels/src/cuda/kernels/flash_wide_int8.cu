// Attention on tensor cores over caches of int8 with values of up to 256 elements.
#include "flash.cuh"

FLASH_WIDE_KERNELS(int8, Int8)
