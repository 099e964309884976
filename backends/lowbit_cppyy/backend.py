"""The backend: prepares matrices, and calls the kernels compiled for them."""

import threading
from importlib.metadata import PackageNotFoundError, version

from lowbit.affine import Floats, QuantizedMatrix
from lowbit.backend import Availability, Backend, Capabilities, Declaration, PreparedLinear
from lowbit.bounds import Arithmetic
from lowbit.check import check_choice, check_integer
from lowbit.errors import UnavailableError
from lowbit_cppyy import processor
from lowbit_cppyy.compiler import Linear, Pool, raise_failure, runtime
from lowbit_cppyy.isa import TABLES
from lowbit_cppyy.kernels import PANEL, Kernel
from lowbit_cppyy.layout import PanelLayout
from lowbit_cppyy.toolchain import check_toolchain


def roundings(rows: int, group_size: int) -> int:
    """The most roundings that a term meets, with G groups of n codes at most; fused or not, whichever is more.

    A product x·q: itself 1, then n − 1 additions to the group's sum, the first being to 0. A term of X: ⌈n/8⌉ − 1
    additions to a running sum and 3 between the eight; where the offset is −scale·zero, 1 for it. Then each is
    multiplied, 1, and added to y, which is 0 at first, at most 2·G − 1 times.
    """
    groups, n = -(-rows // group_size), min(rows, group_size)
    return max(n, -(-n // 8) + 3) + 2 * groups


class CppyyLinear(PreparedLinear):
    """A matrix in column panels, with its kernels compiled."""

    def __init__(self, matrix: QuantizedMatrix, layout: PanelLayout, linear: Linear) -> None:
        super().__init__("cppyy", matrix.rows, matrix.columns, layout.nbytes)
        self._linear, self._handle = linear, linear.handle
        self._multiply = runtime().multiply

    def _qgemv(self, x: Floats, out: Floats) -> None:
        if failure := self._multiply(self._handle, x, out, 1):
            raise_failure(failure)

    def _qgemm(self, x: Floats, out: Floats) -> None:
        if failure := self._multiply(self._handle, x, out, len(x)):
            raise_failure(failure)


class CppyyBackend(Backend):
    """Kernels generated as C++ and compiled at run time for this processor.

    Several threads may call it at once: the first has the threads of the pool, the others compute alone. Results
    depend neither on that nor on the number of threads.

    Args:
        isa: ``avx2`` or ``plain``; by default ``LOWBIT_CPPYY_ISA``, or else the best that this processor has.
        threads: threads that compute, the caller's included; by default ``LOWBIT_NUM_THREADS``, or else one for each
            processor that this process may use.

    Raises:
        ArgumentError: an instruction set that does not exist, or less than one thread.
    """

    name = "cppyy"

    def __init__(self, isa: str | None = None, threads: int | None = None) -> None:
        if isa is not None:
            check_choice("isa", isa, tuple(TABLES))
        if threads is not None:
            check_integer("threads", threads, 1, processor.MOST_THREADS)
        self._isa, self._threads = isa, threads
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        self._closed = False

    def availability(self) -> Availability:
        try:
            check_toolchain()
            processor.choose_table(self._isa)
            processor.choose_threads(self._threads)
        except UnavailableError as error:
            return Availability(False, error.reason, error.remedy)
        return Availability(True)

    def capabilities(self) -> Capabilities:
        declaration = Declaration(arithmetic=Arithmetic("factored", "float32", roundings))
        operations = dict.fromkeys(("linear.qgemv", "linear.qgemm"), declaration)
        return Capabilities(operations, concurrent=True, details=self._details(), profiles=("lowbit-1.0/qgemv-4",))

    def _details(self) -> dict[str, str]:
        """For reports; an unavailable backend has none."""
        try:
            table = processor.choose_table(self._isa)
            threads = processor.choose_threads(self._threads)
            return {"instruction set": table.name, "threads": str(threads), "cppyy": version("cppyy")}
        except (UnavailableError, PackageNotFoundError, ImportError):
            return {}

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        table = processor.choose_table(self._isa)  # before anything is compiled
        pool = self._threads_of_this()
        layout = PanelLayout.of(matrix, PANEL)
        one, many = (Kernel("qgemv", matrix.bits, table), Kernel("qgemm", matrix.bits, table))
        return CppyyLinear(matrix, layout, Linear(layout, layout.apply(matrix), pool, one, many))

    def _threads_of_this(self) -> Pool:
        """The pool of this backend, made when first needed."""
        threads = processor.choose_threads(self._threads)
        with self._lock:
            if self._closed:
                raise_failure(3)
            if self._pool is None:
                self._pool = Pool(threads)
            return self._pool

    def close(self) -> None:
        """End the threads; matrices prepared here can then no longer be multiplied by."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.stop()
