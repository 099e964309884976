"""The kernels' own C++ on a processor: compiled by g++, run thread by thread, and watched at every access.

Why: a kernel that has only run where it happens to work proves little. What goes wrong in kernels, a barrier that is
missing, a lane that is not there, a word that nobody wrote, shows on a device now and then or never, and a machine
without one shows nothing at all. Here the same sources are compiled with `cuda.h` in place of CUDA's own names, and
what is wrong is found on every run, whether or not it does harm on this one.

**Threads are fibers.** One runs until it meets others, in a barrier, a shuffle or a vote; which one goes on then is
decided by a seed, and so is the order of blocks. `threads.cpp` decides who may meet whom. A thread that waits for one
that has left, or waits elsewhere, or is not named in the mask, is an error that says who waits for whom and where, and
where nobody can go on, that is an error too: nothing hangs. Lanes are as strict as the programming guide allows: all
that a mask names must come, and a shuffle reads only from lanes that take part.

**Accesses are watched.** g++ can put a call before every load and store, for its own race detector. Here these calls go
to `watch.cpp`, so that kernels are written as they are, with plain pointers. Each word that may be written remembers
who touched it since when, at which line; threads count the barriers that they have passed. Found are

- a *race*: two threads touch a word, one of them writes, and neither a barrier of the block nor one of their warp is
  between; in shared memory and in the device's, within a block and between blocks, which nothing orders;
- a read of a word that *nobody has written*, in shared memory or in what the kernel's table says it only writes;
- a byte *outside* what the launch was given, or on another thread's stack; one that is not *aligned*; a *write* to what
  the table says is only read; and what the table says is written and was not.

Spans are placed so that they have the alignment that the table asks for and no more, with gaps between them.

**Shuffles order nothing**, as the guide has it, although on today's devices they often seem to.

**Sanitizers.** The same sources in programs of their own, under AddressSanitizer and UndefinedBehaviorSanitizer with
fibers, and under ThreadSanitizer with a thread of the system for each thread of a block (`build`).

**Planted bugs.** The runtime can skip a barrier, or take a shuffle from another lane, at a given line. The tests do so
for each one in the kernels and show that it is found.

What this does not see: bugs of the compiler for the device, memory order weaker than barriers make it, and time.

Source: lowbit's own; rules for barriers, masks and shuffles are those of the CUDA C++ programming guide.
"""
