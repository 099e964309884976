"""ONNX Runtime: MatMulNBits with integer zero-points, at accuracy levels 0 (float32) and 4 (8-bit activations).

A model holds one burst of products, each with constants of its own, no two of which are equal. Where all are equal, a
product of 576 × 1536 takes 28 µs instead of 64 (*measured*, Ice Lake, one thread): ONNX Runtime then seems to keep the
weights of a model once, and all products but the first find theirs in a cache. All models share one pool of threads,
which is made with the first session of the process, so they are as many as the plan said then.
"""

from functools import cache
from typing import Any

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.quantization.affine import dequantize
from lowbit_adapters import onnx_runtime as adapter
from lowbit_adapters.layout import group_rows
from peers.base import Contestant, Plan, Rotation, Weights


@cache
def options(threads: int) -> Any:
    """Options of a session that uses the process's pool of threads."""
    import onnxruntime

    onnxruntime.set_global_thread_pool_sizes(threads, 1)
    chosen = onnxruntime.SessionOptions()
    chosen.use_per_session_threads = False
    return chosen


def rolled(constants: dict[str, Array], turn: int) -> dict[str, Array]:
    """The constants with their outputs moved on by `turn`, so that those of no two turns are equal."""
    return {name: np.roll(array, turn, axis=0) for name, array in constants.items()}


class OnnxRuntimeContestant(Contestant):
    """Sessions whose input and outputs are bound once, where they lie."""

    def __init__(self, weights: Weights, plan: Plan, accuracy_level: int) -> None:
        import onnxruntime

        self._tile, self._weights = weights.quantized(), weights
        made = {
            "B": adapter.blocks_of(self._tile),
            "scales": group_rows(self._tile.scales),
            "zero_points": adapter.packed_zeros(self._tile),
        }
        constants = {name: weights.spread(array, 0) for name, array in made.items()}
        self.nbytes = sum(array.nbytes for array in constants.values())
        self.products, self.bursts = plan.products(self.nbytes), plan.bursts(self.nbytes)
        sizes = adapter.sizes_of(self._tile, accuracy_level) | {"N": weights.columns}
        model = adapter.model_of([rolled(constants, turn) for turn in range(self.products)], sizes)
        given = options(plan.threads)
        self._sessions = [
            onnxruntime.InferenceSession(model, given, providers=["CPUExecutionProvider"]) for _ in range(self.bursts)
        ]

    def prepare(self, x: F32) -> None:
        self._x = x
        self._out, self._others = (np.empty((len(x), self._weights.columns), np.float32) for _ in range(2))
        self._rotation = Rotation([(session, self._bound(session)) for session in self._sessions])

    def _bound(self, session: Any) -> Any:
        binding = session.io_binding()
        binding.bind_input("A", "cpu", 0, np.float32, self._x.shape, self._x.ctypes.data)
        for n in range(self.products):
            out = self._others if n else self._out
            binding.bind_output(f"Y{n}", "cpu", 0, np.float32, out.shape, out.ctypes.data)
        return binding

    def run(self) -> None:
        session, binding = self._rotation.next()
        session.run_with_iobinding(binding)

    def result(self) -> F32:
        return self._out.copy()

    def held(self) -> F32:
        return dequantize(self._tile)


def details() -> dict[str, Any]:
    """Version and build."""
    import onnxruntime

    return {"onnxruntime": onnxruntime.__version__, "build": onnxruntime.get_build_info()}
