#include "threads.h"

#include <cstring>

namespace lowbit_shim {

std::string text(Index3 index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

std::string text(const Site& site) {
  const char* slash = std::strrchr(site.file, '/');
  return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

std::string name_of(Meeting meeting, int operation) {
  static const char* const shuffles[] = {"__shfl_xor_sync", "__shfl_down_sync", "__shfl_up_sync", "__shfl_sync"};
  static const char* const votes[] = {"__ballot_sync", "__any_sync", "__all_sync"};
  switch (meeting) {
    case Meeting::block: return "__syncthreads";
    case Meeting::warp: return "__syncwarp";
    case Meeting::shuffle: return shuffles[operation];
    case Meeting::vote: return votes[operation];
    default: return "nothing";
  }
}

std::string text(const Wait& wait) {
  std::string said = name_of(wait.meeting, wait.operation) + " at " + text(wait.site);
  if (wait.meeting != Meeting::block) {
    char mask[16];
    std::snprintf(mask, sizeof mask, "0x%08x", wait.mask);
    said += std::string(" with lanes ") + mask;
  }
  return said;
}

bool same(const Site& a, const Site& b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

static bool together(const Wait& a, const Wait& b) {
  return a.meeting == b.meeting && a.operation == b.operation && a.mask == b.mask && same(a.site, b.site);
}

static unsigned first_of(unsigned lanes) { return static_cast<unsigned>(__builtin_ctz(lanes)); }

static std::string thread_text(const Thread& thread) { return "thread " + std::to_string(thread.number); }

void Threads::start(unsigned count) {
  threads.assign(count, Thread{});
  for (unsigned number = 0; number < count; ++number) threads[number].number = number;
  gatherings_.assign(count / LANES + 1, {});
  arrived_ = 0;
  running_ = count;
}

std::uint64_t Threads::meet(Thread& thread, const Wait& wait) {
  thread.wait = wait;
  thread.state = State::waiting;
  --running_;
  if (wait.meeting == Meeting::block) {
    arrive_at_block(thread);
  } else {
    arrive_at_warp(thread);
  }
  if (running_ == 0) deadlock();
  suspend(thread);
  return thread.result;
}

void Threads::wake(Thread& thread) {
  thread.state = State::running;
  thread.wait.meeting = Meeting::none;
  ++running_;
  resume(thread);
}

void Threads::leave(Thread& thread) {
  thread.state = State::done;
  --running_;
  for (const Thread& other : threads) {
    if (other.state != State::waiting) continue;
    const bool waited_for = other.wait.meeting == Meeting::block ||
                            (other.warp() == thread.warp() && (other.wait.mask >> thread.lane() & 1u));
    if (waited_for) refuse(other, thread);
  }
  if (running_ > 0) return;
  for (const Thread& other : threads)
    if (other.state == State::waiting) deadlock();
}

void Threads::deadlock() const {
  std::string said = "no thread can go on:";
  unsigned told = 0;
  for (const Thread& thread : threads) {
    if (thread.state != State::waiting || ++told > 4) continue;
    said += std::string(told > 1 ? ";" : "") + " " + thread_text(thread) + " waits in " + text(thread.wait);
  }
  if (told > 4) said += "; and " + std::to_string(told - 4) + " more wait";
  raise("deadlock", said);
}

void Threads::arrive_at_block(Thread& thread) {
  ++arrived_;
  for (const Thread& other : threads) {
    if (other.state == State::done) refuse(thread, other);
    if (other.wait.meeting != Meeting::block || &other == &thread) continue;
    if (!same(other.wait.site, thread.wait.site) || other.wait.operation != thread.wait.operation)
      refuse(thread, other);
    break;  // one suffices: threads that wait here were compared with one another when they arrived
  }
  for (const Gathering& gathering : gatherings_[thread.warp()])
    if (gathering.wait.mask >> thread.lane() & 1u)
      refuse(thread, threads[thread.number - thread.lane() + first_of(gathering.lanes)]);
  if (arrived_ < threads.size()) return;
  arrived_ = 0;
  std::uint64_t count = 0;
  for (const Thread& other : threads) count += other.wait.bits != 0;
  const Count operation = static_cast<Count>(thread.wait.operation);
  const std::uint64_t result = operation == Count::or_    ? count > 0
                               : operation == Count::and_ ? count == threads.size()
                                                          : count;
  all_have_met();
  for (Thread& other : threads) {
    other.result = result;
    wake(other);
  }
}

void Threads::refuse(const Thread& thread, const Thread& other) const {
  const std::string waits = thread_text(thread) + " waits in " + text(thread.wait);
  if (other.state == State::done) raise("barrier", waits + " for " + thread_text(other) + ", which has left the kernel");
  raise("barrier", waits + ", but " + thread_text(other) + " in " + text(other.wait));
}

void Threads::arrive_at_warp(Thread& thread) {
  const unsigned mask = thread.wait.mask, bit = 1u << thread.lane();
  if (!(mask & bit))
    raise("mask", thread_text(thread) + " is in " + text(thread.wait) + ", and is not one of them");
  std::vector<Gathering>& gatherings = gatherings_[thread.warp()];
  Gathering* mine = nullptr;
  for (Gathering& gathering : gatherings) {
    if (together(gathering.wait, thread.wait)) {
      mine = &gathering;
    } else if ((gathering.wait.mask & bit) && (gathering.lanes & mask)) {  // each waits for the other one
      refuse(thread, threads[thread.number - thread.lane() + first_of(gathering.lanes & mask)]);
    }
  }
  if (!mine) {
    check_partners(thread);  // the first lane checks for all
    mine = &gatherings.emplace_back(Gathering{thread.wait, 0});
  }
  mine->lanes |= bit;
  if (mine->lanes != mask) return;
  *mine = gatherings.back();
  gatherings.pop_back();
  finish_warp(thread, mask);
}

// Whether all lanes of a mask can still arrive.
void Threads::check_partners(const Thread& thread) const {
  for (unsigned lanes = thread.wait.mask; lanes; lanes &= lanes - 1) {
    const unsigned number = thread.number - thread.lane() + first_of(lanes);
    if (number >= threads.size())
      raise("mask", thread_text(thread) + " waits in " + text(thread.wait) + " for lane " +
                        std::to_string(first_of(lanes)) + ", which its warp does not have");
    const Thread& other = threads[number];
    if (other.state == State::done || (&other != &thread && other.wait.meeting == Meeting::block)) refuse(thread, other);
  }
}

void Threads::finish_warp(Thread& first, unsigned mask) {
  if (first.wait.meeting == Meeting::warp) warp_has_met(first.warp(), mask);
  const unsigned start = first.warp() * LANES;
  for (unsigned lane = 0; lane < LANES; ++lane) {
    if (!(mask >> lane & 1u)) continue;
    Thread& thread = threads[start + lane];
    if (thread.wait.meeting == Meeting::shuffle) thread.result = shuffled(thread);
    if (thread.wait.meeting == Meeting::vote) thread.result = voted(thread);
  }
  for (unsigned lane = 0; lane < LANES; ++lane) {
    if (mask >> lane & 1u) wake(threads[start + lane]);
  }
}

std::uint64_t Threads::shuffled(const Thread& thread) const {
  const Wait& wait = thread.wait;
  const int lane = static_cast<int>(thread.lane());
  if (wait.width < 1 || wait.width > 32 || (wait.width & (wait.width - 1)))
    raise("mask", thread_text(thread) + " is in " + text(wait) + " with a width of " + std::to_string(wait.width));
  const int first = lane & ~(wait.width - 1), end = first + wait.width;
  int source = lane;
  switch (static_cast<Shuffle>(wait.operation)) {
    case Shuffle::xor_: source = lane ^ wait.argument; break;
    case Shuffle::down: source = lane + wait.argument; break;
    case Shuffle::up: source = lane - wait.argument; break;
    case Shuffle::index: source = first | (wait.argument & (wait.width - 1)); break;
  }
  // A lane whose source lies outside its part of the warp keeps its own value; a xor may also read from earlier parts.
  const bool xored = static_cast<Shuffle>(wait.operation) == Shuffle::xor_;
  if (source >= end || source < (xored ? 0 : first)) source = lane;
  if (!(wait.mask >> source & 1u))
    raise("mask", thread_text(thread) + " is in " + text(wait) + " and reads lane " + std::to_string(source) +
                      ", which does not take part");
  return threads[thread.warp() * LANES + static_cast<unsigned>(source)].wait.bits;
}

std::uint64_t Threads::voted(const Thread& thread) const {
  unsigned votes = 0;
  for (unsigned lane = 0; lane < LANES; ++lane) {
    if ((thread.wait.mask >> lane & 1u) && threads[thread.warp() * LANES + lane].wait.bits) votes |= 1u << lane;
  }
  switch (static_cast<Vote>(thread.wait.operation)) {
    case Vote::any: return votes != 0;
    case Vote::all: return votes == thread.wait.mask;
    default: return votes;
  }
}

}  // namespace lowbit_shim
