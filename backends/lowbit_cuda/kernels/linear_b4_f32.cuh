// Products with matrices of 4-bit codes and float32 scales.
#include "linear.cuh"

LOWBIT_LINEAR(4, f32, float, 2)
