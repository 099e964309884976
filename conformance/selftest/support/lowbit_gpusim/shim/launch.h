// One launch of one kernel, as Python or the driver requests it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "block.h"

namespace lowbit_shim {

// How a region is accessed; with PART the kernel writes to it, but not necessarily to all of it.
constexpr std::int32_t READ = 1, WRITE = 2, UPDATE = 3, PART = 4;

// **The kernels of a program**, each with a function that calls it with arguments read from slots of eight bytes.

struct Kernel {
  const char* name;
  void (*call)(const std::uint64_t* slots);
  std::int32_t count;
  void (*describe)(char* text);  // its arguments: "const 4u*" is a pointer to uint32 that is only read, "4f" a float
};

// The code that reads the slots is not part of the kernel, and is not watched.
#define LOWBIT_SHIM_UNWATCHED __attribute__((no_sanitize("thread")))

template <class T>
LOWBIT_SHIM_UNWATCHED T from_slot(std::uint64_t slot) {
  T value;
  __builtin_memcpy(&value, &slot, sizeof value);
  return value;
}

template <auto function, class... A, std::size_t... i>
LOWBIT_SHIM_UNWATCHED void call_with(void (*)(A...), const std::uint64_t* slots, std::index_sequence<i...>) {
  function(from_slot<A>(slots[i])...);
}

template <class T>
char* describe_one(char* text) {
  using Pointee = std::remove_pointer_t<T>;
  using Plain = std::remove_cv_t<Pointee>;
  if (std::is_const_v<Pointee> && std::is_pointer_v<T>)
    for (const char* word = "const "; *word; ++word) *text++ = *word;
  static_assert(sizeof(Plain) < 100);
  if (sizeof(Plain) >= 10) *text++ = static_cast<char>('0' + sizeof(Plain) / 10);
  *text++ = static_cast<char>('0' + sizeof(Plain) % 10);
  *text++ = std::is_floating_point_v<Plain> ? 'f' : !std::is_integral_v<Plain> ? 's' : std::is_signed_v<Plain> ? 'i' : 'u';
  if (std::is_pointer_v<T>) *text++ = '*';
  *text++ = ';';
  return text;
}

template <class... A>
void describe_all(void (*)(A...), char* text) {
  ((text = describe_one<A>(text)), ...);
  *text = 0;
}

template <class... A>
constexpr int count_of(void (*)(A...)) {
  return sizeof...(A);
}

template <auto function>
Kernel kernel(const char* name) {
  return {name,
          [](const std::uint64_t* slots) {
            call_with<function>(function, slots, std::make_index_sequence<count_of(function)>{});
          },
          count_of(function), [](char* text) { describe_all(function, text); }};
}

// A static variable of this type registers a kernel.
struct Known {
  explicit Known(const Kernel& kernel);
};

}  // namespace lowbit_shim

extern "C" {

// Memory that a kernel may access, and how.
struct lowbit_shim_region {
  void* begin;
  std::int64_t nbytes;
  std::int32_t access;
  std::int32_t unused;
  const char* name;
};

struct lowbit_shim_launch {
  const char* kernel;
  const std::uint64_t* slots;
  const lowbit_shim_region* regions;
  std::int64_t shared;  // bytes of dynamic shared memory
  std::uint64_t seed;
  std::int32_t slot_count, region_count;
  std::uint32_t grid[3], block;
  std::int32_t strict;         // also switch threads at accesses to shared memory
  std::int32_t mutation_line;  // the line of a planted bug, or 0
  const char* mutation_file;
  char* message;  // what went wrong
  std::int64_t room;
};

#define LOWBIT_SHIM_EXPORT __attribute__((visibility("default")))
LOWBIT_SHIM_EXPORT int lowbit_shim_run(const lowbit_shim_launch* launch);  // 0 on success
// The description of a kernel's arguments, or null.
LOWBIT_SHIM_EXPORT const char* lowbit_shim_describe(const char* kernel);
// One line "kind file:line" for each barrier, shuffle and vote since the last call.
LOWBIT_SHIM_EXPORT const char* lowbit_shim_meetings();
}
