"""lowbit_cppyy: kernels generated as C++ and compiled at run time for this processor.

It follows QIGen from end to end. For the width of the codes and an instruction set a program is generated
(`lowbit_cppyy.codegen.microkernel`) in the words of the paper's Table 1 (`lowbit.kernels.vector`). An instruction table
(`lowbit_cppyy.codegen.isa`) turns it into C++ (`lowbit_cppyy.codegen.lowering`). cppyy compiles it
(`lowbit_cppyy.runtime.compiler`), and a pool of threads (``cpp/pool.h``) runs it over panels of columns
(`lowbit_cppyy.layout.panels`). The interpreter (`lowbit.kernels.interpreter`) runs the same program on numpy and must
give the same bits.

Importing this package loads no compiler.
"""

from lowbit_cppyy.backend import CppyyBackend
from lowbit_cppyy.codegen.kernels import Kernel, kernel_source
from lowbit_cppyy.recipe import Recipe

__all__ = ["CppyyBackend", "Kernel", "Recipe", "kernel_source"]
