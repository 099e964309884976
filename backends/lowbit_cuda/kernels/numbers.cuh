// Numbers: float16 from its bits and back, powers of two, the exponential, and sums across lanes.
#pragma once

#include "device.cuh"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define ON_DEVICE 1
#endif

constexpr uint32_t ALL_LANES = 0xffffffffu;

__device__ inline float infinity() { return __uint_as_float(0x7f800000u); }

// 2^power, for powers from -126 to 127.
__device__ constexpr uint32_t power_bits(int32_t power) { return static_cast<uint32_t>(power + 127) << 23; }

__device__ inline float power_of_two(int32_t power) { return __uint_as_float(power_bits(power)); }

// A finite float16, exactly.
__device__ inline float from_half(uint32_t bits) {
#ifdef ON_DEVICE
  float value;
  asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "r"(bits));
  return value;
#else
  // Moved to the bits of a float's exponent and mantissa, they make a number 2^112 times too small.
  const float magnitude = __uint_as_float((bits & 0x7fffu) << 13) * power_of_two(112);
  const bool finite = (bits & 0x7c00u) != 0x7c00u;
  const uint32_t kept = finite ? __float_as_uint(magnitude) : 0x7f800000u | (bits & 0x3ffu) << 13;
  return __uint_as_float(kept | (bits & 0x8000u) << 16);
#endif
}

// The float16 nearest to a number, ties to even; infinite beyond the largest float16.
__device__ inline uint16_t to_half(float value) {
#ifdef ON_DEVICE
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  const uint32_t bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // below 2^-14: the addition rounds to multiples of 2^-24
    const float rounded = __uint_as_float(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (__float_as_uint(rounded) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13);
#endif
}

// Four contiguous numbers, as float32.
__device__ inline float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }

__device__ inline float4 as_floats(float4 four) { return four; }

__device__ inline float4 as_floats(uint2 four) {
  return make_float4(from_half(four.x & 0xffffu), from_half(four.x >> 16), from_half(four.y & 0xffffu),
                     from_half(four.y >> 16));
}

__device__ inline float4 load4(const uint16_t* from) { return as_floats(*reinterpret_cast<const uint2*>(from)); }

__device__ inline float load1(const float* from) { return *from; }
__device__ inline float load1(const uint16_t* from) { return from_half(*from); }

// e^x for x <= 0, as lowbit_cppyy.codegen.exponential derives it: with a relative error of at most 2.2 * 2^-24, and 0
// where e^x is below 2^-126.5. NaN stays NaN.
//
// x is k ln 2 + f with an integer k and |f| < 0.347. Adding 1.5 * 2^23, near which all floats are integers, rounds to
// k. ln 2 is split into 355/512 and a small rest; the product of 355/512 and k, and its difference from x, are exact.
__device__ inline float exponential(float x) {
  x = x < -88.0f ? -88.0f : x;
  const float shifted = fmaf(x, 1.44269502162933349609375f, 12582912.0f);
  const float k = shifted - 12582912.0f;
  float f = fmaf(k, -0.693359375f, x);
  f = fmaf(k, 2.12194440e-4f, f);
  float p = fmaf(0.0013814602280035615f, f, 0.008368715643882751f);
  p = fmaf(p, f, 0.04166838899254799f);
  p = fmaf(p, f, 0.1666652113199234f);
  p = fmaf(p, f, 0.4999999403953552f);
  p = fmaf(p, f, 1.0f);
  p = fmaf(p, f, 1.0f);
  return p * __uint_as_float((__float_as_uint(shifted) + 127u) << 23);
}

// a / (1 + e^-a). For either sign of a, the exponential is taken of a number that is not positive: nothing overflows.
__device__ inline float silu(float a) {
  const float e = exponential(a < 0.0f ? a : -a);
  return (a < 0.0f ? a * e : a) / (1.0f + e);
}

// Sums and maxima over the lanes whose indices differ only in the bits below `lanes`; each of them gets the result.
template <int LANES>
__device__ inline float sum_of_lanes(float value) {
  UNROLL for (int32_t distance = LANES / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(ALL_LANES, value, distance);
  }
  return value;
}

template <int LANES>
__device__ inline float max_of_lanes(float value) {
  UNROLL for (int32_t distance = LANES / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
  }
  return value;
}

// The sum over a block of 256 threads; each of them gets the result. `sums` has a place for each warp. All threads must
// call this.
__device__ inline float sum_of_block(float value, const Shared<float>& sums) {
  value = sum_of_lanes<32>(value);
  if (threadIdx.x % 32 == 0) sums.set(threadIdx.x / 32, value);
  __syncthreads();
  float total = 0.0f;
  UNROLL for (int32_t warp = 0; warp < 8; warp++) total += sums.get(warp);
  return total;
}
