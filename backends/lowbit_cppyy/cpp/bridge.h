// The functions that Python calls: plain functions of addresses, the cheapest to call through cppyy.
//
// cppyy compiles the wrapper of a function in its first call. So every function that releases the GIL does nothing for
// 0 rows, whatever the addresses. That allows a first call at a time when no other thread can fork.
#pragma once

#include "linear.h"

namespace lowbit::bridge {

template <class T> const T* at(std::uintptr_t address) { return reinterpret_cast<const T*>(address); }

inline std::uintptr_t create_pool(int threads) { return reinterpret_cast<std::uintptr_t>(new Pool(threads)); }

inline void stop_pool(std::uintptr_t pool) { reinterpret_cast<Pool*>(pool)->stop(); }

// A forked child does not touch the pool: its threads do not exist there, and waiting for them would never end.
inline void destroy_pool(std::uintptr_t pool) {
  Pool* const mine = reinterpret_cast<Pool*>(pool);
  if (!mine->forked()) delete mine;
}

// `numbers`: rows, group_size, groups, block_groups, unit_codes, negative, columns, panel, panels, blocks, scales_each,
// zeros_each.
inline std::uintptr_t create_linear(const std::int64_t* numbers, std::uintptr_t stream, std::uintptr_t starts,
                                    std::uintptr_t pool) {
  const std::int64_t* const n = numbers;
  return reinterpret_cast<std::uintptr_t>(new Linear{{n[0], n[1], n[2], n[3], n[4], n[5] != 0}, n[6], n[7], n[8], n[9],
                                                     n[10], n[11], at<std::uint32_t>(stream), at<std::int64_t>(starts),
                                                     reinterpret_cast<Pool*>(pool)});
}

inline void destroy_linear(std::uintptr_t linear) { delete at<Linear>(linear); }

// A route, with the sizes to which it points.
struct OwnRoute {
  Route route;
  std::vector<Sizes> sizes;
};

// `numbers`: rows, columns, layout, head, x_length, tables, least, beyond. `lists` are addresses: factors, terms, weights,
// x_starts, segments, turns, back, ends. `firsts`: the first entry of each block in the last three lists, and their
// length.
inline std::uintptr_t create_route(std::uintptr_t kernel, const std::int64_t* numbers, const std::uint64_t* lists,
                                   const std::int64_t* firsts, std::int64_t blocks) {
  const std::int64_t* const n = numbers;
  OwnRoute* const own = new OwnRoute{};
  for (std::int64_t b = 0; b < blocks; ++b) {
    const std::int64_t first = firsts[b], count = firsts[b + 1] - first;
    own->sizes.push_back({count, count, at<std::int32_t>(lists[5]) + first, at<std::int32_t>(lists[6]) + first,
                          at<std::int32_t>(lists[7]) + first});
  }
  const std::uint32_t least = static_cast<std::uint32_t>(n[6]), beyond = static_cast<std::uint32_t>(n[7]);
  own->route = Route{reinterpret_cast<MicroKernel>(kernel), n[0], n[1], n[2], n[3], n[4], n[5], least, beyond,
                     at<float>(lists[0]), at<std::int32_t>(lists[1]), at<float>(lists[2]), own->sizes.data(),
                     at<std::int64_t>(lists[3]), at<std::int32_t>(lists[4])};
  return reinterpret_cast<std::uintptr_t>(own);
}

inline void destroy_route(std::uintptr_t route) { delete at<OwnRoute>(route); }

inline int multiply(std::uintptr_t linear, std::uintptr_t route, const float* x, float* out, std::int64_t rows) {
  if (rows == 0) return OK;
  const StandardArithmetic arithmetic;
  return lowbit::multiply(*at<Linear>(linear), at<OwnRoute>(route)->route, x, out, rows);
}

inline int multiply_cast(std::uintptr_t linear, std::uintptr_t route, const float* x, float* out, std::int64_t rows) {
  if (rows == 0) return OK;
  const StandardArithmetic arithmetic;
  return lowbit::multiply_cast(*at<Linear>(linear), at<OwnRoute>(route)->route, x, out, rows);
}

// Mantissas are passed as unsigned bytes because cppyy does not accept arrays of signed bytes.
inline int multiply_blocks(std::uintptr_t linear, std::uintptr_t route, const std::uint8_t* mantissas,
                           const std::int16_t* exponents, float* out, std::int64_t rows) {
  if (rows == 0) return OK;
  const StandardArithmetic arithmetic;
  return lowbit::multiply_blocks(*at<Linear>(linear), at<OwnRoute>(route)->route,
                                 reinterpret_cast<const std::int8_t*>(mantissas), exponents, out, rows);
}

}  // namespace lowbit::bridge
