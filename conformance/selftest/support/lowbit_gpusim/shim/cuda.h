// CUDA's names for g++: only those that the kernels use.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "block.h"

#define __global__
#define __device__
#define __restrict__ __restrict
#define __launch_bounds__(...)
// These variables lie in a section of their own, so that the runtime knows their addresses.
#define __shared__ static __attribute__((section("lowbit_shared")))

#define threadIdx (::lowbit_shim::thread_index())
#define blockIdx (::lowbit_shim::block_index())
#define blockDim (::lowbit_shim::block_size())
#define gridDim (::lowbit_shim::grid_size())

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
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
  __builtin_memcpy(&bits, &value, sizeof value);
  bits = shuffle(kind, mask, bits, argument, width, site);
  __builtin_memcpy(&value, &bits, sizeof value);
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
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<std::uint64_t>(high) << 32) | low) >> (shift & 31));
}

// Calls of these functions would not be watched; assignments are.
#pragma GCC poison memcpy memmove memset
