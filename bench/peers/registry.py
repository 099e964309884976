"""Who takes part: every contestant by name, from which project, and how it is made."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from peers import blas, checkpoints, ggml, onnx_runtime, openvino_matmul, ours, qigen, stored, torch_int4
from peers.base import Contestant, Plan, Weights

Build = Callable[[Weights, Plan], Contestant]


@dataclass(frozen=True)
class Project:
    """A project, the distributions that its contestants need, and what its build says of itself."""

    name: str
    distributions: tuple[str, ...]
    details: Callable[[], dict[str, Any]]

    def missing(self) -> str:
        """Which of its distributions are not installed, in words; empty if all are."""
        return " and ".join(name for name in self.distributions if not installed(name))


@dataclass(frozen=True)
class Entry:
    """A contestant that can be built."""

    id: str
    project: Project
    title: str
    bits: int
    build: Build

    @property
    def store(self) -> str:
        """Whose weights it uses: the two contracts of lowbit share theirs."""
        return self.id.replace("-integer", "-float32")


LOWBIT = Project("lowbit", ("cppyy",), ours.details)
ONNX_RUNTIME = Project("ONNX Runtime", ("onnx", "onnxruntime"), onnx_runtime.details)
LLAMA_CPP = Project("llama.cpp", ("llama-cpp-python",), ggml.details)
TORCH = Project("PyTorch", ("torch",), torch_int4.details)
OPENVINO = Project("OpenVINO", ("openvino",), openvino_matmul.details)
NUMPY = Project("numpy", ("numpy",), blas.details)
QIGEN = Project("QIGen", (), qigen.details)
PROJECTS = (LOWBIT, ONNX_RUNTIME, LLAMA_CPP, TORCH, OPENVINO, NUMPY, QIGEN)


def installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def bits_of(kind: str) -> int:
    """The bits of a code of a stored matrix, the first number in its name but for IQ4_NL and MXFP4."""
    if kind in checkpoints.MAKERS:
        return checkpoints.BITS
    return int(kind.removeprefix("i").removeprefix("mxfp").removeprefix("q")[0])


def _ggml(kind: str, repack: bool = True) -> Entry:
    bits, name = bits_of(kind), kind if repack else f"{kind}-as-stored"
    title = f"ggml {kind}" + ("" if repack else ", as in the file")
    return Entry(f"ggml-{name}", LLAMA_CPP, title, bits, partial(ggml.GgmlContestant, kind=kind, repack=repack))


def _onnx(level: int) -> Entry:
    build = partial(onnx_runtime.OnnxRuntimeContestant, accuracy_level=level)
    return Entry(f"onnxruntime-{level}", ONNX_RUNTIME, f"MatMulNBits, accuracy {level}", 4, build)


def _torch(dtype: str) -> Entry:
    return Entry(f"torch-{dtype}", TORCH, f"int4, {dtype}", 4, partial(torch_int4.TorchContestant, dtype=dtype))


def _openvino(precision: str) -> Entry:
    build = partial(openvino_matmul.OpenVinoContestant, precision=precision)
    return Entry(f"openvino-{precision}", OPENVINO, f"u4, {precision}", 4, build)


PEERS = (
    *map(_onnx, (0, 4)),
    _ggml("q4_0"),
    _ggml("q4_0", repack=False),
    _ggml("q4_K"),
    *map(_torch, ("float32", "bfloat16")),
    *map(_openvino, ("float32", "bfloat16", "default")),
    Entry("numpy-float32", NUMPY, "float32, BLAS", 32, blas.BlasContestant),
)
"""Those that take part where 4 bits are compared."""

OTHER_WIDTHS = tuple(map(_ggml, ("q2_K", "q3_K", "q8_0")))
"""Those of other widths."""

STORED = ("q4_0", "q5_0", "q8_0", "q4_K", "q6_K", "iq4_nl", "mxfp4")
"""Types of ggml in whose bytes lowbit multiplies too."""
CHECKPOINTS = tuple(checkpoints.MAKERS)
"""Formats of checkpoints, in whose bytes lowbit multiplies activations of 16 bits."""


def our(isa: str, contract: str, bits: int = 4, group_size: int | None = None) -> Entry:
    """One of lowbit's own; `group_size` is the problem's unless it is given."""

    def build(weights: Weights, plan: Plan) -> Contestant:
        given = weights if group_size is None else Weights(weights.rows, weights.columns, group_size)
        return ours.OurContestant(given, plan, isa, contract, given.quantized(bits))

    size = "" if group_size is None else f"-g{group_size}"
    return Entry(f"lowbit-{isa}-{contract}-{bits}{size}", LOWBIT, f"{isa}, {contract}", bits, build)


def ours_of(bits: int, brief: bool = False) -> list[Entry]:
    """Every instruction set of this processor by both contracts; `brief` leaves out those that others make needless."""
    return [our(isa, contract, bits) for isa, contract in ours.ways(ours.instruction_sets(), brief)]


def stored_of(kind: str) -> list[Entry]:
    """Every instruction set by both contracts on the bytes of a type of ggml, and ggml itself; or on those of a
    checkpoint with activations of 16 bits, and the peers of 16 bits."""
    ways = ours.ways(ours.instruction_sets(), brief=True)
    if kind in CHECKPOINTS:
        ways = [(isa, "bfloat16") for isa, contract in ways if contract == "float32"]
    found = [
        Entry(
            f"lowbit-{isa}-{contract}-{kind}",
            LOWBIT,
            f"{isa}, {contract}, {kind}",
            bits_of(kind),
            partial(stored.StoredContestant, isa=isa, contract=contract, kind=kind),
        )
        for isa, contract in ways
    ]
    if kind in CHECKPOINTS:
        return [*found, _torch("bfloat16"), _openvino("bfloat16")]
    return [*found, _ggml(kind), _ggml(kind, repack=False)]


def qigen_of(bits: int, group_size: int) -> list[Entry]:
    """QIGen's kernel, and lowbit's with the instructions that it uses."""
    build = partial(qigen.QigenContestant, bits=bits, group_size=group_size)
    title = f"QIGen, groups of {group_size}"
    return [our("avx2", "float32", bits, group_size), Entry(f"qigen-{bits}-g{group_size}", QIGEN, title, bits, build)]


def named(id: str) -> Entry:
    """The entry of an id as `Entry.id` writes it.

    >>> named("lowbit-avx2-float32-3-g64").title
    'avx2, float32'
    """
    for entry in (*PEERS, *OTHER_WIDTHS):
        if entry.id == id:
            return entry
    _, isa, contract, bits, *size = id.split("-")
    if not bits.isdigit():
        return next(entry for entry in stored_of(bits) if entry.id == id)
    return our(isa, contract, int(bits), int(size[0].removeprefix("g")) if size else None)
