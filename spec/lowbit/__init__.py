"""lowbit: the executable specification of low-bit LLM inference.

Quantise a matrix, multiply by it on a backend, and prove that the backend is right:

>>> import lowbit, numpy as np
>>> W = lowbit.quantize(np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32), bits=4, group_size=64)
>>> y = lowbit.matmul(np.ones(256, np.float32), W, backend="numpy")
>>> result = lowbit.certify("numpy", ["linear.qgemv"], quick=True)
>>> print(result.verdict, result.failed)
passed 0

`lowbit.load_model` runs a language model: ``lowbit.load_model("model.gguf").complete("Once upon a time")``.

To read the specification, take its chapters in this order: `lowbit.quantization.packing`, `lowbit.quantization.affine`
and `lowbit.linear.linear`; then `lowbit.contract` and `lowbit.backend` for what a kernel must keep to; then
`lowbit.attention`, `lowbit.model` and `lowbit.formats` for a whole model.
"""

__version__ = "0.1.0"
__all__ = ["__version__", "certify", "dequantize", "load_backend", "load_model", "matmul", "quantize", "uptrain"]

# Nothing is imported here, not even `typing`: with ``python -m lowbit`` the current folder still comes first.
TYPE_CHECKING = False
if TYPE_CHECKING:  # which type checkers take for true
    from lowbit.api import certify, dequantize, load_backend, load_model, matmul, quantize, uptrain
else:

    def __getattr__(name: str) -> object:
        """Import what is asked for only then: ``import lowbit`` is fast and imports no backend."""
        if name in __all__:
            from lowbit import api

            return getattr(api, name)
        raise AttributeError(f"module 'lowbit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
