// Checks every memory access of a kernel, as g++'s instrumentation reports it.
//
// g++ compiles the kernels with -fsanitize=thread, which inserts a call before each load and store. The sanitizer
// itself is not linked: the calls go to this code, so a kernel needs no changes to be watched.
//
// Each writable word (four bytes) has a list of accesses: by which lanes, in which segment of their warp's time, and
// from which line. Two accesses, at least one of them a write, are a race unless one is ordered before the other: by a
// barrier of the block between them, or by a warp barrier in which both lanes took part. Shuffles and votes order
// nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "launch.h"
#include "threads.h"

namespace lowbit_shim {

// Fills shared memory and outputs: these bytes are NaN as numbers, so that unwritten elements are noticed.
constexpr int POISON = 0xff;

void watch_launch(const lowbit_shim_launch& launch, char* shared_begin, std::size_t shared_bytes,
                  char* static_begin, std::size_t static_bytes);
void watch_block(Index3 block);  // a new block begins
void watch_end(std::string& failure);  // the launch has ended: checks that everything was written
void watch_over();               // stops watching

}  // namespace lowbit_shim
