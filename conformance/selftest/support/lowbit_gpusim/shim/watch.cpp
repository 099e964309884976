#include "watch.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "modes.h"

// The bounds of the library's own memory, from the linker.
extern "C" {
extern char __ehdr_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));
}

namespace lowbit_shim {

namespace {

// The last relevant access to some bytes of a word. Lanes of one segment share an entry.
struct Access {
  std::uint32_t next;  // the next entry of the same word, or 0
  std::uint32_t block;
  std::uint32_t segment;
  std::uint32_t lanes;
  const void* line;
  std::uint16_t warp;
  std::uint8_t bytes;  // one bit per byte
  bool writes;
};

struct Region {
  char* begin = nullptr;
  std::int64_t nbytes = 0;
  std::int32_t access = READ;
  const char* name = "";
  bool shared = false;
  std::uint32_t* words = nullptr;  // the first entry of each word; null if the region is read-only
  std::uint8_t* written = nullptr;  // whether each byte was written; null if that is not checked
};

std::vector<Region> regions;
std::vector<Access> accesses;  // the first entry is unused
std::vector<Index3> blocks;
std::size_t last_region = 0;
std::uint32_t segments = 0;     // how many have begun in this launch
std::uint32_t block_start = 0;  // the first segment of this block
std::uint32_t met = 0;          // the first segment after the last barrier of the block
bool strict = false;
bool watching = false;
const Thread* last_thread = nullptr;
std::int64_t in_a_row = 0;  // consecutive accesses of the same thread
constexpr std::int64_t MOST_IN_A_ROW = std::int64_t(1) << 24;

std::string hex(const void* address) {
  char text[32];
  std::snprintf(text, sizeof text, "{line %lx}",
                static_cast<unsigned long>(static_cast<const char*>(address) - __ehdr_start));
  return text;
}

std::string thread_text(unsigned warp, std::uint32_t lanes) {
  return "thread " + std::to_string(warp * LANES + static_cast<unsigned>(__builtin_ctz(lanes)));
}

std::string where(const Region& region, std::int64_t offset) {
  return "byte " + std::to_string(offset) + " of " + region.name;
}

void add_region(const lowbit_shim_region& given, bool shared) {
  Region region;
  region.begin = static_cast<char*>(given.begin);
  region.nbytes = given.nbytes;
  region.access = given.access;
  region.name = given.name;
  region.shared = shared;
  const std::size_t bytes = static_cast<std::size_t>(given.nbytes);
  if (given.access != READ) region.words = static_cast<std::uint32_t*>(std::calloc(bytes / 4 + 2, 4));
  if (given.access == WRITE || given.access == PART) region.written = static_cast<std::uint8_t*>(std::calloc(bytes + 1, 1));
  regions.push_back(region);
}

Region* find(const char* address) {
  if (last_region < regions.size()) {
    Region& last = regions[last_region];
    if (address >= last.begin && address < last.begin + last.nbytes) return &last;
  }
  for (std::size_t i = 0; i < regions.size(); ++i) {
    if (address >= regions[i].begin && address < regions[i].begin + regions[i].nbytes) {
      last_region = i;
      return &regions[i];
    }
  }
  return nullptr;
}

// Whether the whole entry is ordered before the thread's current access.
bool before(const Access& entry, const Thread& thread) {
  if (entry.segment < block_start) return false;  // in another block
  if (entry.segment < met) return true;
  if (entry.warp != thread.warp()) return false;
  for (std::uint32_t lanes = entry.lanes & ~(1u << thread.lane()); lanes; lanes &= lanes - 1)
    if (entry.segment > thread.seen[__builtin_ctz(lanes)]) return false;
  return true;
}

[[noreturn]] void report_race(const Region& region, std::int64_t word, const Access& entry, const Thread& thread,
                              bool writes, const void* line) {
  std::uint32_t others = entry.lanes;
  for (unsigned lane = 0; entry.warp == thread.warp() && lane < LANES; ++lane)
    if (lane == thread.lane() || entry.segment <= thread.seen[lane]) others &= ~(1u << lane);
  const bool elsewhere = entry.segment < block_start;
  std::string said = "thread " + std::to_string(thread.number) + (writes ? " writes " : " reads ") +
                     where(region, word * 4) + " at " + hex(line) + ", which " +
                     thread_text(entry.warp, elsewhere ? entry.lanes : others) +
                     (elsewhere ? " of block " + text(blocks[entry.block]) : "") +
                     (entry.writes ? " writes at " : " reads at ") + hex(entry.line) +
                     (elsewhere ? "; between blocks there is no order" : "; no barrier that both wait at is between");
  raise("race", said);
}

void touch(Region& region, std::int64_t word, std::uint8_t bytes, const Thread& thread, bool writes,
           const void* line) {
  const std::uint32_t mine = 1u << thread.lane();
  const std::uint32_t block = static_cast<std::uint32_t>(blocks.size() - 1);
  bool noted = false;
  std::uint32_t* link = &region.words[word];
  while (*link) {
    Access& entry = accesses[*link];
    const bool overlap = entry.bytes & bytes;
    const bool ordered = before(entry, thread);
    if (overlap && (writes || entry.writes) && !ordered) report_race(region, word, entry, thread, writes, line);
    if (entry.segment == thread.segment && entry.warp == thread.warp() && entry.writes == writes &&
        entry.bytes == bytes) {
      entry.lanes |= mine;
      noted = true;
    } else if (ordered && (entry.bytes & ~bytes) == 0 && (writes || !entry.writes)) {
      *link = entry.next;  // later accesses that conflict with it also conflict with this one
      continue;
    }
    link = &entry.next;
  }
  if (noted) return;
  const Access entry{region.words[word], block,  thread.segment, mine, line, static_cast<std::uint16_t>(thread.warp()),
                     bytes, writes};
  region.words[word] = static_cast<std::uint32_t>(accesses.size());
  accesses.push_back(entry);
}

[[noreturn]] void report_outside(const Thread& thread, const char* address, std::size_t size, bool writes,
                                 const void* line) {
  const Region* nearest = nullptr;
  std::int64_t distance = 0;
  for (const Region& region : regions) {
    const std::int64_t below = region.begin - address, above = address - (region.begin + region.nbytes) + 1;
    const std::int64_t away = below > 0 ? below : above;
    if (!nearest || away < distance) nearest = &region, distance = away;
  }
  std::string said = "thread " + std::to_string(thread.number) + (writes ? " writes " : " reads ") +
                     std::to_string(size) + " bytes at " + hex(line);
  if (stack_owner(address) >= 0) {
    said += ", on the stack of thread " + std::to_string(stack_owner(address));
  } else if (nearest && distance < (1 << 20)) {
    said += ", from " + where(*nearest, address - nearest->begin) + ", which has " + std::to_string(nearest->nbytes);
  } else {
    said += ", far from all that it was given";
  }
  raise("bounds", said);
}

void check(const char* address, std::size_t size, bool writes, bool aligned, const void* line) {
  Thread* thread = watching ? current() : nullptr;
  if (!thread || own_stack(*thread, address)) return;
  in_a_row = thread == last_thread ? in_a_row + 1 : 0;
  last_thread = thread;
  if (in_a_row > MOST_IN_A_ROW)
    raise("endless", "thread " + std::to_string(thread->number) + " still runs at " + hex(line) + " after " +
                         std::to_string(in_a_row) + " accesses, while others wait for it to end or to meet them");
  Region* region = find(address);
  if (!region) {
    if (!writes && address >= __ehdr_start && address < _end) return;  // a constant
    report_outside(*thread, address, size, writes, line);
  }
  const std::int64_t offset = address - region->begin, end = offset + static_cast<std::int64_t>(size);
  if (end > region->nbytes) report_outside(*thread, address, size, writes, line);
  const std::string who = "thread " + std::to_string(thread->number);
  if (aligned && reinterpret_cast<std::uintptr_t>(address) % size)
    raise("alignment", who + " touches " + std::to_string(size) + " bytes at once at " + hex(line) + ", from " +
                           where(*region, offset));
  if (region->access == READ) {
    if (writes) raise("access", who + " writes " + where(*region, offset) + " at " + hex(line) + ", which is only read");
    return;
  }
  if (strict && region->shared && pick(2)) yield(*thread);
  for (std::int64_t byte = offset; region->written && byte < end; ++byte) {
    if (writes) {
      region->written[byte] = 1;
    } else if (!region->written[byte]) {
      raise("uninitialized", who + " reads " + where(*region, byte) + " at " + hex(line) + ", which nobody has written yet");
    }
  }
  for (std::int64_t word = offset / 4; word * 4 < end; ++word) {
    const int first = word * 4 < offset ? static_cast<int>(offset - word * 4) : 0;
    const int last = end - word * 4 < 4 ? static_cast<int>(end - word * 4) : 4;
    touch(*region, word, static_cast<std::uint8_t>((1 << last) - (1 << first)), *thread, writes, line);
  }
}

}  // namespace

void watch_launch(const lowbit_shim_launch& launch, char* shared_begin, std::size_t shared_bytes, char* static_begin,
                  std::size_t static_bytes) {
  watch_over();
  for (int i = 0; i < launch.region_count; ++i) add_region(launch.regions[i], false);
  const auto bytes = static_cast<std::int64_t>(shared_bytes), fixed = static_cast<std::int64_t>(static_bytes);
  if (bytes) add_region({shared_begin, bytes, WRITE, 0, "shared memory"}, true);
  if (fixed) add_region({static_begin, fixed, WRITE, 0, "shared variables"}, true);
  accesses.assign(1, Access{});
  blocks.clear();
  segments = block_start = met = 0;
  last_region = 0;
  last_thread = nullptr;
  strict = launch.strict != 0;
  watching = true;
}

void watch_block(Index3 block) {
  blocks.push_back(block);
  block_start = segments + 1;
  all_have_met();
  for (Region& region : regions) {
    if (!region.shared) continue;
    std::memset(region.words, 0, static_cast<std::size_t>(region.nbytes / 4 + 2) * 4);
    std::memset(region.written, 0, static_cast<std::size_t>(region.nbytes));
  }
}

void watch_end(std::string& failure) {
  for (const Region& region : regions) {
    if (region.shared || region.access != WRITE) continue;
    const void* gap = std::memchr(region.written, 0, static_cast<std::size_t>(region.nbytes));
    if (gap)
      failure = "unwritten\nall of " + std::string(region.name) + " is to be written, and nobody has written byte " +
                std::to_string(static_cast<const std::uint8_t*>(gap) - region.written) + " of its " +
                std::to_string(region.nbytes);
  }
}

void watch_over() {
  for (Region& region : regions) {
    std::free(region.words);
    std::free(region.written);
  }
  regions.clear();
  watching = false;
}

// **Order**: a new segment begins at each barrier.

void all_have_met() {
  met = segments + 1;
  unsigned warps = 0;
  for (Thread& thread : threads().threads) {
    thread.segment = met + thread.warp();
    warps = thread.warp() + 1;
    for (std::uint32_t& seen : thread.seen) seen = 0;  // `met` orders everything before it
  }
  segments += warps;
}

void warp_has_met(unsigned warp, unsigned mask) {
  std::uint32_t seen[LANES] = {};
  Thread* lanes = &threads().threads[warp * LANES];
  for (unsigned left = mask; left; left &= left - 1) {
    const Thread& thread = lanes[__builtin_ctz(left)];
    for (unsigned lane = 0; lane < LANES; ++lane) seen[lane] = std::max(seen[lane], thread.seen[lane]);
    seen[thread.lane()] = std::max(seen[thread.lane()], thread.segment);
  }
  ++segments;
  for (unsigned left = mask; left; left &= left - 1) {
    Thread& thread = lanes[__builtin_ctz(left)];
    std::memcpy(thread.seen, seen, sizeof seen);
    thread.segment = segments;
  }
}

}  // namespace lowbit_shim

// **What the instrumentation calls.**

#define HOOK(name, size, writes, aligned)                                                    \
  __attribute__((visibility("hidden"))) void __tsan_##name(void* address) {                  \
    lowbit_shim::check(static_cast<const char*>(address), size, writes, aligned, __builtin_return_address(0)); \
  }
#define HOOKS(size)                        \
  HOOK(read##size, size, false, true)      \
  HOOK(write##size, size, true, true)      \
  HOOK(unaligned_read##size, size, false, false) \
  HOOK(unaligned_write##size, size, true, false)

extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
__attribute__((visibility("hidden"))) void __tsan_read_range(void* address, unsigned long size) {
  lowbit_shim::check(static_cast<const char*>(address), size, false, false, __builtin_return_address(0));
}
__attribute__((visibility("hidden"))) void __tsan_write_range(void* address, unsigned long size) {
  lowbit_shim::check(static_cast<const char*>(address), size, true, false, __builtin_return_address(0));
}
__attribute__((visibility("hidden"))) void __tsan_init() {}
__attribute__((visibility("hidden"))) void __tsan_func_entry(void*) {}
__attribute__((visibility("hidden"))) void __tsan_func_exit() {}
}
