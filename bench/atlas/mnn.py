"""MNN: a convolution of 1 × 1 with quantised weights, which is what its converter makes of a linear layer.

A model is written as JSON and converted, and what that prints goes nowhere. The command ``mnnconvert`` is not called,
since it installs a package that reports its use. ``memory`` is high, so weights are dequantised when the model is
loaded; for low memory the product casts its activations to 8 bits.

Source: MNN's documentation (weight quantisation; Session config), its schema ``CaffeOp.fbs`` (IDSTQuan) and
``ConvolutionCommon.cpp``.
"""

import ctypes
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from atlas.entry import Entry, Project, library
from lowbit.arrays import F32, Array
from lowbit.backend import Range

tools = library("_tools")
nn = library("MNN.nn")
expr = library("MNN.expr")

GROUPS: dict[str, object] = {"group_size": (32, 64, 128), "rows": Range(128)}


def buffer(codes: Array, bits: int, low: int) -> list[int]:
    """Codes N × K of 0 to 2^bits - 1 as MNN stores them: sizes, the numbers that codes stand for, and the codes."""
    numbers = np.arange(low, low + 2**bits).astype(np.int8).tolist()
    octets = codes if bits == 8 else codes[:, ::2] << 4 | codes[:, 1::2]
    return [*sizes_of(codes), len(numbers) % 256, *numbers, *octets.view(np.int8).reshape(-1).tolist()]


def sizes_of(codes: Array) -> list[int]:
    """The number of axes, then each length; of 16 bits where that is enough."""
    return list(map(int, np.array(codes.shape, np.uint16).view(np.int8)))


def convolution(quantised: dict[str, Any], rows: int, columns: int) -> dict[str, Any]:
    """A model of one convolution."""
    common = {"kernelX": 1, "kernelY": 1, "inputCount": rows, "outputCount": columns, "padMode": "CAFFE"}
    main = {"common": common, "bias": [0.0] * columns, "quanParameter": quantised}
    layouts = [{"source": "NCHW", "dest": "NC4HW4"}, {"source": "NC4HW4", "dest": "NCHW"}]
    steps = [
        ("Input", "Input", {"dims": [1, rows, 1, 1], "dtype": "DT_FLOAT", "dformat": "NCHW"}),
        ("ConvertTensor", "TensorConvertInfo", layouts[0]),
        ("Convolution", "Convolution2D", main),
        ("ConvertTensor", "TensorConvertInfo", layouts[1]),
    ]
    made = [
        {"type": type, "main_type": kind, "main": told, "name": f"t{n}", "outputIndexes": [n]}
        | ({"inputIndexes": [n - 1]} if n else {})
        for n, (type, kind, told) in enumerate(steps)
    ]
    return {"oplists": made, "tensorName": [f"t{n}" for n in range(4)], "outputName": ["t3"], "sourceType": "ONNX"}


@contextmanager
def silent() -> Iterator[None]:
    """Nothing reaches standard output, of C either."""
    kept = os.dup(1)
    try:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


@lru_cache(maxsize=4)
def loaded(told: str) -> Any:
    """The model that a text describes."""
    with tempfile.TemporaryDirectory() as folder, silent():
        source, model = (str(Path(folder) / name) for name in ("model.json", "model.mnn"))
        Path(source).write_text(told)
        tools.mnnconvert(["mnnconvert", "-f", "JSON", "--modelFile", source, "--MNNModel", model])
        choices = {"backend": "CPU", "precision": "high", "memory": "high", "numThread": 1}
        return nn.load_module_from_file(model, ["t0"], ["t3"], runtime_manager=nn.create_runtime_manager((choices,)))


def product(x: F32, codes: Array, bits: int, low: int, alpha: F32, columns: int) -> F32:
    """``x`` times codes N × K with the numbers that MNN applies to them."""
    rows = x.shape[-1]
    quantised = {"buffer": [2, *buffer(codes, bits, low)], "alpha": alpha.astype(np.float64).reshape(-1).tolist()}
    quantised |= {"type": 1, "aMaxOrBits": bits, "aMin": low, "quantScale": 1.0}
    quantised |= {"readType": columns if alpha.ndim == 3 else 0}
    model = loaded(json.dumps(convolution(quantised, rows, columns)))
    batch = x.size // rows
    result = model.forward([expr.const(x.reshape(batch, rows), [batch, rows, 1, 1], expr.NCHW)])[0]
    return np.array(result.read()).reshape(*x.shape[:-1], columns)


def octets(x: F32, codes: Array, scale: F32, columns: int) -> F32:
    return product(x, codes.view(np.uint8) ^ 0x80, 8, -128, scale, columns)


def packed(x: F32, weight_packed: Array, weight_scale: Array, columns: int) -> F32:
    return product(x, halves(weight_packed), 4, -8, weight_scale, columns)


def minima(x: F32, codes: Array, scale: Array, minimum: Array, columns: int) -> F32:
    """Two numbers for each group: what the least code stands for, and the scale."""
    return product(x, halves(codes), 4, -8, np.stack([minimum, scale], -1).astype(np.float32), columns)


def halves(words: Array) -> Array:
    """Codes of 4 bits, one to a byte; the first of two lies in the low half."""
    found = words.view(np.uint8)
    return np.stack([found & 15, found >> 4], -1).reshape(len(found), -1)


def entries() -> Iterator[Entry]:
    for format, kernel, function, limits in (
        ("int8-token", "8 bits, a scale for each output", "octets", {}),
        ("int8-group", "8 bits, groups", "octets", GROUPS),
        ("ct-pack", "4 bits, groups", "packed", {"bits": 4} | GROUPS),
        ("kivi-values", "4 bits, groups with a minimum", "minima", {"bits": 4} | GROUPS),
    ):
        types = {"format": format, "activations": "float32", "result": "float32"}
        for operation in ("linear.gemv", "linear.gemm"):
            yield Entry(f"Convolution, {kernel}", function, operation, types | limits, arrays="numpy")


PROJECT = Project("MNN", ("MNN",), tuple(entries()))
