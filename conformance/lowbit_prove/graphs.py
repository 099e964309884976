"""The theorems of graphs: on a device every value is read as it was written.

`lowbit_cuda` launches the kernels of a block in the order of its program, on one stream. For a single token the
launches are captured as a graph, which keeps that order. Each value lies in a buffer by its name
(`lowbit_cuda.model.block.BUFFERS`). Here a program is followed through the buffers, as `lowbit_prove.steps` does
through columns:

- a launch reads the values that its line names, and nothing has overwritten them;
- a launch that reads whole rows writes to another buffer, because its blocks of threads run at the same time;
- a value fits its buffer;
- at the end the residual stream holds the input of the next block or of the experts.

The buffers that a launch of each kind reads and writes are stated here a second time (`touched`); that the launches
conform is tested on the simulated device. Programs are enumerated: all that the backend accepts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from inspect import getsource
from itertools import product
from typing import Any, cast

from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.model import program as forms
from lowbit.model import step
from lowbit.model.config import LlamaConfig
from lowbit.model.program import BEGIN, END, Line, Program
from lowbit.model.step import block, widths
from lowbit.model.weights import NORMS
from lowbit_cuda.model import block as device
from lowbit_cuda.model import loading, workspace
from lowbit_cuda.model.workspace import Sizes
from lowbit_prove.steps import KINDS, SIZES, WrongPlaceError
from lowbit_prove.theorem import Numbers, Outcome, Proof, Refutation, Theorem, whole

STATEMENT = "in the order of launches every value is read as it was written, in its buffer"
WHOLE = ("norm", "product", "attend", "gate")
"""The kinds of lines whose launches read whole rows."""
INNER, SCORES = "inner", "scores"
"""The buffer inside a gated unit, and the buffer of a gate's scores."""
Buffers = Mapping[str, str]


def theorems() -> Iterator[Theorem]:
    """One theorem for dense blocks and one for blocks with experts."""
    for kind in ("dense-silu", "experts"):
        text = "\n".join((kind, *map(getsource, (forms, step, device, loading, workspace))))
        runs = partial(decide, kind), partial(ran, kind)
        yield Theorem("graphs", kind, STATEMENT, partial(str, text), *runs)


def programs(kind: str) -> Iterator[tuple[LlamaConfig, Program]]:
    """The programs of all blocks of a kind that the backend accepts."""
    activation, routing = KINDS[kind]
    for norms, turned, sizes in product(product((False, True), repeat=len(NORMS)), (False, True), SIZES):
        vectors = [name for name, there in zip(NORMS, norms, strict=True) if there]
        config = LlamaConfig(1, *sizes, 100, 32, 10000.0, 1e-5, routing)
        config = replace(config, unrotated=() if turned else (0,), activation=activation)  # type: ignore[arg-type]  # one of the table
        try:
            loading.check_model(config, "float32")
            loading.check_norms(vectors)
        except NotDeclaredError:
            continue
        yield config, block(config, 0, vectors)


def decide(kind: str, buffers: Buffers = device.BUFFERS) -> Outcome:
    """Follow the values of every program of a kind."""
    steps = 0
    for number, (config, program) in enumerate(programs(kind)):
        try:
            steps += followed(program, config, buffers)
        except WrongPlaceError as error:
            told: Numbers = {"number": number, "program": "; ".join(map(str, program))}
            return Refutation(str(error), told)
    return Proof(steps, "enumeration")


def ran(kind: str, numbers: Numbers, buffers: Buffers = device.BUFFERS) -> Refutation | None:
    """Follow only the program of a refutation."""
    found = dict(enumerate(programs(kind))).get(number := whole(numbers, "number"))
    if found is None:
        raise ArgumentError("number", number, f"the number of a program of {kind}")
    try:
        followed(found[1], found[0], buffers)
    except WrongPlaceError as error:
        return Refutation(str(error))
    return None


def touched(line: Line, buffers: Buffers) -> tuple[list[str], str]:
    """The buffers that a line's launch reads, in the order of its inputs, and the buffer that it writes."""
    if line.kind == "norm":
        return ["x"], "normed"
    if line.kind == "gate":
        return ["normed"], SCORES
    if line.parameter in ("feed_forward.gate", "feed_forward.up"):
        return ["normed"], INNER
    places = {**buffers, **dict.fromkeys(("gate", "up", "inner"), INNER)}
    for name in (*line.inputs, *([line.out] if line.out else [])):
        if name not in places:
            raise WrongPlaceError(f"{line}: {name} has no buffer")
    reads = [places[name] for name in line.inputs]
    if line.kind in ("add", "rotate"):
        return reads, reads[0]  # in place
    return reads, places[line.out] if line.out else ""


def followed(program: Program, config: LlamaConfig, buffers: Buffers) -> int:
    """Follow a program through the buffers; returns the number of values read.

    Raises:
        WrongPlaceError: something is wrong.
    """
    sizes = Sizes(config, config.context, "float32", cast(Any, _Expert(config.feed_forward)))
    room = {name: bytes_ // (workspace.FLOAT * sizes.chunk) for name, bytes_ in sizes.device.items()}
    held, wide, reads = {"x": {BEGIN}}, widths(program, config), 0
    for line in _launched(program):
        sources, target = touched(line, buffers)
        for name, buffer in zip(line.inputs, sources, strict=True):
            if name not in held.get(buffer, ()):
                raise WrongPlaceError(f"{line} reads {buffer}, in which {name} does not lie")
        reads += len(sources)
        if not line.out:
            continue
        if line.kind in WHOLE and target in sources:
            raise WrongPlaceError(f"{line} writes to {target}, which it reads")
        if target not in (INNER, SCORES) and wide[line.out] > room[target]:
            raise WrongPlaceError(f"{line} writes {wide[line.out]} columns to {target}, which has {room[target]}")
        together = held.get(target, set()) if target == INNER and line.kind == "product" else set()
        held[target] = {line.out, *together}  # a gated unit stores both products side by side
    last = END if config.routing is None else "middle"
    if last not in held["x"] or (config.routing is not None and "middle_normed" not in held["normed"]):
        raise WrongPlaceError(f"the residual stream does not hold {last} at the end")
    return reads


class _Expert:
    """The attributes of an expert's layout that determine the sizes of a workspace."""

    fused = True

    def __init__(self, inner: int) -> None:
        self.inner = inner


def _launched(program: Program) -> Iterator[Line]:
    """The lines that are launched before the host continues: all of them, or up to a gate's scores."""
    for line in program:
        yield line
        if line.kind == "gate":
            return
