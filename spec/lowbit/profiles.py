r"""Profiles: what a kernel can be certified for, by name.

A report says for every clause whether it was kept. A user who chooses a kernel wants one line: *certified for
lowbit-1.1/qgemv-4*. A *profile* defines what that line means: a named set of clauses, and the parameters for which they
must be kept. A backend claims profiles in its `Capabilities`; the conformance suite certifies them or says what is
missing. A claim that the suite cannot certify is a failure, like a declaration that does not hold.

**All of it, or not certified.** Each case of each clause, for each of the profile's parameters, must have run and
passed, and so must the eight habits of the operations concerned (`lowbit.contract.operation.HABITS`). A case that
failed, one that the backend does not declare, and one that was not run all count alike.

**Frozen.** The content of a profile never changes under its name: not the clauses, not a sentence of them, not the
parameters. A kernel certified last year has kept the same promises as one certified today. A changed profile gets a new
name; an error about the old name states the new one (`SUCCESSORS`). A later suite may test the same promises with more
cases, so a certificate also names the version of the suite. From 1.0 to 1.1 the refusal of wrong arguments, until then
a clause of most operations, became habit H8 of every operation.

**The parameters** are those of weights and caches in use; a kernel that handles more loses nothing.

``packing``
    All four widths. A backend that packs only 4 bits can say so in its declaration, and needs no profile for it.

``qgemv-4``
    The product that a model is run with, token by token. 4 bits in groups of 32, 64 and 128, since these are the sizes
    of published 4-bit weights; also with a short last group, since the suite decides where a kernel may stop, not the
    model. Scales are float16, as files store them; a kernel that works from float32 widens them exactly when it
    prepares the matrix, whereas the way back would round. Both conventions: GGUF's Q4_1 has minima, GPTQ and AWQ have
    integer zero-points, and from float16 a zero-point becomes a minimum exactly, :math:`-s \cdot z` in float32, so a
    kernel needs one inner loop for both. A group as long as the column is not required: with its scale repeated it is
    the same matrix in groups of 128.

``bfp``
    Mantissas of 4 and 8 bits, the K-sort paper's BFP12 and BFP16, with exponents of 8 bits in blocks of 32, 64 and
    128. How formats with wider exponents are refused (`bfp.store`, C3) lies outside.

``kv-cache``
    Keys and values in the same formats, with any number of heads and channels. Attention is not part of this profile.

``gptq-gemv-fp16``, ``awq-gemm-bf16``, ``q4_0-q8_0`` …
    One format, one operation, one type of activations and of results, from the table `SHIPPED`. Sizes are those of
    published models: K in multiples of 256 and N in multiples of 64, which many kernels require.

``moe-offload``
    The trace of a whole run and the same request by request. Any arrangement, with both kinds of memory: whether the
    host has room for a second copy of the experts depends on the machine, and the engine must work on either.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from lowbit.contract.checks import check_choice
from lowbit.contract.operation import HABITS, IMPLIED, Parameters, sentence
from lowbit.contract.ranges import Range
from lowbit.errors import ArgumentError
from lowbit.operations import OPERATIONS


@dataclass(frozen=True)
class Profile:
    """A named and frozen set of promises.

    Attributes:
        id: version and name, ``lowbit-1.1/packing``.
        title: a few words for a table.
        clauses: the clauses that must be kept, by id.
        parameters: for each parameter that is not asked for in full, the values that are; it limits every operation
            of the profile that has a parameter of this name. For a size it may be a `Range`. One of `IMPLIED` that is
            not named has its value there.
    """

    id: str
    title: str
    clauses: tuple[str, ...]
    parameters: Mapping[str, tuple[object, ...] | Range]

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations concerned, in the order of their clauses.

        >>> profile("lowbit-1.1/packing").operations
        ('packing.pack', 'packing.unpack')
        """
        return tuple(dict.fromkeys(clause.rpartition("/")[0] for clause in self.clauses))

    @property
    def habits(self) -> tuple[str, ...]:
        """The habits that must be kept, by id: eight for each operation.

        >>> profile("lowbit-1.1/packing").habits[:2]
        ('packing.pack/H1', 'packing.pack/H2')
        """
        return tuple(f"{operation}/{habit}" for operation in self.operations for habit in HABITS)

    def selects(self, clause: str, parameters: Parameters) -> bool:
        """Whether a call with these parameters, made to check this clause or habit, belongs to the profile.

        >>> profile("lowbit-1.1/qgemv-4").selects("linear.qgemv/C1", {"bits": 4, "group_size": 64})
        True
        >>> profile("lowbit-1.1/qgemv-4").selects("linear.qgemv/C1", {"bits": 4, "group_size": 3})
        False
        """
        if clause not in self.clauses and clause not in self.habits:
            return False
        given = {**IMPLIED, **parameters}
        wanted = {**{name: (value,) for name, value in IMPLIED.items()}, **self.parameters}
        return all(given[name] in asked for name, asked in wanted.items() if name in given)

    @property
    def told_parameters(self) -> dict[str, object]:
        """The parameters in types that JSON has: a list of values, or an object for a `Range`."""
        return {name: each.told if isinstance(each, Range) else list(each) for name, each in self.parameters.items()}

    @property
    def digest(self) -> str:
        """sha256 of everything that the profile promises, the sentences of its clauses and habits included."""
        promises = {clause: sentence(clause) for clause in (*self.clauses, *self.habits)}
        content = [self.id, promises, self.told_parameters]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def profile(id: str) -> Profile:
    """The profile of this name.

    Raises:
        ArgumentError: there is none, or another has taken its place.
    """
    if id in SUCCESSORS:
        raise ArgumentError("profile", f"{id}, which this version does not certify", f"its successor {SUCCESSORS[id]}")
    check_choice("profile", id, list(PROFILES))
    return PROFILES[id]


# **The profiles lowbit-1.1.** Clauses are listed one by one: one that a chapter adds later is not part of them.


def clauses(operation: str, *numbers: int) -> tuple[str, ...]:
    """Clauses of one operation by their numbers.

    >>> clauses("packing.pack", 1, 3)
    ('packing.pack/C1', 'packing.pack/C3')
    """
    return tuple(f"{operation}/C{number}" for number in numbers)


# **What people ship**: stored weights, and the types of activations with which their kernels are used.

SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""How the names of profiles write the types."""

SIZES = {"rows": Range(256), "columns": Range(64)}
"""Multiples that divide the layers of published models, K and N, and that kernels in use ask for."""


@dataclass(frozen=True)
class Shipped:
    """One row of the table of formats as people ship them; each gives a few profiles.

    Attributes:
        format: of the weights.
        activations: the types, each with results of the same type, or for activations that are stored a format.
        options: of the format.
        name: in the names of profiles; the format's by default.
    """

    format: str
    activations: tuple[str, ...]
    options: Mapping[str, int] = field(default_factory=dict)
    name: str = ""

    def profiles(self) -> Iterator[Profile]:
        """``NAME-gemv-TYPE`` and ``NAME-gemm-TYPE`` for each type; ``NAME-ACTIVATIONS`` for activations in a format."""
        options = {name: (value,) for name, value in self.options.items()}
        with_options = "".join(f", {name} {value}" for name, value in self.options.items())
        name = self.name or self.format
        for activations in self.activations:
            short = SHORT.get(activations)
            asked: dict[str, tuple[object, ...] | Range] = {
                "format": (self.format,),
                **options,
                **SIZES,
                "activations": (activations,),
            }
            operations = {f"{name}-{activations}": "gemm_cast"}
            if short:
                operations = {f"{name}-gemv-{short}": "gemv", f"{name}-gemm-{short}": "gemm"}
            for own, operation in operations.items():
                what = "Vector" if operation == "gemv" else "Matrix"
                yield Profile(
                    f"lowbit-1.1/{own}",
                    f"{what} in {activations} times {self.format}{with_options}",
                    clauses(f"linear.{operation}", *((1, 2, 3, 4) if short else (1, 2, 3))),
                    asked | {"result": (activations if short else "float32",)},
                )


HALVES = ("float16", "bfloat16")
GROUPED = {"bits": 4, "group_size": 128}
SHIPPED = (
    Shipped("gptq-v1", HALVES, GROUPED, "gptq"),
    Shipped("gptq-v2", HALVES, GROUPED),
    Shipped("awq-gemm", HALVES, {"group_size": 128}, "awq"),
    Shipped("marlin", ("float16",), {"group_size": 128}),
    Shipped("hqq-axis1", HALVES, {"bits": 4, "group_size": 64}, "hqq"),
    Shipped("nf4", ("bfloat16",), {"blocksize": 64}),
    Shipped("matmulnbits", ("float32", "float16"), {"bits": 4, "block_size": 32}),
    *(Shipped(name, ("bfloat16",)) for name in ("mxfp4", "nvfp4", "fp8-tensor", "fp8-channel", "fp8-block")),
    *(Shipped(name, ("q8_0",)) for name in ("q4_0", "q5_0", "q8_0", "iq4_nl", "gguf-mxfp4")),
    *(Shipped(name, ("q8_1",)) for name in ("q4_1", "q5_1")),
    *(Shipped(name, ("q8_k",)) for name in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")),
)
"""Formats of published checkpoints, and the activations with which llama.cpp pairs those of GGUF on a CPU."""


def _by_id(profiles: Iterable[Profile]) -> Mapping[str, Profile]:
    """The profiles by their names; each clause must exist."""
    known = {clause for operation in OPERATIONS.values() for clause in operation.clauses}
    found = {each.id: each for each in profiles}
    for each in found.values():
        if unknown := set(each.clauses) - known:
            raise ValueError(f"profile {each.id} names clauses that do not exist: {sorted(unknown)}")
    return MappingProxyType(found)


BLOCKS, MANTISSAS, EXPONENTS = (32, 64, 128), (4, 8), (8,)
"""K-sort's formats: BFP12 and BFP16."""

PROFILES = _by_id(
    (
        Profile(
            "lowbit-1.1/packing",
            "Codes of 2, 3, 4 and 8 bits in words",
            clauses("packing.pack", 1, 2) + clauses("packing.unpack", 1, 2),
            {},
        ),
        Profile(
            "lowbit-1.1/qgemv-4",
            "Vector times 4-bit matrix as published",
            clauses("linear.qgemv", 1, 2, 3, 4, 5),
            {"bits": (4,), "group_size": (32, 64, 128), "scale_dtype": ("float16",)},
        ),
        Profile(
            "lowbit-1.1/bfp",
            "Block Floating Point: cast, integer dot product, storage",
            clauses("bfp.cast", 1, 2, 3, 4, 5)
            + clauses("bfp.decode", 1, 2)
            + clauses("bfp.dot", 1, 2, 3)
            + clauses("bfp.total", 1, 2)
            + clauses("bfp.store", 1, 2)
            + clauses("bfp.load", 1),
            {
                "block": BLOCKS,
                "mantissa": MANTISSAS,
                "exponent": EXPONENTS,
                "mantissa_a": MANTISSAS,
                "mantissa_b": MANTISSAS,
            },
        ),
        Profile(
            "lowbit-1.1/kv-cache",
            "Keys and values in Block Floating Point, token by token",
            clauses("kvcache.bfp", 1, 2, 3, 4, 5),
            {
                f"{part}_{choice}": asked
                for part in ("key", "value")
                for choice, asked in (("block", BLOCKS), ("mantissa", MANTISSAS), ("exponent", EXPONENTS))
            },
        ),
        Profile(
            "lowbit-1.1/moe-offload",
            "Which expert lies where, event by event",
            clauses("offload.trace", 1, 2, 3, 4, 5, 6) + clauses("offload.engine", 1, 2, 3, 4, 5),
            {},
        ),
        *(each for row in SHIPPED for each in row.profiles()),
    )
)
"""The profiles by their names."""

SUCCESSORS: Mapping[str, str] = MappingProxyType(
    {f"lowbit-1.0/{name}": f"lowbit-1.1/{name}" for name in ("packing", "qgemv-4", "bfp", "kv-cache", "moe-offload")}
)
"""Profiles of earlier versions, by name, and those that took their place."""
