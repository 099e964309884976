"""Write the files beside this script with the packers that own the formats, on a CPU.

Usage: ``python write.py SOURCES [NAME ...]``, where SOURCES holds the packages ``auto_gptq``, ``awq``, ``hqq`` and
``marlin`` of their repositories, and for ``ggml`` a library ``libggml-base.so``.
It needs torch, numpy, bitsandbytes, onnx, onnxruntime, for ``casts`` also
compressed-tensors and torchao, and for ``hqq-meta`` what hqq imports. Whatever else the four import is replaced by an
object that does nothing, since packing needs none of it.

AutoGPTQ 9f7d3707, AutoAWQ 88e4c76b, hqq e0b1d00e, marlin 2f6d7c10, onnxruntime 1.32.0, bitsandbytes 0.50.2, torch 2.13,
compressed-tensors 0.20.0, torchao 0.18.0, ggml of llama-cpp-python 0.3.36.
"""

import ctypes
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

HERE = Path(__file__).parent
Arrays = dict[str, np.ndarray[Any, Any]]


class Missing:
    """Finds every module that nobody else finds, and loads an object that does nothing."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        wanted = name.split(".")[0]
        return None if wanted.startswith(("torch", "numpy", "_")) else ModuleSpec(name, self)  # type: ignore[arg-type]  # it finds and loads

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        found = MagicMock(name=spec.name, __path__=[], __spec__=spec)
        found.try_import.return_value = (None, "not needed")
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to do."""


def module(sources: Path, path: str) -> Any:
    """One file of a package, without the package's own ``__init__``."""
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_of_owner", sources / path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def drawn(rows: int, columns: int, group: int, bits: int, first: int) -> tuple[torch.Tensor, ...]:
    """Codes N × K, zeros from `first` to the largest code N × G, scales N × G that are powers of two, weights N × K."""
    make = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (columns, rows), generator=make)
    groups = rows // group
    zeros = torch.randint(first, 2**bits, (columns, groups), generator=make)
    scales = 2.0 ** -torch.randint(2, 6, (columns, groups), generator=make)
    wide = [each.repeat_interleave(group, 1) for each in (scales, zeros)]
    return codes, zeros, scales, wide[0] * (codes - wide[1])


def linear(weights: torch.Tensor) -> torch.nn.Linear:
    found = torch.nn.Linear(weights.shape[1], weights.shape[0], bias=False)
    found.weight.data = weights.clone().float()
    return found


def awq(sources: Path) -> Iterator[tuple[str, Arrays]]:
    """``from_linear`` of both layouts."""
    for name, group, rows in (("gemm", 32, 64), ("gemv", 32, 96), ("gemv", 64, 128)):
        found = module(sources, f"awq/modules/linear/{name}.py")
        found.get_best_device = lambda: "cpu"
        _, zeros, scales, weights = drawn(rows, 32, group, 4, 0)
        given = (scales, zeros) if name == "gemv" else (scales.T.contiguous(), zeros.T.contiguous())
        kind = getattr(found, f"WQLinear_{name.upper()}")
        packed = kind.from_linear(linear(weights), 4, group, False, *given)
        yield f"awq-{name}-{group}", fields(packed, "qweight qzeros scales", weights)


def gptq(sources: Path) -> Iterator[tuple[str, Arrays]]:
    """``pack`` with the rows of groups scattered; zeros start at 1, which is what version 1 can store."""
    for bits in (2, 3, 4, 8):
        found = module(sources, "auto_gptq/nn_modules/qlinear/qlinear_cuda.py")
        found.transformers.pytorch_utils.Conv1D = ()
        _, zeros, scales, weights = drawn(64, 32, 32, bits, 1)
        order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
        packed = found.QuantLinear(bits, 32, 64, 32, False, weight_dtype=torch.float32)
        index = packed.g_idx[order].clone()
        packed.pack(linear(weights[:, order]), scales, zeros.float(), index)
        packed.scales = packed.scales.half()
        yield f"gptq-v1-{bits}", fields(packed, "qweight qzeros scales g_idx", weights[:, order])


def bitsandbytes(sources: Path) -> Iterator[tuple[str, Arrays]]:
    """``quantize_4bit`` and what ``dequantize_4bit`` makes of it; the package itself, which runs on a CPU."""
    functional = importlib.import_module("bitsandbytes.functional")
    make = torch.Generator().manual_seed(1)
    for name, double, blocksize, rows in (
        ("nf4", 0, 64, 72),
        ("fp4", 0, 32, 72),
        ("nf4", 1, 64, 600),
        ("fp4", 1, 32, 296),
    ):
        weights = torch.randn(29, rows, generator=make)
        packed, state = functional.quantize_4bit(weights, None, None, blocksize, bool(double), name)
        given = state.as_dict()
        found = {"weight": packed, "values": functional.dequantize_4bit(packed, state).T}
        for field in ("absmax", "nested_absmax", "nested_quant_map"):
            if field in given:
                found[field] = given[field]
        if double:
            found["nested_offset"] = torch.tensor([given["nested_offset"]])
            found["values"] = found["values"][:, ::5]
        yield f"{name}{'-double' * double}", {key: each.numpy() for key, each in found.items()}


def hqq(sources: Path) -> Iterator[tuple[str, Arrays]]:
    """``BitPack`` on codes that were reshaped as the quantiser does, along either axis."""
    packing = module(sources, "hqq/core/bitpack.py").BitPack
    make = torch.Generator().manual_seed(1)
    for axis in (0, 1):
        for bits in (8, 4, 3, 2, 1):
            shape = (32, 48) if axis == 0 else (48, 32)
            codes = torch.randint(0, 2**bits, shape, generator=make)
            edge = (1, 48) if axis == 0 else (48, 1)
            scale = (2.0 ** -torch.randint(2, 6, edge, generator=make)).half()
            zero = (torch.randint(-4, 60, edge, generator=make) / 4).half()
            packed = getattr(packing, f"pack_{bits}bit_{'32' if bits == 3 else 'u8'}")(codes)
            values = ((codes - zero.float()) * scale.float()).reshape(16, 96).T
            found = {"W_q": packed, "scale": scale, "zero": zero, "values": values.half()}
            yield f"hqq-axis{axis}-{bits}", {name: each.numpy() for name, each in found.items()}


def hqq_meta(sources: Path) -> Iterator[tuple[str, Arrays]]:
    """``Quantizer.quantize`` of normal weights, then of its scales and zeros as Mixtral's configuration asks; the
    values are computed in float64 from what it stored."""
    sys.path.insert(0, str(sources))
    quantizer = importlib.import_module("hqq.core.quantize").Quantizer

    make = torch.Generator().manual_seed(1)
    for axis in (0, 1):
        for bits in (4, 3, 2):
            weights = torch.randn(48, 64, generator=make)
            packed, meta = quantizer.quantize(weights, bits, True, 16, False, axis=axis, device="cpu")
            scale_q, of_scales = quantizer.quantize(meta["scale"], 8, True, 32, False, device="cpu")
            zero_q, of_zeros = quantizer.quantize(meta["zero"], 8, False, None, False, device="cpu")
            numbers = {
                f"meta_{kind}_{name}": each[name].half()
                for kind, each in (("scale", of_scales), ("zero", of_zeros))
                for name in ("scale", "zero")
            }
            halves = {name: each.double() for name, each in numbers.items()}
            scale = (scale_q - halves["meta_scale_zero"]) * halves["meta_scale_scale"]
            zero = (zero_q - halves["meta_zero_zero"]) * halves["meta_zero_scale"]
            codes = quantizer.unpack[meta["packing"]](packed, dtype=torch.float64)[
                : weights.numel() // 16 if axis else 16
            ]
            values = ((codes - zero) * scale.reshape(zero.shape)).reshape(48, 64).T
            found = {"W_q": packed, "scale_q": scale_q, "zero_q": zero_q, **numbers, "values": values.float()}
            found |= {name: each.reshape(1) for name, each in found.items() if each.dim() == 0}
            yield f"hqq-axis{axis}-{bits}-meta", {name: each.numpy() for name, each in found.items()}


def marlin(sources: Path) -> Iterator[tuple[str, Arrays]]:
    """``Layer.pack``, on a layer smaller than its constructor allows."""
    found = module(sources, "marlin/__init__.py")
    for name, rows, columns, group in (("grouped", 64, 64, 32), ("channel", 32, 128, 32)):
        layer = torch.nn.Module.__new__(found.Layer)
        torch.nn.Module.__init__(layer)
        layer.k, layer.n, layer.groupsize = rows, columns, group
        layer.B, layer.s = (
            torch.empty((rows // 16, 2 * columns), dtype=torch.int),
            torch.empty((rows // group, columns)).half(),
        )
        codes, _, scales, _ = drawn(rows, columns, group, 4, 0)
        scales *= 1 + torch.arange(columns)[:, None] / 128
        weights = scales.repeat_interleave(group, 1) * (codes - 8)
        given = linear(weights)
        given.weight.data = weights.half()
        layer.pack(given, scales)
        yield f"marlin-{name}", fields(layer, "B s", weights)


def onnx(sources: Path) -> Iterator[tuple[str, Arrays]]:
    """The operator itself, multiplying the identity by bytes of all kinds; K = 72 leaves the last block short."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    make = np.random.default_rng(1)
    for bits in (2, 4, 8):
        for zeros in (True, False):
            blob = 32 * bits // 8
            given: Arrays = {
                "B": make.integers(0, 256, (16, 3, blob), np.uint8),
                "scales": np.exp2(-make.integers(2, 6, (16, 3))).astype(np.float32),
            }
            if zeros:
                given["zero_points"] = make.integers(0, 256, (16, -(-3 * bits // 8)), np.uint8)
            options = {"K": 72, "N": 16, "bits": bits, "block_size": 32}
            node = helper.make_node("MatMulNBits", ["A", *given], ["Y"], domain="com.microsoft", **options)
            ends = [
                helper.make_tensor_value_info(name, TensorProto.FLOAT, [72, size])
                for name, size in (("A", 72), ("Y", 16))
            ]
            constants = [numpy_helper.from_array(each, name) for name, each in given.items()]
            graph = helper.make_graph([node], "one", ends[:1], ends[1:], constants)
            domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
            model = helper.make_model(graph, opset_imports=domains, ir_version=9)
            session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
            values = session.run(None, {"A": np.eye(72, dtype=np.float32)})[0]
            yield f"matmulnbits{'' if zeros else '-symmetric'}-{bits}", given | {"values": values.astype(np.float16)}


def torchao(sources: Path) -> Iterator[tuple[str, Arrays]]:
    """PyTorch's packer for CPUs, and its product with the identity.

    It packs for the processor at hand; with ``ATEN_CPU_CAPABILITY=avx2`` in the environment for an older one.
    """
    make = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (80, 64), generator=make).int()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = 2.0 ** -torch.randint(2, 6, (2, 80), generator=make)
    zeros = scales * torch.randint(-40, 40, (2, 80), generator=make)
    both = torch.stack([scales, zeros], dim=-1).bfloat16()
    values = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.eye(64).bfloat16(), packed, 32, both)
    found = {"qdata": packed, "scale_and_zero": both.view(torch.uint16), "values": values.half()}
    name = torch.backends.cpu.get_cpu_capability().lower()
    yield f"int4-opaque-{name}", {key: each.numpy() for key, each in found.items()}


# **Casts**: numbers ``x``, N × K, and what a tool makes of them. Some rows are 0, of one sign, or full of ties.


def weights(columns: int, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """N × K numbers."""
    make = torch.Generator().manual_seed(columns + rows)
    x = torch.randn(columns, rows, generator=make) * torch.randn(columns, 1, generator=make).exp()
    x[0] = 0
    x[1], x[2], x[3] = x[1].abs(), -x[2].abs(), (x[3] * 4).round() / 2
    return x.to(dtype)


def cast_by_bitsandbytes() -> Iterator[tuple[str, Arrays]]:
    """``quantize_4bit``; the last block is short, and a row of FP4 is of its ties."""
    functional = importlib.import_module("bitsandbytes.functional")
    for name in ("nf4", "fp4"):
        x = weights(7, 90)
        if name == "fp4":
            x[4, :30] = torch.tensor(
                [12, 10, 7, 5, 3.5, 2.5, 1.03125, 0.03125, -10, -7, -5, -3.5, -2.5, -1.03125, 0] * 2
            )
        packed, state = functional.quantize_4bit(x, None, None, 32, False, name)
        yield f"cast-{name}", {"x": x.numpy(), "weight": packed.numpy(), "absmax": state.absmax.numpy()}


def cast_by_bitsandbytes_twice() -> Iterator[tuple[str, Arrays]]:
    """``quantize_4bit`` with quantised absmax: one short block of 256, a whole and a short one, and one of zeros."""
    functional = importlib.import_module("bitsandbytes.functional")
    for name, rows in (("nf4", 90), ("fp4", 1200), ("nf4", 4)):
        x = weights(7, rows, torch.bfloat16).float()
        packed, state = functional.quantize_4bit(x, None, None, 32, True, name)
        found = state.as_dict()
        arrays = {field: found[field] for field in ("absmax", "nested_absmax", "nested_quant_map")}
        arrays |= {"x": x, "weight": packed, "nested_offset": torch.tensor([found["nested_offset"]])}
        yield f"cast-{name}-double-{rows}", {key: each.numpy() for key, each in arrays.items()}


def cast_by_onnx_runtime() -> Iterator[tuple[str, Arrays]]:
    """The kernels behind its ``MatMulNBitsQuantizer``; the last block is short."""
    kernels = importlib.import_module("onnxruntime.capi._pybind_state")
    for bits, symmetric in ((bits, symmetric) for bits in (2, 4, 8) for symmetric in (False, True)):
        x = weights(9, 72).numpy()
        found: Arrays = {
            "B": np.zeros((9, 3, 4 * bits), np.uint8),
            "scales": np.zeros((9, 3), np.float32),
            "zero_points": np.zeros((9, -(-3 * bits // 8)), np.uint8),
        }
        filled = np.pad(np.ascontiguousarray(x.T), ((0, 24), (0, 0)))
        quantize = getattr(kernels, f"quantize_matmul_{bits}bits")
        quantize(found["B"], filled, found["scales"], found["zero_points"], 32, 9, 72, symmetric)
        if symmetric:
            del found["zero_points"]
        yield f"cast-matmulnbits{'-symmetric' * symmetric}-{bits}", {"x": x, **found}


def cast_by_compressed_tensors() -> Iterator[tuple[str, Arrays]]:
    """``calculate_qparams``, then ``compress`` of each kind."""
    for bits in (2, 3, 4, 8):
        for symmetric in (True, False):
            name = f"cast-ct-pack{'' if symmetric else '-asym'}-{bits}"
            yield (
                name,
                compressed(
                    "pack-quantized",
                    weights(8, 64, torch.bfloat16),
                    num_bits=bits,
                    symmetric=symmetric,
                    strategy="group",
                    group_size=32,
                ),
            )
    options: dict[str, Any] = {"num_bits": 8, "strategy": "group", "group_size": 32}
    yield "cast-ct-int", compressed("int-quantized", weights(8, 64, torch.bfloat16), **options)
    for strategy in ("tensor", "channel"):
        x = weights(8, 64)
        yield f"cast-fp8-{strategy}", compressed("float-quantized", x, type="float", num_bits=8, strategy=strategy)
    x = weights(256, 256)
    x[:, torch.arange(256) % 16 > 0] = 0
    x[:128, 128:] = 0
    options = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}
    yield "cast-fp8-block", compressed("float-quantized", x, **options)
    options = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    options["scale_dtype"] = torch.float8_e4m3fn
    yield "cast-nvfp4-pack", compressed("nvfp4-pack-quantized", weights(8, 64), **options)
    options = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    for bits, kind in ((4, "mxfp4-pack-quantized"), (6, "mxfp6-pack-quantized"), (8, "mxfp8-quantized")):
        yield f"cast-mxfp{bits}", compressed(kind, weights(24, 64), num_bits=bits, **options)


def compressed(kind: str, x: torch.Tensor, **options: Any) -> Arrays:
    """What compressed-tensors stores of numbers whose extremes it has seen."""
    quantization = importlib.import_module("compressed_tensors.quantization")
    helpers = importlib.import_module("compressed_tensors.quantization.utils.helpers")
    arguments = quantization.QuantizationArgs(**({"type": "int", "symmetric": True} | options))
    parts = {
        "tensor": lambda: x.reshape(1, -1),
        "channel": lambda: x,
        "block": lambda: x.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2).flatten(2),
    }
    part = parts.get(options["strategy"], lambda: x.unflatten(1, (-1, options["group_size"])))()
    whole = {"weight_global_scale": helpers.generate_gparam(x.min(), x.max())} if kind.startswith("nvfp4") else {}
    edges = (
        part.amin(-1, keepdim=options["strategy"] == "channel"),
        part.amax(-1, keepdim=options["strategy"] == "channel"),
    )
    scale, zero = helpers.calculate_qparams(*edges, arguments, global_scale=whole.get("weight_global_scale"))
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments, format=kind)
    compressor = importlib.import_module("compressed_tensors").BaseCompressor.get_value_from_registry(kind)
    given = {"weight": x, "weight_scale": scale, "weight_zero_point": zero, **whole}
    found = compressor.compress(given, scheme)
    found.pop("weight_shape", None)
    return {name: bare(each) for name, each in ({"x": x} | found).items()}


def cast_by_torchao() -> Iterator[tuple[str, Arrays]]:
    """``to_mx`` in each of its modes."""
    chapter = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    kinds = {"mxfp8-e4m3": torch.float8_e4m3fn, "mxfp8-e5m2": torch.float8_e5m2, "mxfp4": torch.float4_e2m1fn_x2}
    for name, kind in kinds.items():
        x = weights(24, 64)
        found = {"x": x.numpy()}
        for mode in chapter.ScaleCalculationMode:
            scale, elements = chapter.to_mx(x, kind, 32, mode)
            found |= {f"scale-{mode.value}": bare(scale), f"elements-{mode.value}": bare(elements)}
        yield f"cast-torchao-{name}", found


def ggml(sources: Path) -> Iterator[tuple[str, Arrays]]:
    """Both casts to IQ4_NL of ``libggml-base.so``, compiled without fused operations; ties, zeros and one sign too."""
    library = ctypes.CDLL(str(sources / "libggml-base.so"), mode=os.RTLD_LAZY)
    x = np.concatenate([weights(24, 64).numpy(), np.linspace(-96, 94.5, 128, dtype=np.float32).reshape(2, 64)])
    one, searched = np.zeros((2, len(x), 2 * 18), np.uint8)
    x_at, one_at, searched_at = (ctypes.c_void_p(each.ctypes.data) for each in (x, one, searched))
    library.quantize_row_iq4_nl_ref(x_at, one_at, ctypes.c_int64(x.size))
    library.quantize_iq4_nl(x_at, searched_at, ctypes.c_int64(len(x)), ctypes.c_int64(64), None)
    yield "cast-iq4_nl", {"x": x, "blocks-one": one, "blocks-search": searched}


def bare(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The array of a tensor; types that numpy lacks as unsigned integers."""
    unsigned = {1: torch.uint8, 2: torch.uint16}.get(tensor.element_size()) if tensor.is_floating_point() else None
    found: np.ndarray[Any, Any] = (tensor if unsigned is None else tensor.view(unsigned)).numpy()
    return found


def casts(sources: Path) -> Iterator[tuple[str, Arrays]]:
    for each in (
        cast_by_bitsandbytes,
        cast_by_bitsandbytes_twice,
        cast_by_onnx_runtime,
        cast_by_compressed_tensors,
        cast_by_torchao,
    ):
        yield from each()


def fields(packed: Any, names: str, weights: torch.Tensor) -> Arrays:
    return {name: getattr(packed, name).numpy() for name in names.split()} | {"values": weights.T.half().numpy()}


WRITERS: dict[str, Callable[[Path], Iterator[tuple[str, Arrays]]]] = {
    "bitsandbytes": bitsandbytes,
    "onnx": onnx,
    "awq": awq,
    "gptq": gptq,
    "hqq": hqq,
    "hqq-meta": hqq_meta,
    "marlin": marlin,
    "torchao": torchao,
    "casts": casts,
    "ggml": ggml,
}


def main(sources: Path, names: list[str]) -> None:
    for name in names or WRITERS:
        if name not in ("bitsandbytes", "casts", "ggml", "hqq-meta", "onnx", "torchao"):
            sys.meta_path.append(Missing())
        for file, arrays in WRITERS[name](sources):
            np.savez_compressed(HERE / f"{file}.npz", **arrays)  # type: ignore[arg-type]  # no array is called allow_pickle
            print(file, (HERE / f"{file}.npz").stat().st_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
