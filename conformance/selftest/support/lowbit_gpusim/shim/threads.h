// The threads of a block, and what each waits for.
//
// A *meeting* is a barrier, a shuffle or a vote. This code decides, for fibers and operating-system threads alike,
// which threads may meet, when a meeting is complete, and which meetings can never be completed. It does not wait
// itself: the mode (modes.h) provides `suspend`, which returns when `resume` has been called for the thread.
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
  int operation = 0;  // a value of Shuffle, Vote or Count
  unsigned mask = 0;
  int width = 0;
  Site site{"", 0};
  std::uint64_t bits = 0;  // the thread's operand
  int argument = 0;
};

enum class State { running, waiting, done };

struct Thread {
  unsigned number = 0;
  State state = State::running;
  Wait wait;
  std::uint64_t result = 0;  // the thread's result
  // For the watch. Each warp barrier begins a new segment. For each lane of the thread's warp, `seen` is the last
  // segment whose accesses are ordered before the thread's next access.
  std::uint32_t segment = 0;
  std::uint32_t seen[LANES] = {};
  unsigned warp() const { return number / LANES; }
  unsigned lane() const { return number % LANES; }
};

// An incomplete meeting of lanes, and the lanes that have arrived.
struct Gathering {
  Wait wait;
  unsigned lanes;
};

struct Mutation {  // a planted bug: skips the meeting at this line, or halves a shuffle's argument
  std::string file;
  int line = 0;
};

std::string text(Index3 index);
std::string text(const Site& site);
std::string text(const Wait& wait);
std::string name_of(Meeting meeting, int operation);
bool same(const Site& a, const Site& b);

// Provided by the mode and by the watch.
void suspend(Thread& thread);
void resume(Thread& thread);
void all_have_met();                    // called at a barrier of the block
void warp_has_met(unsigned warp, unsigned mask);  // called at a barrier of some lanes
[[noreturn]] void raise(const std::string& kind, const std::string& message);

class Threads {
 public:
  std::vector<Thread> threads;

  void start(unsigned count);
  std::uint64_t meet(Thread& thread, const Wait& wait);
  void leave(Thread& thread);

 private:
  unsigned arrived_ = 0;  // threads at the barrier of the block
  unsigned running_ = 0;
  std::vector<std::vector<Gathering>> gatherings_;  // for each warp
  [[noreturn]] void deadlock() const;
  void arrive_at_block(Thread& thread);
  void arrive_at_warp(Thread& thread);
  void check_partners(const Thread& thread) const;
  [[noreturn]] void refuse(const Thread& thread, const Thread& other) const;  // `other` will never arrive
  void finish_warp(Thread& first, unsigned mask);
  std::uint64_t shuffled(const Thread& thread) const;
  std::uint64_t voted(const Thread& thread) const;
  void wake(Thread& thread);
};

}  // namespace lowbit_shim
