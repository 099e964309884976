r"""One block of a decoder: attention and a feed-forward part, each added to the residual stream.

A decoder sends a vector of `hidden` numbers for each token through a stack of blocks. A block has two parts, and each
*adds* its result to what came in, so the vectors form a *residual stream* that every block reads and none overwrites:

.. math::

    x \leftarrow x + \mathrm{Attention}(\mathrm{norm}(x)), \qquad
    x \leftarrow x + \mathrm{FeedForward}(\mathrm{norm}(x)).

Because each block changes the stream only a little, the stream before one block resembles the stream before the next;
from that resemblance the chapter `offload` guesses which experts the next block will need. The norm is that of the
chapter `layers`. Gemma puts a second norm after each part, before the sum, and OLMo 2 has only that one. Granite
multiplies the result of each part by a factor before the sum.

**Attention** projects to queries, keys and values, rotates queries and keys by their positions (`rope`), reads the past
(`attention`) and projects back:
:math:`\mathrm{Attention}(x) = \mathrm{attend}(R\,xW_q,\; R\,xW_k,\; xW_v)\,W_o`. Qwen2 adds a bias to each of the three
projections. Qwen3 and Gemma 3 norm every query head and every key head, with one gain for all heads, before they are
rotated; OLMo 2 norms all heads together. Scores then stay within bounds, however large the weights grow.

**Feed-forward** is either a dense gated linear unit,

.. math:: \mathrm{FeedForward}(x) = (\mathrm{act}(xW_{gate}) \otimes xW_{up})\,W_{down},

with act = silu (SwiGLU) or gelu (GeGLU), a clamped unit (`layers`), or a sparse layer that sends each token to a few of
many such units (`routing`). The rest of the block is the same for all.

**The order of all this** is the program of the chapter `step`. An `Interpreter` runs a program line by line: it is the
reference for what a step computes, on any backend.

**Precision.** The linear layers hold nearly all weights and take nearly all the time. A backend computes them, in
float32 by its contract. The elementwise operations around them are float64 by default: norms, rotations, softmax, the
residual stream. Two backends that agree on the linear layers then agree on the logits, because nothing else differs.
Where a backend also computes elementwise operations, every value of the program is float32; the operations of the
chapters `layers`, `rope` and `attention` then say what the backend promises.

Source: Llama (arXiv 2302.13971) §2.2; Mixtral (arXiv 2401.04088) §2.1; GQA §2.2; Gemma 3 (arXiv 2503.19786) §2.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowbit.arrays import F32, F64
from lowbit.attention.attention import KeyValueCache, attend
from lowbit.attention.ksort import LayerOrders, inverse
from lowbit.attention.rope import Frequencies, Rotation, rotate
from lowbit.attention.shaped import attend_shaped
from lowbit.errors import ArgumentError
from lowbit.linear.elementary import silu, soft_cap, softmax
from lowbit.model.config import Routing
from lowbit.model.elementwise import ElementwiseOps, Numbers
from lowbit.model.layers import clamped_swiglu, gelu, rms_norm
from lowbit.model.matrices import Matrix, is_float, to_float
from lowbit.model.program import BEGIN, END, Line, Program
from lowbit.model.step import gated
from lowbit.model.weights import LayerWeights
from lowbit.moe.routing import Ids, top_k, weights

Linear = Callable[[F32], F32]
"""A linear layer: float32, T × K, to float32, T × N."""

MakeLinear = Callable[[Matrix], Linear]
"""Makes the function that multiplies by a matrix."""

Observer = Callable[[int, F64, Ids], None]
"""Called by a sparse layer with its number, its input (float64, T × hidden) and the experts chosen (T × k)."""


def plain_linear(matrix: Matrix) -> Linear:
    """The simplest linear layer, for floats: numpy's product in float32.

    Raises:
        ArgumentError: a quantised matrix, for which the caller must choose a kernel.
    """
    if not is_float(matrix):
        raise ArgumentError("matrix", "quantised", "floats (`lowbit.runtime` runs quantised ones on a backend)")
    weights = to_float(matrix)
    return lambda x: x @ weights


def _norm(gain: F32, epsilon: float) -> Callable[[Numbers], Numbers]:
    wide = gain.astype(np.float64)
    return lambda x: rms_norm(x, wide, epsilon)


def check_scores(scores: F32, what: str = "a router's score") -> None:
    """Refuse scores of experts, or logits, that are not finite.

    Raises:
        ArgumentError: one is not finite because weights are too large, for example in a damaged file.
    """
    if not np.isfinite(scores).all():
        sentence = f"{what} is not finite: the weights overflow float32; the model file may be damaged"
        raise ArgumentError("weights", "too large", "weights that do not overflow float32", sentence)


def routes(scores: F32, routing: Routing) -> tuple[Ids, F64]:
    """The experts of each token and their weights, T × k both, for a router's scores (float32, T × E).

    >>> routes(np.array([[0, 2, 1, 2]], np.float32), Routing(experts=4, top_k=2))
    (array([[1, 3]]), array([[0.5, 0.5]]))

    Raises:
        ArgumentError: a score that is not finite.
    """
    check_scores(scores)
    if routing.softmax == "before":
        scores = softmax(scores.astype(np.float64)).astype(np.float32)
    chosen = top_k(scores, routing.top_k)
    return chosen, weights(scores, chosen, routing.softmax)


def _wide(cache: KeyValueCache) -> tuple[F64, F64]:
    """The keys and values of a cache in float64, whatever its number format."""
    return cache.keys.astype(np.float64, copy=False), cache.values.astype(np.float64, copy=False)


def _attend_shaped(
    queries: Numbers,
    cache: KeyValueCache,
    window: int | None,
    scale: float | None,
    cap: float | None,
    sinks: F32 | None,
) -> F64:
    wide = None if sinks is None else sinks.astype(np.float64)
    return attend_shaped(queries, *_wide(cache), window, scale, cap, wide)


FORMULAS = ElementwiseOps(
    dtype=np.dtype(np.float64),
    norm=_norm,
    swiglu=lambda gate, up: silu(gate) * up,
    geglu=lambda gate, up: gelu(gate) * up,
    clamped_swiglu=clamped_swiglu,
    rotate=rotate,
    gate=lambda x, router: (x @ router.astype(np.float64)).astype(np.float32),
    route=routes,
    attend=lambda queries, cache, window: attend(queries, *_wide(cache), window),
    attend_shaped=_attend_shaped,
    soft_cap=soft_cap,
    cache=KeyValueCache,
)
"""The elementwise operations in float64, by the formulas of the specification."""


# **The interpreter.**


@dataclass(frozen=True)
class Place:
    """The positions and caches of the tokens of a call.

    Attributes:
        rotations: of their positions, for all frequencies of the model.
        caches: the keys and values before them, to which those of the tokens are appended: one cache if the tokens
            follow one another in a sequence; or one for each token if each continues its own sequence.
    """

    rotations: Mapping[Frequencies, Rotation]
    caches: Sequence[KeyValueCache]

    def parts(self) -> Iterator[tuple[slice, KeyValueCache]]:
        """The rows of each sequence, with its cache."""
        if len(self.caches) == 1:
            yield slice(None), self.caches[0]
            return
        for row, cache in enumerate(self.caches):
            yield slice(row, row + 1), cache


Function = Callable[..., Any]
"""An executable line: from the place and the values it reads to the value it writes."""


class Interpreter:
    """A program with its parameters, which runs line by line.

    It starts from the input of its first line, in a block the residual stream, and returns the value of its last.

    >>> line = Line("add", "result", ("x", "x"))
    >>> Interpreter((line,), {}, plain_linear)(np.array([[1.0, 2.0]]))
    array([[2., 4.]])

    Attributes:
        parameters: matrices and vectors by name.
        linears: the linear layers by the names of their matrices.
        lines: each line with the function that runs it.
    """

    def __init__(
        self,
        program: Program,
        parameters: Mapping[str, Any],
        linear: MakeLinear,
        ops: ElementwiseOps = FORMULAS,
        observe: Callable[[F64, Ids], None] | None = None,
    ) -> None:
        """Prepare every line.

        Args:
            program: a sound one (`lowbit.model.step.check`).
            parameters: matrices and vectors by their names in the program.
            linear: makes the function that multiplies by a matrix, called once for each matrix.
            ops: the elementwise operations; their dtype is that of every value.
            observe: called by ``experts`` with their input and the experts chosen.
        """
        self.parameters = parameters
        make = _Making(parameters, linear, ops, observe, {})
        self._begin, self._end = program[0].inputs[0], program[-1].out
        self.lines: list[tuple[Line, Function]] = [(line, getattr(make, line.kind)(line)) for line in program]
        self.linears: Mapping[str, Linear] = make.linears

    def __call__(self, x: Numbers, place: Place | None = None) -> Any:
        """The result for the value x, both of T rows; `place` is required if the program contains attention."""
        values = {self._begin: x}
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow here is refused with the logits
            for line, function in self.lines:
                result = function(place, *(values[name] for name in line.inputs))
                if line.out:
                    values[line.out] = result
        return values[self._end]


@dataclass(frozen=True)
class _Making:
    """Makes the function of a line; each method is named after a kind of line."""

    parameters: Mapping[str, Any]
    linear: MakeLinear
    ops: ElementwiseOps
    observe: Callable[[F64, Ids], None] | None
    linears: dict[str, Linear]

    def norm(self, line: Line) -> Function:
        gain = self.parameters[str(line.parameter)]
        norm, size = self.ops.norm(gain, line.setting("epsilon")), gain.size
        return lambda _, x: norm(x.reshape(-1, size)).reshape(x.shape)

    def product(self, line: Line) -> Function:
        name, dtype = str(line.parameter), self.ops.dtype
        self.linears[name] = linear = self.linear(self.parameters[name])
        return lambda _, x: linear(x.astype(np.float32, copy=False)).astype(dtype, copy=False)

    def bias(self, line: Line) -> Function:
        bias = self.parameters[str(line.parameter)].astype(self.ops.dtype)
        return lambda _, x: x + bias

    def rotate(self, line: Line) -> Function:
        frequencies, head_dim, rotate = line.frequencies, line.setting("head_dim"), self.ops.rotate

        def rotated(place: Place, x: Numbers) -> Any:
            return rotate(x.reshape(len(x), -1, head_dim), place.rotations[frequencies]).reshape(x.shape)

        return rotated

    def rotate_sorted(self, line: Line) -> Function:
        """Restore the channels' order, rotate, and sort them again: to the bit as with
        `lowbit.attention.ksort.permuted_layout`."""
        orders = LayerOrders.of(self.parameters[str(line.parameter)], line.setting("head_dim"), line.setting("heads"))
        columns, rotate = orders.query_columns, self.rotate(line)
        back = inverse(columns)
        return lambda place, x: np.take(rotate(place, np.take(x, back, axis=1)), columns, axis=1)

    def append(self, line: Line) -> Function:
        def append(place: Place, keys: Numbers, values: Numbers) -> None:
            heads = (len(keys), *place.caches[0].keys.shape[::2])
            for rows, cache in place.parts():
                cache.append(keys.reshape(heads)[rows], values.reshape(heads)[rows])

        return append

    def attend(self, line: Line) -> Function:
        head_dim, window, attend = line.setting("head_dim"), line.setting("window"), self.ops.attend

        def attended(place: Place, queries: Numbers) -> Any:
            heads = queries.reshape(len(queries), -1, head_dim)
            mixed = [attend(heads[rows], cache, window) for rows, cache in place.parts()]
            return np.concatenate(mixed).reshape(queries.shape)

        return attended

    def attend_shaped(self, line: Line) -> Function:
        head_dim, attend = line.setting("head_dim"), self.ops.attend_shaped
        sinks = None if line.parameter is None else self.parameters[line.parameter]
        shape = line.setting("window"), line.setting("scale"), line.setting("cap"), sinks

        def attended(place: Place, queries: Numbers) -> Any:
            heads = queries.reshape(len(queries), -1, head_dim)
            mixed = [attend(heads[rows], cache, *shape) for rows, cache in place.parts()]
            return np.concatenate(mixed).reshape(queries.shape)

        return attended

    def clamped_swiglu(self, line: Line) -> Function:
        limit = line.setting("limit")
        return lambda _, gate, up: self.ops.clamped_swiglu(gate, up, limit)

    def swiglu(self, line: Line) -> Function:
        return lambda _, gate, up: self.ops.swiglu(gate, up)

    def geglu(self, line: Line) -> Function:
        return lambda _, gate, up: self.ops.geglu(gate, up)

    def soft_cap(self, line: Line) -> Function:
        cap = line.setting("cap")
        return lambda _, x: self.ops.soft_cap(x, cap)

    def add(self, line: Line) -> Function:
        return lambda _, x, y: x + y

    def scale(self, line: Line) -> Function:
        factor = self.ops.dtype.type(line.setting("factor"))
        return lambda _, x: x * factor

    def gate(self, line: Line) -> Function:
        router, gate, dtype = self.parameters[str(line.parameter)], self.ops.gate, self.ops.dtype
        return lambda _, x: gate(x, router).astype(dtype)

    def experts(self, line: Line) -> Function:
        """Call each expert once for all tokens that chose it, in ascending order, which is also the order in which a
        token's results are added."""
        biases = (line.setting("biases") or "").split()
        program = gated(line.setting("activation"), BEGIN, END, limit=line.setting("limit"), biases=biases)
        name = str(line.parameter)
        rows = {bias: self.parameters[f"expert_{bias}"].reshape(len(self.parameters[name]), -1) for bias in biases}
        experts = [
            Interpreter(program, own | {bias: rows[bias][number] for bias in biases}, self.linear, self.ops)
            for number, own in enumerate(self.parameters[name])
        ]
        for number, expert in enumerate(experts):
            self.linears.update({f"{name}[{number}].{part}": linear for part, linear in expert.linears.items()})
        routing = Routing(len(experts), line.setting("top_k"), line.setting("softmax"))

        def run(_: Place, x: Numbers, scores: Numbers) -> Any:
            chosen, factors = self.ops.route(scores.astype(np.float32, copy=False), routing)
            if self.observe is not None:
                self.observe(x.astype(np.float64, copy=False), chosen)
            y = np.zeros_like(x)
            for e in np.unique(chosen):
                tokens, place = np.nonzero(chosen == e)
                factor = factors[tokens, place, np.newaxis].astype(self.ops.dtype, copy=False)
                y[tokens] += factor * experts[e](x[tokens])
            return y

        return run


def parameters_of(layer: LayerWeights) -> dict[str, Any]:
    """The parameters of a block by the names of its program; those of the experts are a list, one entry for each."""
    vectors = {name: value for name, value in vars(layer).items() if isinstance(value, np.ndarray)}
    experts = getattr(layer.feed_forward, "experts", ())
    own = {"feed_forward.experts": [expert.linears() for expert in experts]} if experts else {}
    return vectors | layer.linears() | own
