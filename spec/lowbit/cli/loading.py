"""What every command on a model does first: find the file, read it, put it on a backend, and keep the account.

A model is a GGUF file, which is read into memory, or a checkpoint directory, of which nothing is read before it is
known what becomes of it. `weights_of` says what that is: the model as it is stored, or as a plan has it, a directory's
quantised block by block and kept. What comes out hands out one block after another, which is all that a backend needs
that runs whole models; `on_backend` is for the others, whose linear layers are called one by one, and takes all of the
model into memory.
"""

from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from lowbit.backend.base import Backend
from lowbit.backend.linears import CONTRACTS, BackendLinears, Contract, backend_linear, build
from lowbit.cli.progress import changing_bar, progress_bar
from lowbit.contract.checks import check_choice, check_integer, spoken
from lowbit.errors import ArgumentError
from lowbit.formats.checkpoint import tokenizer as checkpoint_tokenizer
from lowbit.formats.checkpoint.cache import quantized
from lowbit.formats.checkpoint.reader import Checkpoint, open_checkpoint
from lowbit.formats.fetch import fetch
from lowbit.formats.gguf import tokenizer as gguf_tokenizer
from lowbit.formats.gguf.reader import check_architecture, open_gguf, read_llama
from lowbit.formats.tokenizer import Tokenizer
from lowbit.model.block import FORMULAS
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import Decoder
from lowbit.model.quantization_plan import METHODS, Plan, Quantization, planned
from lowbit.model.weights import LayeredWeights, LlamaWeights, in_memory, weight_bytes
from lowbit.quantization.packing import BITS
from lowbit.runtime import elementwise
from lowbit.system.memory import check_memory

__all__ = [
    "LoadedModel",
    "Ready",
    "chosen",
    "file_of",
    "load_model",
    "on_backend",
    "progress_bar",
    "said_plan",
    "weights_of",
]

DEFAULT_GROUP_SIZE = 64


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model: its name, its weights as stored, its tokenizer.

    Attributes:
        file: the name of the file or directory.
        layered: the weights, in memory or block by block from disk.
        tokenizer: text to tokens and back.
    """

    file: str
    layered: LayeredWeights
    tokenizer: Tokenizer

    @property
    def config(self) -> LlamaConfig:
        """The shape of the model."""
        return self.layered.config

    @property
    def weights(self) -> LlamaWeights:
        """All of the model as it is stored, in memory; of a directory read anew each time."""
        return in_memory(self.layered)


def file_of(path: Path | None, default: str) -> Path:
    """The file that was given, or else the one of this name in `lowbit.formats.fetch.TABLE`, fetched if need be.

    Raises:
        UnavailableError: it cannot be fetched; the message says what to put where.
    """
    if path is not None:
        return path
    with changing_bar() as report:
        return fetch(default, report)


def load_model(path: Path) -> LoadedModel:
    """Read a GGUF file, or open a checkpoint directory.

    Raises:
        ArgumentError: there is neither.
        FormatError: it is not of an architecture that is supported, or not sound.
    """
    if path.is_dir():
        checkpoint = open_checkpoint(path)
        return LoadedModel(checkpoint.file, checkpoint, checkpoint_tokenizer.read_tokenizer(checkpoint))
    with progress_bar(f"reading {path.name}") as progress:
        source = open_gguf(path)
        check_architecture(source)  # before the tokenizer, whose kind would be refused with less to the point
        tokenizer = gguf_tokenizer.read_tokenizer(source)
        return LoadedModel(path.name, read_llama(source, progress), tokenizer)


# **As stored, or as a plan has it.**


def chosen(
    bits: int | None,
    group_size: int | None,
    experts_bits: int | None = None,
    experts_group_size: int | None = None,
    method: str | None = None,
) -> Plan | None:
    """What the options on bits, groups and method ask for; None is the weights as stored.

    >>> chosen(4, 64, experts_bits=2)
    Plan(experts=Quantization(bits=2, group_size=64, method='nearest'), \
attention=Quantization(bits=4, group_size=64, method='nearest'), head=None)

    Raises:
        ArgumentError: a wrong number or method, or one that says nothing because the bits are not given.
    """
    needed = {
        "--group-size": (group_size, bits is None, "--bits"),
        "--experts-group-size": (experts_group_size, bits is None and experts_bits is None, "--bits or --experts-bits"),
        "--method": (method, bits is None and experts_bits is None, "--bits or --experts-bits"),
    }
    for option, (given, lacks, other) in needed.items():
        if given is not None and lacks:
            raise ArgumentError(option, given, f"only together with {other}")
    for option, given in (("--bits", bits), ("--experts-bits", experts_bits)):
        if given is not None:
            check_choice(option, given, BITS)
    for option, given in (("--group-size", group_size), ("--experts-group-size", experts_group_size)):
        if given is not None:
            check_integer(option, given, least=1)
    if method is not None:
        check_choice("--method", method, METHODS)

    def part(bits: int | None, group_size: int | None) -> Quantization | None:
        by = METHODS[0] if method is None else METHODS[METHODS.index(method)]
        return None if bits is None else Quantization(bits, group_size or DEFAULT_GROUP_SIZE, by)

    attention = part(bits, group_size)
    experts = part(experts_bits or bits, experts_group_size or group_size)
    return None if attention is experts is None else Plan(experts, attention)


def said_plan(plan: Plan) -> str:
    """A plan in words.

    >>> said_plan(Plan(Quantization(2, 16), Quantization(4, 64)))
    'experts to 2 bits, groups of 16; attention to 4 bits, groups of 64'
    >>> said_plan(Plan(Quantization(3, 64, "hqq"), Quantization(3, 64, "hqq")))
    'to 3 bits, groups of 64, by hqq'
    """

    def said(part: Quantization) -> str:
        by = "" if part.method == METHODS[0] else f", by {part.method}"
        return f"to {part.bits} bits, groups of {part.group_size}{by}"

    if plan.experts is not None and plan.experts == plan.attention:
        return said(plan.experts)
    parts = {"experts": plan.experts, "attention": plan.attention}
    return "; ".join(f"{name} {said(part)}" for name, part in parts.items() if part is not None)


def weights_of(model: LoadedModel, plan: Plan | None) -> LayeredWeights:
    """The weights as they are used, block by block: as they are stored, or quantised as a plan says.

    Those of a directory are quantised with a few of their matrices in memory, and kept in the cache folder. A model
    that is in memory stays there.

    Raises:
        LowbitError: weights that cannot be quantised so; no room for them.
    """
    if plan is None:
        return model.layered
    if not isinstance(model.layered, Checkpoint):
        with progress_bar(f"quantising {said_plan(plan)}") as progress:
            return planned(model.weights, plan, progress)
    with changing_bar() as report:
        return quantized(
            model.layered,
            plan,
            progress=lambda done, total: report(f"quantising {said_plan(plan)}", done, total),
            checking=lambda done, total: report(f"checking {model.file}", done, total),
        )


# **On a backend.**


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
        plan: how, or None where they are as stored.
        decoder: ready to run.
        linears: which matrices the backend took.
        steps: the operations between linear layers that the backend computes; the formulas compute the others.
    """

    model: LoadedModel
    weights: LlamaWeights
    plan: Plan | None
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
            "requantized": None if self.plan is None else asdict(self.plan),
            "weight_bytes": {"blocks": size.blocks, "head": size.head, "read_per_token": self.linears.read_bytes},
            "matrices": {"by_backend": self.linears.prepared, "by_numpy_float32": dict(self.linears.float_matrices)},
        }

    def account(self) -> str:
        """The same in a sentence."""
        size = weight_bytes(self.weights).total
        how = "as stored" if self.plan is None else f"quantised {said_plan(self.plan)}"
        parts = [f"{self.model.file} {how}, {size / 1e6:.1f} MB"]
        contract = ", integer contract" if self.linears.contract == "integer" else ""
        parts += [f"{self.linears.prepared} matrices on {self.linears.backend.name}{contract}"]
        parts += [f"between them {', '.join(self.steps)}"] if self.steps else []
        parts += [f"{count} in float32 by numpy: {reason}" for reason, count in self.linears.float_matrices.items()]
        return "; ".join(parts)


def on_backend(
    model: LoadedModel,
    backend: Backend,
    plan: Plan | None,
    contract: Contract = "float32",
    *,
    steps: bool = False,
) -> Ready:
    """Put all of a model on a backend, quantised first if that is asked for; with `steps`, what lies between linear
    layers too, as far as the backend declares it.

    Raises:
        LowbitError: weights that cannot be quantised so, a backend that cannot be prepared, or one that does not
            declare the contract.
    """
    backend_linear(backend, contract)  # refuses what is not declared before anything is quantised
    backend.warm_up("linear.qgemv")  # before progress bars: some backends start only while there is one thread
    layered = weights_of(model, plan)
    if isinstance(layered, Checkpoint):
        check_memory(f"model {model.file}", sum(4 * prod(place.shape) for place in layered.table.values()))
    with progress_bar(f"reading {model.file}") as progress:
        weights = in_memory(layered, progress)
    with progress_bar(f"preparing {backend.name}") as progress:
        taken = elementwise.on_backend(backend, weights.config, FORMULAS) if steps else elementwise.Steps(FORMULAS, ())
        decoder, linears = build(weights, backend, progress, contract, taken.ops)
    return Ready(model, weights, plan, decoder, linears, taken.names)
