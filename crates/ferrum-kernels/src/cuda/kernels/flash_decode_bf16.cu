// Attention of few rows over few keys in all, from caches of bf16.
#include "flash_decode.cuh"

DECODE_KERNEL(bf16, BF16, 128)
DECODE_KERNEL(bf16, BF16, 64)
