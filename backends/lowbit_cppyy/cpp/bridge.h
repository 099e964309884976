// What Python calls: plain functions over addresses, because these are the cheapest to call through cppyy.
#pragma once

#include "linear.h"

namespace lowbit::bridge {

inline std::uintptr_t create_pool(int threads) { return reinterpret_cast<std::uintptr_t>(new Pool(threads)); }

inline void stop_pool(std::uintptr_t pool) { reinterpret_cast<Pool*>(pool)->stop(); }

// In a forked child the pool is left as it is: its threads do not exist there, and waiting for them would be for ever.
inline void destroy_pool(std::uintptr_t pool) {
  Pool* const mine = reinterpret_cast<Pool*>(pool);
  if (!mine->forked()) delete mine;
}

inline std::uintptr_t create_linear(std::uintptr_t stream, std::uintptr_t units, std::int64_t rows,
                                    std::int64_t columns, std::int64_t group_size, std::int64_t groups,
                                    std::int64_t panel, std::int64_t panel_words, std::int64_t unit_codes,
                                    std::int64_t x_length, std::uintptr_t one, std::uintptr_t many,
                                    std::uintptr_t pool) {
  return reinterpret_cast<std::uintptr_t>(new Linear{
      reinterpret_cast<const std::uint32_t*>(stream), reinterpret_cast<const std::int32_t*>(units), rows, columns,
      group_size, groups, panel, panel_words, unit_codes, x_length, reinterpret_cast<const Kernel*>(one),
      reinterpret_cast<const Kernel*>(many), reinterpret_cast<Pool*>(pool)});
}

inline void destroy_linear(std::uintptr_t linear) { delete reinterpret_cast<Linear*>(linear); }

inline int multiply(std::uintptr_t linear, const float* x, float* out, std::int64_t rows) {
  return lowbit::multiply(*reinterpret_cast<const Linear*>(linear), x, out, rows);
}

}  // namespace lowbit::bridge
