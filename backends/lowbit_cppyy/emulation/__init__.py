"""The backend on an ARM processor that QEMU emulates, so that its kernels can be certified without one.

The suite takes it as it takes any backend::

    lowbit conformance lowbit_cppyy.emulation:Neon
    lowbit conformance lowbit_cppyy.emulation:NeonDot

Python runs on this machine. The C++ runs in a process of its own, the guest, which has the same headers and loads the
same kernels, made by a cross compiler. Only the compiler and the calls are replaced: layouts, recipes and programs are
those of `lowbit_cppyy`. Speed says nothing here.

Debian and Ubuntu have both tools: ``apt-get install g++-aarch64-linux-gnu qemu-user``.
"""

from lowbit_cppyy.emulation.backend import EmulatedBackend, Neon, NeonDot

__all__ = ["EmulatedBackend", "Neon", "NeonDot"]
