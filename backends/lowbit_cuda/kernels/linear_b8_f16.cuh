// Products with matrices of 8-bit codes and float16 scales.
#include "linear.cuh"

LOWBIT_LINEAR(8, f16, uint16_t, 1)
