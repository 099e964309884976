// Products with matrices of 4-bit codes and float16 scales.
#include "linear.cuh"

LOWBIT_LINEAR(4, f16, uint16_t, 2)
