"""The kernels' own C++ on a processor: compiled by g++, run thread by thread, and watched at every access.

Why: a kernel that has only run where it happens to work proves little. What goes wrong in kernels, a barrier that is
missing, a lane that is not there, a word that nobody wrote, shows on a device now and then or never, and a machine
without one shows nothing at all. Here the same sources are compiled with `cuda.h` in place of CUDA's own names.
"""
