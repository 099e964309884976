// What the kernels need from CUDA, for NVRTC and for g++.
//
// NVRTC and nvcc define CUDA's names themselves, so nothing is included for them. For g++, `cuda.h` defines the same
// names, for a program that runs a block thread by thread.
//
// Conventions of all kernels here:
// - a kernel is `KERNEL(threads, blocks) name(arguments)`: extern "C", at most `threads` threads a block, and registers
//   such that `blocks` blocks fit on a multiprocessor;
// - kernels use only dynamic shared memory, and only through `Shared<T>`: `get` and `set` for one element, `get4` and
//   `set4` for four elements from an index that is a multiple of four;
// - all 32 lanes of a warp take part in every `__syncthreads`, `__syncthreads_or` and `__shfl_xor_sync`; blocks are
//   one-dimensional, and their size is a multiple of 32;
// - each product and each sum is rounded; where a single rounding is meant, the source says `fmaf`.
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

// The part of the block's shared memory that begins at a byte, which must be a multiple of 16.
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
  // Like `get4`, but each call reads memory: the compiler cannot keep the elements in registers between calls.
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

// Load four words that will not be read again soon.
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

// The same number, hidden from the compiler, which would otherwise make a separate loop for each of its values.
__device__ inline int32_t opaque(int32_t number) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  asm volatile("" : "+r"(number));
#endif
  return number;
}
