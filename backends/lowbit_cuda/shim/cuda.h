// CUDA's names for g++: what kernels use of them, and no more.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "block.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __align__(bytes) alignas(bytes)
#define __constant__ static const
#define __launch_bounds__(...)
// Together in a section of their own, so that the runtime knows where they lie.
#define __shared__ static __attribute__((section("lowbit_shared")))

#define threadIdx (::lowbit_shim::thread_index())
#define blockIdx (::lowbit_shim::block_index())
#define blockDim (::lowbit_shim::block_size())
#define gridDim (::lowbit_shim::grid_size())
#define warpSize 32

struct alignas(4) uchar4 {
  unsigned char x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// **Barriers and warps.**

inline void __syncthreads(lowbit_shim::Site site = lowbit_shim::Site::here()) {
  lowbit_shim::block_barrier(lowbit_shim::Count::plain, 0, site);
}
inline int __syncthreads_or(int predicate, lowbit_shim::Site site = lowbit_shim::Site::here()) {
  return lowbit_shim::block_barrier(lowbit_shim::Count::or_, predicate, site);
}
inline int __syncthreads_and(int predicate, lowbit_shim::Site site = lowbit_shim::Site::here()) {
  return lowbit_shim::block_barrier(lowbit_shim::Count::and_, predicate, site);
}
inline int __syncthreads_count(int predicate, lowbit_shim::Site site = lowbit_shim::Site::here()) {
  return lowbit_shim::block_barrier(lowbit_shim::Count::count, predicate, site);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, lowbit_shim::Site site = lowbit_shim::Site::here()) {
  lowbit_shim::warp_barrier(mask, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, lowbit_shim::Site site = lowbit_shim::Site::here()) {
  return lowbit_shim::vote(lowbit_shim::Vote::ballot, mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, lowbit_shim::Site site = lowbit_shim::Site::here()) {
  return static_cast<int>(lowbit_shim::vote(lowbit_shim::Vote::any, mask, predicate != 0, site));
}
inline int __all_sync(unsigned mask, int predicate, lowbit_shim::Site site = lowbit_shim::Site::here()) {
  return static_cast<int>(lowbit_shim::vote(lowbit_shim::Vote::all, mask, predicate != 0, site));
}

namespace lowbit_shim {

template <class T>
T shuffled(Shuffle kind, unsigned mask, T value, int argument, int width, Site site) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) >= 4, "CUDA shuffles numbers of 4 and 8 bytes");
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = shuffle(kind, mask, bits, argument, width, site);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace lowbit_shim

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  lowbit_shim::Site site = lowbit_shim::Site::here()) {
  return lowbit_shim::shuffled(lowbit_shim::Shuffle::xor_, mask, value, lane_mask, width, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   lowbit_shim::Site site = lowbit_shim::Site::here()) {
  return lowbit_shim::shuffled(lowbit_shim::Shuffle::down, mask, value, static_cast<int>(delta), width, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 lowbit_shim::Site site = lowbit_shim::Site::here()) {
  return lowbit_shim::shuffled(lowbit_shim::Shuffle::up, mask, value, static_cast<int>(delta), width, site);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, lowbit_shim::Site site = lowbit_shim::Site::here()) {
  return lowbit_shim::shuffled(lowbit_shim::Shuffle::index, mask, value, lane, width, site);
}

// **Arithmetic and bits.**

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
inline int __float_as_int(float value) { return static_cast<int>(__float_as_uint(value)); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float rsqrtf(float a) { return 1.0f / __builtin_sqrtf(a); }
inline float __expf(float a) { return std::exp(a); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<std::uint64_t>(high) << 32) | low) >> (shift & 31));
}
template <class T>
T __ldg(const T* address) {
  return *address;
}
