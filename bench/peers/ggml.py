"""llama.cpp: ggml's product of matrices, by the shared libraries of llama-cpp-python, as llama.cpp itself calls it.

Weights lie in the buffer into which llama.cpp would load them: where the CPU backend has a layout of its own for a type
(*repack*), the tensor is stored in that layout. A graph is built once for each burst of products and computed again and
again by one backend with its threads, so a call pays what a layer of a running model pays. Activations are rounded to
8 bits inside the product, which is timed.

Only functions that the libraries export are called; no structure of theirs is written down here but the three
arguments of ``ggml_init``.

Source: ggml.h, ggml-backend.h and ggml-cpu.h in the project's repository.
"""

import ctypes
from functools import cache
from typing import Any

import numpy as np

from lowbit.arrays import F32, U8
from lowbit_adapters.ggml import library, library_file
from peers.base import AbsentError, Contestant, Plan, Rotation, Weights

GGML_F32 = 0
TYPES = {
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "q2_K": 10,
    "q3_K": 11,
    "q4_K": 12,
    "q5_K": 13,
    "q6_K": 14,
    "iq4_nl": 20,
    "mxfp4": 39,
}
"""Numbers in ggml.h, part of the file format."""
BLOCK = {kind: 256 if kind.endswith("_K") else 32 for kind in TYPES}

pointer, size_t, int64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
tensor, buft = pointer, pointer
SIGNATURES: dict[str, tuple[Any, ...]] = {  # what it returns, then what it takes
    "ggml_tensor_overhead": (size_t,),
    "ggml_graph_overhead": (size_t,),
    "ggml_new_tensor_2d": (tensor, pointer, ctypes.c_int, int64, int64),
    "ggml_mul_mat": (tensor, pointer, tensor, tensor),
    "ggml_new_graph": (pointer, pointer),
    "ggml_build_forward_expand": (None, pointer, tensor),
    "ggml_free": (None, pointer),
    "ggml_row_size": (size_t, ctypes.c_int, int64),
    "ggml_get_data": (pointer, tensor),
    "ggml_backend_alloc_ctx_tensors_from_buft": (pointer, pointer, buft),
    "ggml_backend_buffer_free": (None, pointer),
    "ggml_backend_buft_name": (ctypes.c_char_p, buft),
    "ggml_backend_get_device": (pointer, pointer),
    "ggml_backend_get_default_buffer_type": (buft, pointer),
    "ggml_backend_dev_backend_reg": (pointer, pointer),
    "ggml_backend_reg_get_proc_address": (pointer, pointer, ctypes.c_char_p),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, pointer, tensor),
    "ggml_backend_tensor_set": (None, tensor, pointer, size_t, size_t),
    "ggml_backend_tensor_get": (None, tensor, pointer, size_t, size_t),
    "ggml_backend_graph_compute": (ctypes.c_int, pointer, pointer),
    "ggml_backend_tensor_alloc": (ctypes.c_int, pointer, tensor, pointer),
}
CPU_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ggml_backend_cpu_init": (pointer,),
    "ggml_backend_cpu_set_n_threads": (None, pointer, ctypes.c_int),
    "ggml_backend_cpu_set_threadpool": (None, pointer, pointer),
    "ggml_threadpool_new": (pointer, pointer),
    "ggml_threadpool_pause": (None, pointer),
}


class InitParams(ctypes.Structure):
    """The argument of ``ggml_init``."""

    _fields_ = (("mem_size", size_t), ("mem_buffer", pointer), ("no_alloc", ctypes.c_bool))


@cache
def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """libggml-base and libggml-cpu, with the signatures of what is called."""
    base, file = library(), library_file()
    assert file is not None
    cpu = ctypes.CDLL(str(file.with_name(file.name.replace("base", "cpu"))))
    for loaded, signatures in ((base, SIGNATURES), (cpu, CPU_SIGNATURES)):
        for name, (returned, *taken) in signatures.items():
            getattr(loaded, name).restype, getattr(loaded, name).argtypes = returned, taken
    base.ggml_init.restype, base.ggml_init.argtypes = pointer, (InitParams,)
    base.ggml_threadpool_params_init.argtypes = (pointer, ctypes.c_int)
    return base, cpu


def quantized(kind: str, columns: F32) -> U8:
    """The blocks of a type that ggml makes of a matrix K × N: uint8, N × bytes of a column."""
    base, _ = libraries()
    rows = np.ascontiguousarray(columns.T)
    blocks = np.empty((len(rows), base.ggml_row_size(TYPES[kind], rows.shape[1])), np.uint8)
    base.ggml_quantize_chunk(TYPES[kind], rows.ctypes.data, blocks.ctypes.data, 0, *rows.shape, None)
    return blocks


class Context:
    """A context of ggml with room for so many tensors and one graph, whose tensors lie in one buffer."""

    def __init__(self, tensors: int) -> None:
        self.base, _ = libraries()
        room = tensors * self.base.ggml_tensor_overhead() + self.base.ggml_graph_overhead()
        self.handle = self.base.ggml_init(InitParams(room, None, True))
        self.buffer: int | None = None

    def matrix(self, kind: int, length: int, rows: int) -> int:
        return int(self.base.ggml_new_tensor_2d(self.handle, kind, length, rows))

    def allocate(self, where: int) -> int:
        self.buffer = self.base.ggml_backend_alloc_ctx_tensors_from_buft(self.handle, where)
        if not self.buffer:
            raise AbsentError("ggml could not allocate its tensors")
        return int(self.buffer)

    def close(self) -> None:
        if self.buffer:
            self.base.ggml_backend_buffer_free(self.buffer)
        self.base.ggml_free(self.handle)


class Engine:
    """ggml's CPU backend with its threads, made once and kept."""

    def __init__(self, threads: int) -> None:
        self.base, cpu = libraries()
        self.backend = cpu.ggml_backend_cpu_init()
        parameters = ctypes.create_string_buffer(4096)  # more than a struct ggml_threadpool_params takes
        self.base.ggml_threadpool_params_init(parameters, threads)
        cpu.ggml_backend_cpu_set_n_threads(self.backend, threads)
        self._cpu, self._threadpool = cpu, cpu.ggml_threadpool_new(parameters)
        cpu.ggml_backend_cpu_set_threadpool(self.backend, self._threadpool)
        self.device = self.base.ggml_backend_get_device(self.backend)
        self.plain = self.base.ggml_backend_get_default_buffer_type(self.backend)

    def rest(self) -> None:
        """Let the threads sleep until the next graph; without, they watch for work for a tenth of a second."""
        self._cpu.ggml_threadpool_pause(self._threadpool)

    def repacking(self, kind: int) -> int | None:
        """The buffer type with a layout of its own for this type of weights, if there is one."""
        return next((extra for extra in self._extra_bufts() if self._supports(extra, kind)), None)

    def _extra_bufts(self) -> list[int]:
        registry = self.base.ggml_backend_dev_backend_reg(self.device)
        address = self.base.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return []
        listed = ctypes.CFUNCTYPE(ctypes.POINTER(pointer), pointer)(address)(self.device)
        found: list[int] = []
        while listed and listed[len(found)]:
            found.append(int(listed[len(found)]))
        return found

    def _supports(self, where: int, kind: int) -> bool:
        """Whether the product of a matrix in such a buffer can be computed, as llama.cpp asks when it loads a model."""
        context, inputs = Context(4), Context(4)
        weights, x = context.matrix(kind, 256, 64), inputs.matrix(GGML_F32, 256, 1)
        context.allocate(where)
        product = self.base.ggml_mul_mat(inputs.handle, weights, x)
        supported = bool(self.base.ggml_backend_dev_supports_op(self.device, product))
        context.close()
        inputs.close()
        return supported


class GgmlContestant(Contestant):
    """``ggml_mul_mat`` with weights of one type; `repack` False leaves them in the layout of the file."""

    def __init__(self, weights: Weights, plan: Plan, kind: str, repack: bool = True) -> None:
        if weights.rows % BLOCK[kind]:
            raise AbsentError(f"its blocks are {BLOCK[kind]} codes long, which do not divide {weights.rows} rows")
        self._base, _ = libraries()
        self._engine = plan.store("ggml", lambda: Engine(plan.threads))
        self._weights, self._kind = weights, kind
        where = self._engine.repacking(TYPES[kind])
        self.repacked = repack and where is not None
        if not repack and where is None:
            raise AbsentError("this build has no layout of its own for it: the same as above")
        self._blocks = quantized(kind, weights.tile)
        self.nbytes = self._blocks.shape[1] * weights.columns
        self.products, self.bursts = plan.products(self.nbytes), plan.bursts(self.nbytes)
        self._store = Context(self.products * self.bursts)
        copies = range(self.products * self.bursts)
        self._tensors = [self._store.matrix(TYPES[kind], weights.rows, weights.columns) for _ in copies]
        self._store.allocate(where if self.repacked and where else self._engine.plain)
        self._fill()
        self._holders: list[Context] = []

    def _fill(self) -> None:
        """Store all columns once through the backend, and copy the bytes that it made of them."""
        whole = self._weights.spread(self._blocks, 0)
        first, *others = self._tensors
        self._base.ggml_backend_tensor_set(first, whole.ctypes.data, 0, whole.nbytes)
        for other in others:
            ctypes.memmove(self._base.ggml_get_data(other), self._base.ggml_get_data(first), whole.nbytes)

    def prepare(self, x: F32) -> None:
        self._free_graphs()
        self._inputs, self._products = Context(2), Context(len(self._tensors))
        given = self._inputs.matrix(GGML_F32, x.shape[1], len(x))
        out = self._inputs.matrix(GGML_F32, self._weights.columns, len(x))
        buffer = self._inputs.allocate(self._engine.plain)
        self._base.ggml_backend_tensor_set(given, np.ascontiguousarray(x).ctypes.data, 0, x.nbytes)
        outputs = [self._base.ggml_mul_mat(self._products.handle, weights, given) for weights in self._tensors]
        for output in outputs:  # all results go to one place, as those of the other contestants do
            self._base.ggml_backend_tensor_alloc(buffer, output, self._base.ggml_get_data(out))
        self._out, self._shape = out, (len(x), self._weights.columns)
        self._holders = [Context(0) for _ in range(self.bursts)]
        graphs = (self._graph(holder, outputs[n * self.products :]) for n, holder in enumerate(self._holders))
        self._rotation = Rotation(list(graphs))

    def _graph(self, holder: Context, outputs: list[int]) -> int:
        """The graph of one burst."""
        graph = self._base.ggml_new_graph(holder.handle)
        for output in outputs[: self.products]:
            self._base.ggml_build_forward_expand(graph, output)
        return int(graph)

    def run(self) -> None:
        if self._base.ggml_backend_graph_compute(self._engine.backend, self._rotation.next()):
            raise RuntimeError("ggml_backend_graph_compute failed")

    def rest(self) -> None:
        self._engine.rest()

    def result(self) -> F32:
        out = np.empty(self._shape, np.float32)
        self._base.ggml_backend_tensor_get(self._out, out.ctypes.data, 0, out.nbytes)
        return out

    def held(self) -> F32:
        decode = getattr(self._base, f"dequantize_row_{self._kind}")
        decode.argtypes, decode.restype = (pointer, pointer, int64), None
        rows = np.empty((len(self._blocks), self._weights.rows), np.float32)
        decode(self._blocks.ctypes.data, rows.ctypes.data, rows.size)
        return np.ascontiguousarray(rows.T)

    def _free_graphs(self) -> None:
        for context in (*self._holders, *((self._products, self._inputs) if self._holders else ())):
            context.close()
        self._holders = []

    def close(self) -> None:
        self._free_graphs()
        self._store.close()


def details() -> dict[str, Any]:
    """Versions and what the build was made for."""
    from importlib.metadata import version

    import llama_cpp

    system = llama_cpp.llama_print_system_info().decode().strip(" |\n")
    return {"llama-cpp-python": version("llama-cpp-python"), "build": system}
