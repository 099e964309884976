"""The kernels' own C++ on a processor: compiled by g++, run thread by thread, with every memory access checked.

A test on one GPU shows little about a kernel: a missing barrier, an absent lane or an unwritten word causes errors
there rarely or never, and without a GPU there is no test at all. Here the same sources are compiled with `cuda.h` in
place of CUDA's own names, and such errors are found on every run, whether or not they change the result.

**Threads are fibers.** A thread runs until a barrier, a shuffle or a vote. A seed then decides which thread continues,
and in which order blocks run. `threads.cpp` decides which threads may meet. If a thread waits for one that has left,
waits elsewhere, or is not in the mask, an error names both threads and places; if no thread can continue, that is an
error too, so nothing hangs. Lanes follow the programming guide strictly: all lanes in a mask must arrive, and a shuffle
reads only from participating lanes.

**Accesses are checked.** g++ can insert a call before every load and store, for its own race detector. Here these calls
go to `watch.cpp`, so kernels use plain pointers. Each writable word records which threads have accessed it, at which
line; threads count the barriers that they have passed. The following are errors:

- a *race*: two threads access a word, one of them writes, and neither a barrier of the block nor one of their warp is
  between; in shared memory and in device memory, within a block and between blocks, which nothing orders;
- a read of an *unwritten* word, in shared memory or in a span that the table declares as only written;
- an access *outside* the launch's spans, or to another thread's stack; a *misaligned* access; a *write* to a span that
  the table declares as read-only; and a span that is declared as written and was not.

Spans are placed with exactly the alignment that the table declares, with gaps between them.

**Shuffles order nothing**, by the guide, although on current devices they often appear to.

**Sanitizers.** In lowbit's own tests the same sources also run as separate programs, under AddressSanitizer and
UndefinedBehaviorSanitizer with fibers, and under ThreadSanitizer with an operating-system thread for each thread of a
block.

**Planted bugs.** The runtime can skip a barrier, or read a shuffle from another lane, at a given line. The tests do
this for each one in the kernels and show that it is detected.

Not covered: errors of the device's compiler, memory orders weaker than barriers, and time.

The rules for barriers, masks and shuffles are those of the CUDA C++ programming guide.
"""
