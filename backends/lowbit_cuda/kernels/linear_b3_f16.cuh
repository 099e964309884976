// Products with matrices of 3-bit codes and float16 scales.
#include "linear.cuh"

LOWBIT_LINEAR(3, f16, uint16_t, 2)
