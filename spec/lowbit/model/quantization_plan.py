r"""Plans: which matrices of a model are quantised, to how many bits, and by which method.

The parts of a sparse model differ in size and in how much error they tolerate. Almost all of Mixtral's weights are
experts, of which each token reads a few, so they get the fewest bits. Every token reads attention, which is small, so
it keeps more. The router is tiny, and an error in it sends a token to the wrong experts, so it stays float32. That is
the *mixed quantisation* of MoE offloading: experts in 2 or 3 bits, attention in 4. A `Plan` describes it for any model,
and `planned` applies it; a matrix that is already quantised is dequantised exactly first.

**Three methods.** ``nearest`` takes the range of each group, as in `affine`. ``hqq`` moves the zero until the weights
lie closer to the grid (`hqq_solver`). ``gptq`` rounds rows one after another and lets later rows compensate for the
errors of earlier ones, on the inputs that the matrix sees while the model reads a text (`gptq_blocks`). All give the
same kind of matrix: scale and minimum in float16, groups along K. HQQ's zero is a real number that is subtracted from
codes, so its minimum is

.. math:: \min = -s\,z,

and codes are computed anew from the scale and minimum as they are stored. The solver takes about seventy times as long
as the range, and three times the memory of the float32 weights of the matrix.

**GPTQ goes block by block.** A plan with it has a calibration text. Each block is quantised on the inputs that it sees
after the quantised blocks before it (`calibration`). A matrix that sees no token, such as an unused expert, is rounded
to the nearest.

Source: MoE offloading §3.3, §4.2; GPTQ (arXiv 2210.17323) §4; errata H.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self, get_args

import numpy as np

from lowbit.arrays import F32
from lowbit.contract.checks import check_choice, check_integer
from lowbit.errors import ArgumentError
from lowbit.model.calibration import CalibrationText, Seen, source_of
from lowbit.model.config import LlamaConfig
from lowbit.model.matrices import Matrix, to_float
from lowbit.model.weights import LayerWeights, LlamaWeights, Progress, linear_shapes
from lowbit.quantization import gptq_blocks, hqq
from lowbit.quantization.affine import QuantizedMatrix, group_codes, quantize
from lowbit.quantization.coded import Grid
from lowbit.quantization.gptq import DAMPING
from lowbit.quantization.packing import BITS, check_rows, pack
from lowbit.system.threads import side_by_side, usable_processors

Method = Literal["nearest", "hqq", "gptq"]
METHODS: tuple[Method, ...] = get_args(Method)

ROUTER, HEAD = "feed_forward.router", "head"


@dataclass(frozen=True)
class Quantization:
    """How one matrix is quantised: convention ``minimum``, scales and minima in float16.

    Attributes:
        bits: 2, 3, 4 or 8.
        group_size: at least 1.
        method: ``nearest``, ``hqq`` or ``gptq``.

    Raises:
        ArgumentError: any of these does not hold.
    """

    bits: int
    group_size: int
    method: Method = "nearest"

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, BITS)
        check_integer("group_size", self.group_size, least=1)
        check_choice("method", self.method, METHODS)

    def __call__(self, weights: F32, inputs: gptq_blocks.Inputs | None = None) -> QuantizedMatrix:
        """Quantise a matrix.

        Args:
            weights: float32, K × N.
            inputs: for ``gptq``: of this matrix; None if it saw no token, in which case it is rounded to nearest.

        Raises:
            ArgumentError: too few rows for a group, for ``hqq`` rows that are not whole groups, or numbers that float16
                cannot hold.
        """
        if self.method == "hqq":
            return by_hqq(weights, self.bits, self.group_size)
        if self.method == "gptq" and inputs is not None:
            return by_gptq(weights, inputs, self.bits, self.group_size)
        return quantize(weights, bits=self.bits, group_size=self.group_size, scale_dtype="float16")

    def check(self, rows: int) -> None:
        """Refuse a number of rows that cannot be quantised in this way, before the matrix is read.

        Raises:
            ArgumentError: rows that do not fill whole units of codes or, for ``hqq``, whole groups; a group longer than
                a column.
        """
        check_rows("rows of weights", rows, self.bits)
        check_integer("group_size", self.group_size, 1, rows)
        if self.method == "hqq" and rows % self.group_size != 0:
            raise ArgumentError("group_size", self.group_size, f"a divisor of {rows} for hqq")

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a quantised K × N matrix.

        >>> weights = np.eye(64, dtype=np.float32)
        >>> Quantization(4, 24).nbytes(64, 64) == Quantization(4, 24)(weights).nbytes
        True
        """
        return rows * columns * self.bits // 8 + 2 * 2 * columns * -(-rows // self.group_size)

    def __str__(self) -> str:
        """In words.

        >>> str(Quantization(3, 64, "hqq"))
        'to 3 bits, groups of 64, by hqq'
        """
        by = "" if self.method == METHODS[0] else f", by {self.method}"
        return f"to {self.bits} bits, groups of {self.group_size}{by}"


def by_hqq(weights: F32, bits: int, group_size: int) -> QuantizedMatrix:
    """Quantise with the minima found by HQQ instead of the least weight of each group.

    >>> weights = (np.arange(-32, 32, dtype=np.float32) / 32).reshape(64, 1) ** 3
    >>> found = [Quantization(2, 64, method)(weights) for method in ("nearest", "hqq")]
    >>> [round(float(np.abs(weights - to_float(matrix)).mean()), 3) for matrix in found]
    [0.198, 0.109]

    Arguments and errors are those of `Quantization`.

    Source: errata H.
    """
    check_integer("group_size", group_size, 1, len(weights))
    found = hqq.as_minimum(hqq.quantize(weights, bits=bits, group_size=group_size, axis=1, scale_dtype="float16"))
    with np.errstate(over="ignore"):  # an infinite minimum is refused by the matrix
        scales, minima = found.scales.astype(np.float16), found.zeros.astype(np.float16)
    if not np.isfinite(minima).all():
        raise ArgumentError("minimum of a group of weights", found.zeros.min(), "what float16 can hold")
    groups = weights.reshape(found.groups, group_size, -1)
    codes = [group_codes(*group, bits, "minimum") for group in zip(groups, scales, minima, strict=True)]
    return QuantizedMatrix(pack(np.concatenate(codes), bits), scales, minima, bits, found.rows, group_size, "minimum")


def by_gptq(weights: F32, inputs: gptq_blocks.Inputs, bits: int, group_size: int) -> QuantizedMatrix:
    """Quantise row by row, so that later rows correct the errors of earlier ones.

    Args:
        weights: float32, K × N.
        inputs: of this matrix, in the order of its rows.
        bits: 2, 3, 4 or 8.
        group_size: at least 1, at most K.

    Raises:
        ArgumentError: as `Quantization`.
    """
    check_integer("group_size", group_size, 1, len(weights))
    coded = gptq_blocks.rounded(weights, inputs, bits, Grid(group_size, convention="minimum"))
    scales, minima = (np.asarray(each, np.float16) for each in (coded.scales, coded.offsets))
    return QuantizedMatrix(pack(coded.codes, bits), scales, minima, bits, len(weights), group_size, "minimum")


@dataclass(frozen=True)
class Plan:
    """How the parts of a model are quantised; None leaves a part as stored.

    Attributes:
        experts: the feed-forward matrices: those of the experts, or of a dense block.
        attention: the four matrices of attention.
        head: the matrix that computes logits; not by ``gptq``.
        text: the calibration text; None if no part is quantised by ``gptq``.
    """

    experts: Quantization | None
    attention: Quantization | None
    head: Quantization | None = None
    text: CalibrationText | None = None

    @classmethod
    def uniform(
        cls, bits: int, group_size: int, method: Method = "nearest", text: CalibrationText | None = None
    ) -> Self:
        """The same for every matrix of the blocks except routers; embedding, head, norms and biases stay unchanged.

        >>> Plan.uniform(4, 64) == Plan(Quantization(4, 64), Quantization(4, 64))
        True
        """
        both = Quantization(bits, group_size, method)
        return cls(experts=both, attention=both, text=text)

    def __str__(self) -> str:
        """In words.

        >>> str(Plan(Quantization(2, 16), Quantization(4, 64)))
        'experts to 2 bits, groups of 16; attention to 4 bits, groups of 64'
        >>> str(Plan.uniform(3, 64, "hqq"))
        'to 3 bits, groups of 64, by hqq'
        """
        if self.head is None and self.experts is not None and self.experts == self.attention:
            return str(self.experts)
        return "; ".join(f"{name} {part}" for name, part in self.parts.items() if part is not None)

    @property
    def parts(self) -> dict[str, Quantization | None]:
        """The parts of a model by name."""
        return {"experts": self.experts, "attention": self.attention, "head": self.head}

    @property
    def needs_text(self) -> bool:
        """Whether a part is quantised by a method that reads a text."""
        return any(part is not None and part.method == "gptq" for part in self.parts.values())

    def fields(self) -> dict[str, Any]:
        """Everything that determines its effect, in JSON types; a calibration text by its digest.

        >>> Plan(Quantization(2, 16), None).fields()["experts"]
        {'bits': 2, 'group_size': 16, 'method': 'nearest'}
        """
        named = {name: None if part is None else asdict(part) for name, part in self.parts.items()}
        return named if self.text is None else named | {"calibration": self.text.fields()}

    def of(self, name: str) -> Quantization | None:
        """How the matrix of this name is quantised; a name is one of `LayerWeights.linears`, or ``head``.

        >>> plan = Plan(experts=Quantization(2, 16), attention=Quantization(4, 64))
        >>> [choice and choice.bits for choice in map(plan.of, ("query", "feed_forward.experts[3].up", ROUTER, "head"))]
        [4, 2, None, None]
        """
        if name == ROUTER:
            return None
        if name == HEAD:
            return self.head
        return self.experts if name.startswith("feed_forward.") else self.attention

    def check(self, config: LlamaConfig) -> None:
        """Refuse a model with a matrix that cannot be quantised in this way, before any is read.

        Raises:
            ArgumentError: see `Quantization.check`; GPTQ without a calibration text or for the head, or a text without
                GPTQ; a window of the text that is longer than the context.
        """
        if self.head is not None and self.head.method == "gptq":
            raise ArgumentError("method of the head", "gptq", "nearest or hqq")
        if self.needs_text != (self.text is not None):
            given = "none" if self.text is None else f"{len(self.text.tokens)} tokens"
            raise ArgumentError("calibration text", given, "a text where a part is quantised by gptq, and else none")
        if self.text is not None and self.text.window > config.context:
            allowed = f"at most {config.context}, the model's context"
            raise ArgumentError("window of the calibration text", self.text.window, allowed)
        shapes = linear_shapes(config) | {HEAD: (config.hidden, config.vocabulary)}
        for name, (rows, _) in shapes.items():
            if (quantization := self.of(name)) is not None:
                quantization.check(rows)

    def __call__(self, name: str, matrix: Matrix, inputs: gptq_blocks.Inputs | None = None) -> Matrix:
        """Quantise a matrix as the plan says; a quantised matrix is first dequantised exactly.

        Args:
            name: of the matrix.
            matrix: K × N.
            inputs: as for `Quantization`.
        """
        quantization = self.of(name)
        return matrix if quantization is None else quantization(to_float(matrix), inputs)

    def on_inputs(self, layer: LayerWeights, seen: Seen) -> LayerWeights:
        """Quantise a block on the inputs of its matrices; matrices with the same inputs one after another, others in
        parallel."""
        linears, alike = layer.linears(), dict[str, list[str]]()
        for name in linears:
            alike.setdefault(source_of(name), []).append(name)

        def work(names: list[str]) -> dict[str, Matrix]:
            uses = any((each := self.of(name)) is not None and each.method == "gptq" for name in names)
            hessian = seen.hessian(names[0]) if uses else None
            inputs = None if hessian is None else gptq_blocks.Inputs.of(hessian, act_order=False, damping=DAMPING)
            return {name: self(name, linears[name], inputs) for name in names}

        done = side_by_side(work, alike.values(), usable_processors())
        found = {name: matrix for each in done for name, matrix in each.items()}
        return layer.changed(lambda name, matrix: found[name])


def planned(weights: LlamaWeights, plan: Plan, progress: Progress | None = None) -> LlamaWeights:
    """Quantise a model in memory as a plan says.

    Args:
        weights: the model.
        plan: how its matrices are quantised.
        progress: called after each block.

    Raises:
        ArgumentError: weights that cannot be quantised in this way; a text that the plan does not use, or a plan that
            lacks one.
    """
    plan.check(weights.config)
    changed = weights.changed(plan, progress) if plan.text is None else calibrated(weights, plan, plan.text, progress)
    return replace(changed, head=plan(HEAD, weights.head))


def calibrated(
    weights: LlamaWeights, plan: Plan, text: CalibrationText, progress: Progress | None = None
) -> LlamaWeights:
    """Quantise the blocks of a model one after another, each on its inputs after the quantised blocks before it."""
    streams, layers = text.streams(weights.config, weights.embedding), list[LayerWeights]()
    for number, layer in enumerate(weights.layers):
        layers.append(plan.on_inputs(layer, streams.seen(number, layer)))
        streams = streams.through(number, layers[-1])
        if progress is not None:
            progress(len(layers), len(weights.layers))
    return replace(weights, layers=tuple(layers))
