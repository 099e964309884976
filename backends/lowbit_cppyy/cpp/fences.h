// Fences between the areas of one allocation, for tests: AddressSanitizer reports code that touches one.
#pragma once

#include <cstdint>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define LOWBIT_FENCES 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define LOWBIT_FENCES 1
#endif

#ifdef LOWBIT_FENCES
#include <sanitizer/asan_interface.h>
#endif

namespace lowbit {

#ifdef LOWBIT_FENCES
constexpr std::int64_t fence = 16;  // floats after each area
inline void raise_fence(float* first, float* last) { __asan_poison_memory_region(first, (last - first) * sizeof(float)); }
inline void lower_fences(float* first, float* last) { __asan_unpoison_memory_region(first, (last - first) * sizeof(float)); }
#else
constexpr std::int64_t fence = 0;
inline void raise_fence(float*, float*) {}
inline void lower_fences(float*, float*) {}
#endif

}  // namespace lowbit
