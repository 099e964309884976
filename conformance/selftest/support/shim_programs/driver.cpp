// Runs kernels in a separate process, for sanitizers: reads launches from standard input and writes results to standard
// output, with each array in memory of exactly its size.

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "launch.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace {

template <class T>
T read_one() {
  T value;
  if (std::fread(&value, sizeof value, 1, stdin) != 1) std::abort();
  return value;
}

std::string read_text() {
  std::string text(static_cast<std::size_t>(read_one<std::int64_t>()), '\0');
  if (!text.empty() && std::fread(&text[0], text.size(), 1, stdin) != 1) std::abort();
  return text;
}

// An array in memory of exactly its size, placed with exactly its alignment.
struct Array {
  std::string name;
  std::int32_t access;
  std::int64_t alignment;
  std::string bytes;
  std::unique_ptr<char, decltype(&std::free)> memory{nullptr, &std::free};

  char* begin() const { return memory.get() + alignment; }
  void place() {
    void* room = nullptr;
    if (posix_memalign(&room, 512, static_cast<std::size_t>(alignment) + bytes.size()) != 0) std::abort();
    memory.reset(static_cast<char*>(room));
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(room, static_cast<std::size_t>(alignment));
#endif
    __builtin_memcpy(begin(), bytes.data(), bytes.size());
  }
};

void answer(const void* bytes, std::size_t count) {
  const std::int64_t size = static_cast<std::int64_t>(count);
  std::fwrite(&size, sizeof size, 1, stdout);
  std::fwrite(bytes, 1, count, stdout);
}

}  // namespace

// A launch: nine numbers, its name, the file of the mutation, then for each slot either 0 and a number, or 1 and an
// array.
int main() {
  std::int64_t n[9];
  while (std::fread(n, sizeof n, 1, stdin) == 1) {
    const std::string name = read_text(), file = read_text();
    std::vector<std::uint64_t> slots;
    std::vector<Array> arrays;
    std::vector<lowbit_shim_region> regions;
    arrays.reserve(static_cast<std::size_t>(n[8]));
    for (std::int64_t slot = 0; slot < n[8]; ++slot) {
      if (read_one<std::int64_t>() == 0) {
        slots.push_back(read_one<std::uint64_t>());
        continue;
      }
      Array array;
      array.name = read_text();
      array.access = static_cast<std::int32_t>(read_one<std::int64_t>());
      array.alignment = read_one<std::int64_t>();
      array.bytes = read_text();
      array.place();
      slots.push_back(reinterpret_cast<std::uint64_t>(array.begin()));
      arrays.push_back(std::move(array));
    }
    for (const Array& array : arrays)
      regions.push_back({array.begin(), static_cast<std::int64_t>(array.bytes.size()), array.access, 0,
                         array.name.c_str()});
    char message[4096] = "";
    lowbit_shim_launch launch{};
    launch.kernel = name.c_str();
    launch.slots = slots.data();
    launch.regions = regions.data();
    launch.slot_count = static_cast<std::int32_t>(slots.size());
    launch.region_count = static_cast<std::int32_t>(regions.size());
    for (int i = 0; i < 3; ++i) launch.grid[i] = static_cast<std::uint32_t>(n[i]);
    launch.block = static_cast<std::uint32_t>(n[3]);
    launch.shared = n[4];
    launch.seed = static_cast<std::uint64_t>(n[5]);
    launch.strict = static_cast<std::int32_t>(n[6]);
    launch.mutation_line = static_cast<std::int32_t>(n[7]);
    launch.mutation_file = file.c_str();
    launch.message = message;
    launch.room = sizeof message;
    lowbit_shim_run(&launch);
    answer(message, __builtin_strlen(message));
    for (const Array& array : arrays)
      if (array.access != lowbit_shim::READ) answer(array.begin(), array.bytes.size());
  }
  return 0;
}
