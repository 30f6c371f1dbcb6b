// Attention on tensor cores over caches of f16 with wide values, or latent rows.
#include "flash.cuh"

FLASH_WIDE_KERNELS(f16, F16)
// Devices of compute capability 12 have less shared memory than its tiles take.
#if !(__CUDA_ARCH__ >= 1200)
LATENT_KERNEL(f16, F16)
#endif
