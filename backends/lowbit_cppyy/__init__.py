"""lowbit_cppyy: kernels generated as C++ and compiled at run time for this processor.

QIGen's idea, end to end: from the widths of the codes and an instruction set a program is generated
(`lowbit_cppyy.codegen.microkernel`) in the words of the paper's Table 1 (`lowbit.kernels.vector`); an instruction table
(`lowbit_cppyy.codegen.isa`) turns it into C++ (`lowbit_cppyy.codegen.lowering`); cppyy compiles it
(`lowbit_cppyy.runtime.compiler`); and a pool of threads (``cpp/pool.h``) runs it over panels of columns
(`lowbit_cppyy.layout.layout`). The same program can be run on numpy (`lowbit.kernels.interpreter`) and must give the
same bits.

Importing this package imports no compiler.
"""

from lowbit_cppyy.backend import CppyyBackend
from lowbit_cppyy.codegen.kernels import Kernel, kernel_source
from lowbit_cppyy.recipe.recipe import Recipe

__all__ = ["CppyyBackend", "Kernel", "Recipe", "kernel_source"]
