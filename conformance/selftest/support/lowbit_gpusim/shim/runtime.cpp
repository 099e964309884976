// A launch: runs the blocks in an order drawn from the seed, each with fresh shared memory, until all have run or one
// has failed.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "launch.h"
#include "modes.h"
#include "watch.h"

extern "C" {
extern char __start_lowbit_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_lowbit_shared[] __attribute__((weak, visibility("hidden")));
}

namespace lowbit_shim {

namespace {

const lowbit_shim_launch* launch = nullptr;
const Kernel* kernel_of_launch = nullptr;
Threads all_threads;
Index3 this_block;
char* shared = nullptr;
std::uint64_t random_state = 0;
std::string failure;  // empty if nothing has failed
Mutation mutation;
struct Met {
  Site site;
  Meeting meeting;
  int operation;
};
std::vector<Met> met_at;
std::string meetings;

std::uint64_t random_bits() {  // splitmix64
  std::uint64_t bits = random_state += 0x9e3779b97f4a7c15u;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

void note(Meeting meeting, int operation, const Site& site) {
  for (const Met& met : met_at)
    if (same(met.site, site) && met.meeting == meeting && met.operation == operation) return;
  met_at.push_back({site, meeting, operation});
}

bool mutated(const Site& site) {
  return mutation.line == site.line && text(site) == mutation.file + ":" + std::to_string(mutation.line);
}

std::vector<Kernel>& kernels() {
  static std::vector<Kernel> all;
  return all;
}

const Kernel* find_kernel(const char* name) {
  for (const Kernel& kernel : kernels())
    if (std::strcmp(kernel.name, name) == 0) return &kernel;
  return nullptr;
}

// Not by memset: between variables lie bytes of the sanitizer, which must not be written.
__attribute__((no_sanitize("address"))) void poison(char* begin, std::size_t count) {
  for (volatile char* byte = begin; byte < begin + count; ++byte) *byte = static_cast<char>(POISON);
}

void run_blocks() {
  const unsigned x = launch->grid[0], y = launch->grid[1], z = launch->grid[2];
  std::vector<unsigned> order(static_cast<std::size_t>(x) * y * z);
  for (unsigned i = 0; i < order.size(); ++i) {
    order[i] = i;
    std::swap(order[i], order[pick(i + 1)]);
  }
  const std::size_t fixed = static_cast<std::size_t>(__stop_lowbit_shared - __start_lowbit_shared);
  for (const unsigned number : order) {
    this_block = {number % x, number / x % y, number / x / y};
    std::memset(shared, POISON, static_cast<std::size_t>(launch->shared));
    poison(__start_lowbit_shared, fixed);
    all_threads.start(launch->block);
#if defined(LOWBIT_SHIM_WATCH)
    watch_block(this_block);
#endif
    run_block();
    if (!failure.empty()) return;
  }
}

}  // namespace

Known::Known(const Kernel& kernel) { kernels().push_back(kernel); }

Threads& threads() { return all_threads; }
void call_kernel() { kernel_of_launch->call(launch->slots); }
std::size_t pick(std::size_t count) { return random_bits() % count; }

void raise(const std::string& kind, const std::string& message) {
  const bool inside = current() != nullptr;
  failure = kind + "\n" + (inside ? "block " + text(this_block) + ": " : "") + message;
#if defined(LOWBIT_SHIM_WATCH)
  watch_over();
#endif
  if (inside) abandon(failure);
  std::abort();  // only a running thread can fail
}

// **What kernels call.**

Index3 thread_index() { return {current()->number, 0, 0}; }
Index3 block_index() { return this_block; }
Index3 block_size() { return {launch->block, 1, 1}; }
Index3 grid_size() { return {launch->grid[0], launch->grid[1], launch->grid[2]}; }
void* dynamic_shared() { return shared; }

namespace {

// Meet other threads. Where a bug is planted at this line, skip the meeting and return the thread's own operand.
std::uint64_t meet(Wait wait) {
  Thread& thread = *current();
  const bool barrier = wait.meeting == Meeting::block || wait.meeting == Meeting::warp;
  lock();
  const bool planted = mutated(wait.site);
  note(wait.meeting, wait.operation, wait.site);
  unlock();
  if (planted && wait.meeting != Meeting::shuffle) return wait.bits;
  if (planted) wait.argument = wait.operation == static_cast<int>(Shuffle::index) ? wait.argument + 1 : wait.argument / 2;
  if (barrier) before_meeting(thread, wait.meeting == Meeting::block);
  lock();
  const std::uint64_t result = all_threads.meet(thread, wait);
  unlock();
  if (barrier) after_meeting(thread, wait.meeting == Meeting::block);
  return result;
}

}  // namespace

int block_barrier(Count count, int predicate, Site site) {
  return static_cast<int>(meet({Meeting::block, static_cast<int>(count), 0, 0, site, predicate != 0, 0}));
}

void warp_barrier(unsigned mask, Site site) { meet({Meeting::warp, 0, mask, 0, site, 0, 0}); }

std::uint64_t shuffle(Shuffle kind, unsigned mask, std::uint64_t bits, int argument, int width, Site site) {
  return meet({Meeting::shuffle, static_cast<int>(kind), mask, width, site, bits, argument});
}

unsigned vote(Vote kind, unsigned mask, bool predicate, Site site) {
  return static_cast<unsigned>(meet({Meeting::vote, static_cast<int>(kind), mask, 0, site, predicate, 0}));
}

#if !defined(LOWBIT_SHIM_WATCH)
void all_have_met() {}
void warp_has_met(unsigned, unsigned) {}
#endif

}  // namespace lowbit_shim

using namespace lowbit_shim;

extern "C" {

int lowbit_shim_run(const lowbit_shim_launch* asked) {
  launch = asked;
  kernel_of_launch = find_kernel(asked->kernel);
  failure.clear();
  if (!kernel_of_launch || kernel_of_launch->count != asked->slot_count) std::abort();  // the caller has checked this
  random_state = asked->seed;
  mutation = {asked->mutation_file ? asked->mutation_file : "", asked->mutation_line};
  // Exactly the requested size, so that the sanitizer notices accesses past the end.
  void* room = nullptr;
  if (posix_memalign(&room, 128, static_cast<std::size_t>(asked->shared)) != 0) std::abort();
  shared = static_cast<char*>(room);
#if defined(LOWBIT_SHIM_WATCH)
  watch_launch(*asked, shared, static_cast<std::size_t>(asked->shared), __start_lowbit_shared,
               static_cast<std::size_t>(__stop_lowbit_shared - __start_lowbit_shared));
#endif
  run_blocks();
#if defined(LOWBIT_SHIM_WATCH)
  if (failure.empty()) watch_end(failure);
  watch_over();
#endif
  std::free(shared);
  std::snprintf(asked->message, static_cast<std::size_t>(asked->room), "%s", failure.c_str());
  return failure.empty() ? 0 : 1;
}

const char* lowbit_shim_describe(const char* name) {
  static char description[1024];
  const Kernel* kernel = find_kernel(name);
  if (!kernel) return nullptr;
  kernel->describe(description);
  return description;
}

const char* lowbit_shim_meetings() {
  meetings.clear();
  for (const Met& met : met_at) meetings += name_of(met.meeting, met.operation) + " " + text(met.site) + "\n";
  met_at.clear();
  return meetings.c_str();
}
}
