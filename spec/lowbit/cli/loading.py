"""What every command on a model does first: find the file, read it, put it on a backend, and keep the account."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbit import between
from lowbit.affine import Convention
from lowbit.backend import Backend
from lowbit.blocks import FORMULAS
from lowbit.check import check_choice, check_integer, spoken
from lowbit.cli.progress import changing_bar, progress_bar
from lowbit.data import fetch
from lowbit.decoder import Decoder
from lowbit.engine import CONTRACTS, BackendLinears, Contract, backend_linear, build
from lowbit.errors import ArgumentError
from lowbit.formats.gguf import check_architecture, open_gguf, read_llama
from lowbit.formats.gguf_tokenizer import read_tokenizer
from lowbit.formats.tokenizer import Tokenizer
from lowbit.packing import BITS
from lowbit.weights import LlamaWeights, requantize, weight_bytes

__all__ = ["LoadedModel", "Quantization", "Ready", "chosen", "file_of", "load_model", "on_backend", "progress_bar"]

DEFAULT_GROUP_SIZE = 64


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model file in memory: its name, its weights as stored, its tokenizer."""

    file: str
    weights: LlamaWeights
    tokenizer: Tokenizer


def file_of(path: Path | None, default: str) -> Path:
    """The file that was given, or else the one of this name in `lowbit.data.TABLE`, fetched if need be.

    Raises:
        UnavailableError: it cannot be fetched; the message says what to put where.
    """
    if path is not None:
        return path
    with changing_bar() as report:
        return fetch(default, report)


def load_model(path: Path) -> LoadedModel:
    """Read a model file.

    Raises:
        ArgumentError: there is no such file.
        FormatError: it is not a GGUF file of an architecture that is supported, or not a sound one.
    """
    with progress_bar(f"reading {path.name}") as progress:
        source = open_gguf(path)
        check_architecture(source)  # before the tokenizer, whose kind would be refused with less to the point
        tokenizer = read_tokenizer(source)
        return LoadedModel(path.name, read_llama(source, progress), tokenizer)


# **On a backend**, as stored or re-quantised.


@dataclass(frozen=True)
class Quantization:
    """How linear layers are re-quantised before use."""

    bits: int
    group_size: int
    convention: Convention = "minimum"


def chosen(bits: int | None, group_size: int | None) -> Quantization | None:
    """What ``--bits`` and ``--group-size`` ask for; None is the weights as stored.

    Raises:
        ArgumentError: wrong bits or group size, or a group size alone.
    """
    if bits is None:
        if group_size is not None:
            raise ArgumentError("--group-size", group_size, "only together with --bits")
        return None
    check_choice("--bits", bits, BITS)
    group_size = DEFAULT_GROUP_SIZE if group_size is None else group_size
    check_integer("--group-size", group_size, least=1)
    return Quantization(bits, group_size)


def contract_of(given: str) -> Contract:
    """What ``--contract`` asks for.

    Raises:
        ArgumentError: there is no such contract.
    """
    for contract in CONTRACTS:
        if given == contract:
            return contract
    raise ArgumentError("--contract", repr(given), spoken(CONTRACTS))


@dataclass(frozen=True, eq=False)
class Ready:
    """A model on a backend.

    Attributes:
        model: where the weights come from.
        weights: as they are used, re-quantised or not.
        quantization: how, or None where they are as stored.
        decoder: ready to run.
        linears: which matrices the backend took.
        steps: the operations between linear layers that the backend computes; the formulas compute the others.
    """

    model: LoadedModel
    weights: LlamaWeights
    quantization: Quantization | None
    decoder: Decoder
    linears: BackendLinears
    steps: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """What was run, as every JSON answer states it."""
        size = weight_bytes(self.weights)
        return {
            "model": self.model.file,
            "backend": self.linears.backend.name,
            "contract": self.linears.contract,
            "steps_on_backend": list(self.steps),
            "requantized": None if self.quantization is None else vars(self.quantization),
            "weight_bytes": {"blocks": size.blocks, "head": size.head, "read_per_token": self.linears.read_bytes},
            "matrices": {"by_backend": self.linears.prepared, "by_numpy_float32": dict(self.linears.float_matrices)},
        }

    def account(self) -> str:
        """The same in a sentence."""
        chosen, size = self.quantization, weight_bytes(self.weights).total
        how = "as stored" if chosen is None else f"re-quantised to {chosen.bits} bits, groups of {chosen.group_size}"
        parts = [f"{self.model.file} {how}, {size / 1e6:.1f} MB"]
        contract = ", integer contract" if self.linears.contract == "integer" else ""
        parts += [f"{self.linears.prepared} matrices on {self.linears.backend.name}{contract}"]
        parts += [f"between them {', '.join(self.steps)}"] if self.steps else []
        parts += [f"{count} in float32 by numpy: {reason}" for reason, count in self.linears.float_matrices.items()]
        return "; ".join(parts)


def on_backend(
    model: LoadedModel,
    backend: Backend,
    quantization: Quantization | None,
    contract: Contract = "float32",
    *,
    steps: bool = False,
) -> Ready:
    """Put a model on a backend, re-quantised first if that is asked for; with `steps`, what lies between linear layers
    too, as far as the backend declares it.

    Raises:
        LowbitError: weights that cannot be quantised so, a backend that cannot be prepared, or one that does not
            declare the contract.
    """
    backend_linear(backend, contract)  # refuses what is not declared before anything is re-quantised
    weights = model.weights
    if quantization is not None:
        with progress_bar(f"re-quantising to {quantization.bits} bits") as progress:
            weights = requantize(weights, **vars(quantization), progress=progress)
    with progress_bar(f"preparing {backend.name}") as progress:
        taken = between.on_backend(backend, weights.config, FORMULAS) if steps else between.Steps(FORMULAS, ())
        decoder, linears = build(weights, backend, progress, contract, taken.between)
    return Ready(model, weights, quantization, decoder, linears, taken.names)
