// Products with matrices of 8-bit codes and float32 scales.
#include "linear.cuh"

LOWBIT_LINEAR(8, f32, float, 1)
