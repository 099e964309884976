// Products with matrices of 2-bit codes and float16 scales.
#include "linear.cuh"

LOWBIT_LINEAR(2, f16, uint16_t, 2)
