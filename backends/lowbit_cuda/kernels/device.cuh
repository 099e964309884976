// What the kernels use of a device, for NVRTC and for g++.
//
// Compiled for a device (NVRTC or nvcc), CUDA's own names are there and nothing is included. Compiled by g++, `cuda.h`
// gives the same names to a program that runs a block thread by thread.
//
// Conventions of all kernels here:
// - a kernel is `KERNEL(threads, blocks) name(arguments)`: extern "C", at most `threads` threads a block, and registers
//   such that `blocks` blocks fit on a multiprocessor;
// - shared memory is the dynamic one of the launch, and is reached through `Shared<T>` only: `get` and `set` of one
//   element, `get4` and `set4` of four that begin at a multiple of four;
// - threads meet in `__syncthreads`, `__syncthreads_or` and `__shfl_xor_sync` with all 32 lanes of a warp, never in
//   fewer; blocks are one-dimensional and a multiple of 32;
// - products and sums are rounded one by one, and `fmaf` is written where one rounding is meant.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define UNROLL _Pragma("unroll")
#define UNROLL_4 _Pragma("unroll 4")
#define ROLLED _Pragma("unroll 1")
extern __shared__ uint4 dynamic_shared_memory[];
#else
#include "cuda.h"
#define KERNEL(threads, blocks) extern "C" void
#define UNROLL
#define UNROLL_4
#define ROLLED
#endif

template <class T>
struct Four;
template <>
struct Four<float> {
  typedef float4 type;
};
template <>
struct Four<uint16_t> {
  typedef uint2 type;
};

// Part of the block's shared memory, from a byte on that is a multiple of 16.
template <class T>
class Shared {
 public:
  __device__ explicit Shared(uint32_t byte) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    at_ = reinterpret_cast<T*>(reinterpret_cast<uint8_t*>(dynamic_shared_memory) + byte);
#else
    at_ = reinterpret_cast<T*>(static_cast<uint8_t*>(lowbit_shim::dynamic_shared()) + byte);
#endif
  }
  __device__ T get(int32_t i) const { return at_[i]; }
  __device__ void set(int32_t i, T value) const { at_[i] = value; }
  __device__ typename Four<T>::type get4(int32_t i) const {
    return *reinterpret_cast<const typename Four<T>::type*>(at_ + i);
  }
  // The same, read anew wherever it is written: a compiler does not keep it in registers for another use.
  __device__ float4 read4(int32_t i) const {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
    float4 four;
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(at_ + i))));
    return four;
#else
    return get4(i);
#endif
  }
  __device__ void set4(int32_t i, typename Four<T>::type value) const {
    *reinterpret_cast<typename Four<T>::type*>(at_ + i) = value;
  }

 private:
  T* at_;
};

// Four words that will not be read again soon.
__device__ inline uint4 load_words(const uint32_t* from) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  uint4 words;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
      : "l"(from));
  return words;
#else
  return *reinterpret_cast<const uint4*>(from);
#endif
}

// The same number, of which a compiler knows nothing: it does not make a loop of its own for each of its values.
__device__ inline int32_t opaque(int32_t number) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  asm volatile("" : "+r"(number));
#endif
  return number;
}
