// Attention of few rows over few keys in all, from caches of f16.
#include "flash_decode.cuh"

DECODE_KERNEL(f16, F16, 128)
DECODE_KERNEL(f16, F16, 64)
