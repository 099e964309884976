// Every access of a kernel to memory, as g++'s instrumentation reports it, and what is wrong with it.
//
// g++ compiles the kernels with -fsanitize=thread, which puts a call before each load and store, and nothing of that
// sanitizer is linked: the calls come here. So nothing of a kernel must be written for it to be watched.
//
// A word (four bytes) that may be written has a list of accesses: by which lanes, in which segment of their warp's
// time, from which line. Two accesses of which one writes are a race unless one is ordered before the other: by a
// barrier of the block between them, or by one of the warp that both took part in. Shuffles and votes order nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "launch.h"
#include "threads.h"

namespace lowbit_shim {

// Bytes for shared memory and for what is written that are NaN as numbers, so that what nobody wrote shows.
constexpr int POISON = 0xff;

void watch_launch(const lowbit_shim_launch& launch, char* shared_begin, std::size_t shared_bytes,
                  char* static_begin, std::size_t static_bytes);
void watch_block(Index3 block);  // a new block begins
void watch_end(std::string& failure);  // the launch has ended: has all been written?
void watch_over();               // nothing is watched any more

}  // namespace lowbit_shim
