// Attention on tensor cores over caches of bf16 with wide values, or latent rows.
#include "flash.cuh"

FLASH_WIDE_KERNELS(bf16, BF16)
// Devices of compute capability 12 have less shared memory than its tiles take.
#if !(__CUDA_ARCH__ >= 1200)
LATENT_KERNEL(bf16, BF16)
#endif
