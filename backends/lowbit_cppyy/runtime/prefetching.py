"""How kernels for one row of x fetch their words, each of which is read once: a choice by the processor.

**Where to.** A fetch that takes no place in the caches (``NTA``) leaves that place to the activations, and AMD's
processors were tuned with it. Intel's server processors are slower with it than with a fetch into all levels (``T0``),
by this much with 4 bits:

- Ice Lake, one thread, other work beside it: 2048 × 2048, called again and again, 1.8 times with float32 and 2.8 to 3
  with integers; 4096 × 11008, five copies in turn, 1.3 times with float32. A matrix does not seem to stay in the
  third-level cache either.
- Cascade Lake, nothing beside it, 4096 × 11008, six copies in turn: one thread 1.8 to 3.3 times with float32 and 1.8 to
  2 with integers, two threads 1.6 to 2.
- Emerald Rapids, a virtual machine: tokens of SmolLM2, one thread and two, 1.4 and 1.5 times with float32, 1.7 times
  with integers.

All these times are of fetches in order.

**Eight pages at a time.** The prefetchers of the second level, which can wait for more lines, follow a stream to the
end of its page of 4 KiB. So one core of an Ice Lake reads 12.5 GB/s of a single stream, and 15.5 GB/s of eight streams
side by side. A kernel has one stream, but its fetches need not come in order: the first eighth of each page is fetched
seven pages earlier, the second eighth six pages earlier, and so on (``fetch_in_eight_pages``). A plain reader reaches
16 GB/s this way. The best fetches in order fetch each line twice, first into the second level, 24 KiB ahead. Beside
them, kernels for 4096 × 11008 from memory are 1.3 to 1.4 times as fast with integers, at 2, 3, 4 and 8 bits, on one
thread and two, and up to 1.4 times with float32. Where instructions are the limit, as with AVX2 and float32, they are
0.9 to 1.1 times as fast. (*Measured* on an Ice Lake, with the hint ``T0``.) Parts of a sixteenth of a page are as good
as eighths; a reader reaches 14.5 GB/s with quarters, and with single lines no more than with one stream.

The last eighth of a page is fetched 4 KiB early. 2 and 8 KiB are as fast with integers; with float32 8 and 12 KiB take
up to 1.1 times as long.

**Keys and values** of a head are such a stream too. *Measured* on an Ice Lake in float32, in alternation, by ``lowbit
kernel time``: with fetches from eight pages attention of SmolLM2 after 128, 512 and 1,900 other tokens is 1.05, 1.28
and 1.41 times as fast on one thread, and 1.41 times after 1,900 on two. At most 30 KiB are fetched beyond the end of a
stream. With fetches in order, 4 KiB ahead, it is 1.1 to 1.2 times as fast. In a prompt only the first query that reads
a row fetches.

On Emerald Rapids tokens of SmolLM2 after 2,000 others are 1.38 to 1.42 times as fast on one thread, and 1.17 to 1.31
times on two, as with two fetches of each line and none of keys and values; after 128 others 1.18 to 1.24 times and 1.07
to 1.17 times, with AVX2 1.12 to 1.28 times and 0.99 to 1.12 times. (*Measured*: processes with either in alternation.)

So processors of Intel's fetch from eight pages at a time, also those that were not measured, such as Cascade Lake. All
others fetch with ``NTA``.

**Whether at all.** Kernels of integers read so fast that a fetch by an instruction holds up a Zen 4: its first-level
cache can wait for few lines, and the prefetchers of the processor, which fill the second level, can wait for more.
*Measured* on one thread and 4096 × 11008, without fetches: 1.2 to 1.9 times as fast from memory with AVX-512, 1.0 to
1.3 times with AVX2, at 2, 3, 4 and 8 bits and in groups of 16 to 128; that is 0.85 to 1 of the read limit.

The prefetchers follow a kernel only as long as it reads in one direction. With sixteen registers a unit of two planes
does not fit into them, so its words are read back and forth; Q5_K in integers then takes 1.6 times as long without
fetches.

Kernels of floats do more work for each line, and with AVX-512 they gain from fetches here too. With codes as subnormal
numbers, 4 KiB ahead is as fast as 12, and 1.3 times as fast for Q8_0. With AVX2 those that read in one direction have
none, and are 1.05 to 1.2 times as fast.

A Zen 5 loses a quarter of its speed with integers of 4 bits without fetches (``docs/data/tuning.json``), so it keeps
them, as others do that were not measured.
"""

from lowbit_cppyy.recipe import FAR, NEAR, NONE
from lowbit_cppyy.runtime.vendor import kind, made_by_intel

ROWS = 512
"""The prefetch distance for keys and values, in elements, where eight pages are fetched from at a time."""


def fetch_once() -> str:
    """The C++ expression that fetches the line at ``a`` on this processor; it is used on x86 only."""
    return "lowbit::fetch_in_eight_pages(a)" if made_by_intel() else "_mm_prefetch(a, _MM_HINT_NTA)"


def usual_distance(far: int = FAR) -> int:
    """The prefetch distance of kernels that multiply one row: `far`, or less where fetches from eight pages at a time
    run 14 KiB ahead on average anyway."""
    return NEAR if made_by_intel() else far


def distance_of_subnormals(registers: int, *, in_order: bool) -> int:
    """The prefetch distance of kernels that multiply one row of floats by codes as subnormal floats.

    Args:
        registers: of the instruction set.
        in_order: whether the kernel reads its stream in one direction.
    """
    return NONE if in_order and registers == 16 else NEAR


def distance_of_rows() -> int:
    """The prefetch distance of attention for the first queries that read some keys or values."""
    return ROWS if made_by_intel() else NONE


def distance_of_integers(*, in_order: bool = True) -> int:
    """The prefetch distance of kernels that multiply one row of integers on this processor.

    Args:
        in_order: whether the kernel reads its stream in one direction.
    """
    return NONE if in_order and kind() == "zen4" else usual_distance()
