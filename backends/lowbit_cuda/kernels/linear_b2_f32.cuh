// Products with matrices of 2-bit codes and float32 scales.
#include "linear.cuh"

LOWBIT_LINEAR(2, f32, float, 2)
