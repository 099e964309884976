// Products with matrices of 3-bit codes and float32 scales.
#include "linear.cuh"

LOWBIT_LINEAR(3, f32, float, 2)
