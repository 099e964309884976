// A block's threads, and what each waits for.
//
// Where threads meet is decided here, for fibers and for real threads alike: who may wait with whom, when a meeting is
// complete, and which meetings can never be. Nothing here waits by itself: a mode of running (fibers.h, system.h)
// brings `suspend`, which returns when `resume` was called for the thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "block.h"

namespace lowbit_shim {

constexpr unsigned LANES = 32;

enum class Meeting { none, block, warp, shuffle, vote };

struct Wait {
  Meeting meeting = Meeting::none;
  int operation = 0;  // which Shuffle, Vote or Count
  unsigned mask = 0;
  int width = 0;
  Site site{"", 0};
  std::uint64_t bits = 0;  // what the thread brings
  int argument = 0;
};

enum class State { running, waiting, done };

struct Thread {
  unsigned number = 0;
  State state = State::running;
  Wait wait;
  std::uint64_t result = 0;  // what it takes away
  // For the watch: accesses before the last warp barrier lie in earlier segments than those after it, and `seen` is,
  // for each lane of its warp, the last segment whose accesses are ordered before what this thread does now.
  std::uint32_t segment = 0;
  std::uint32_t seen[LANES] = {};
  unsigned warp() const { return number / LANES; }
  unsigned lane() const { return number % LANES; }
};

// A meeting of lanes that is not complete, and those that have come.
struct Gathering {
  Wait wait;
  unsigned lanes;
};

struct Mutation {  // a planted bug: the meeting at this line is skipped, or a shuffle's argument halved
  std::string file;
  int line = 0;
};

std::string text(Index3 index);
std::string text(const Site& site);
std::string text(const Wait& wait);
std::string name_of(Meeting meeting, int operation);
bool same(const Site& a, const Site& b);

// What the mode of running and the watch bring.
void suspend(Thread& thread);
void resume(Thread& thread);
void all_have_met();                    // at a barrier of the block
void warp_has_met(unsigned warp, unsigned mask);  // at a barrier of some lanes
[[noreturn]] void raise(const std::string& kind, const std::string& message);

class Threads {
 public:
  std::vector<Thread> threads;

  void start(unsigned count);
  std::uint64_t meet(Thread& thread, const Wait& wait);
  void leave(Thread& thread);

 private:
  unsigned arrived_ = 0;  // at the barrier of the block
  unsigned running_ = 0;
  std::vector<std::vector<Gathering>> gatherings_;  // of each warp
  [[noreturn]] void deadlock() const;
  void arrive_at_block(Thread& thread);
  void arrive_at_warp(Thread& thread);
  void check_partners(const Thread& thread) const;
  [[noreturn]] void refuse(const Thread& thread, const Thread& other) const;  // the other will not come
  void finish_warp(Thread& first, unsigned mask);
  std::uint64_t shuffled(const Thread& thread) const;
  std::uint64_t voted(const Thread& thread) const;
  void wake(Thread& thread);
};

}  // namespace lowbit_shim
