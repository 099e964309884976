// What a kernel compiled by g++ can ask of the block that it runs in; see the package's documentation.
//
// cuda.h gives these functions CUDA's names. runtime.cpp implements them, with fibers or with threads.
#pragma once

#include <cstdint>

namespace lowbit_shim {

struct Index3 {
  unsigned x, y, z;
};

// A line of a kernel. As a default argument, it is the line of the call.
struct Site {
  const char* file;
  int line;
  static Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

enum class Shuffle { xor_, down, up, index };
enum class Vote { ballot, any, all };
enum class Count { plain, or_, and_, count };

// The result never changes for a given thread, so a compiler may call this only once.
[[gnu::const]] Index3 thread_index();
[[gnu::const]] Index3 block_index();
[[gnu::const]] Index3 block_size();
[[gnu::const]] Index3 grid_size();

int block_barrier(Count count, int predicate, Site site);
void warp_barrier(unsigned mask, Site site);
std::uint64_t shuffle(Shuffle kind, unsigned mask, std::uint64_t bits, int argument, int width, Site site);
unsigned vote(Vote kind, unsigned mask, bool predicate, Site site);

// The dynamic shared memory of the launch.
[[gnu::const]] void* dynamic_shared();

}  // namespace lowbit_shim
