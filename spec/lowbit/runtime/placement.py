"""Put a model on a backend: the whole model, or one layer at a time.

Compiling the step of a model takes seconds. A backend that keeps compiled steps between processes finds them by digests
of the model's files, so a model that ran before starts without reading its weights.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from lowbit.backend.base import Backend, StepRequest
from lowbit.backend.whole_model import DeviceSettings
from lowbit.errors import NotDeclaredError
from lowbit.formats.checkpoint.reader import Checkpoint
from lowbit.formats.fetch import Report
from lowbit.model.block import FORMULAS, Linear, MakeLinear
from lowbit.model.decoder import AnyDecoder, Decoder
from lowbit.model.matrices import Matrix
from lowbit.model.quantization_plan import Plan
from lowbit.model.step import step_of
from lowbit.model.weights import DeferredWeights, LayeredWeights, LlamaWeights, matrices, weight_bytes
from lowbit.runtime import elementwise
from lowbit.runtime.linears import BackendLinears
from lowbit.runtime.options import Options
from lowbit.runtime.stored import all_of, part_of, quantised
from lowbit.system.interrupts import Interrupts, deferred
from lowbit.system.memory import check_memory


@dataclass(frozen=True)
class Account:
    """An account of a run.

    Attributes:
        fields: for programs, in JSON types: model, backend and plan; then contract, steps and matrices of a backend
            that runs one layer at a time, or settings and device of one that runs whole models.
        sentence: the same for people.
    """

    fields: Mapping[str, Any]
    sentence: str


MOST_KEPT = 4 * 2**30
"""Bytes of the largest directory whose step is kept: the cache holds a copy of its weights in their prepared layout."""

Placed = tuple[AnyDecoder, Callable[[], Account], Interrupts]
"""A decoder, its account, and the interrupts that it must check for."""


# **Whole models.**


def whole(
    name: str, layered: LayeredWeights, backend: Backend, options: Options, report: Report, opened: ExitStack
) -> Placed:
    """Put a model on a backend that runs whole models; `opened` closes its decoder."""
    settings = options.device or DeviceSettings()
    weights = quantised(name, layered, options.plan, report)
    interrupts = opened.enter_context(deferred())
    progress = interrupts.checked(part_of(report, f"loading {name}"))
    decoder = opened.enter_context(backend.decoder(weights, settings, progress))

    def account() -> Account:
        device = decoder.account()
        fields = {
            "model": name,
            "backend": backend.name,
            "requantized": None if options.plan is None else options.plan.fields(),
            "settings": asdict(settings),
            "device": device.describe(),
        }
        return Account(fields, f"{name} {_quantisation(options.plan)} on {backend.name}; {device.sentence()}")

    return decoder, account, interrupts


# **One layer at a time.**


def by_layer(
    name: str, layered: LayeredWeights, backend: Backend, options: Options, report: Report, opened: ExitStack
) -> Placed:
    """Put a model on a backend that multiplies by one matrix at a time; the model is in memory."""
    linears = BackendLinears(backend, options.contract)  # refuses undeclared products before anything is quantised
    may_be_kept = _may_be_kept(layered, backend, options)
    if may_be_kept and isinstance(layered, Checkpoint):
        layered = layered.identified(part_of(report, f"checking {name}"))

    @cache
    def weights() -> LlamaWeights:
        stored = quantised(name, layered, options.plan, report)
        if isinstance(stored, Checkpoint):
            check_memory(f"model {name}", stored.nbytes)
        return all_of(name, stored, report)

    if may_be_kept and (found := _kept(name, layered, weights, backend, options, report)) is not None:
        return found
    backend.warm_up("linear.qgemv")  # before the first report: some backends must start while there is only one thread
    total = sum(1 for what, _ in matrices(weights()) if not what.endswith("router"))
    progress = part_of(report, f"preparing {backend.name}")
    made: dict[int, Linear] = {}

    def linear(matrix: Matrix) -> Linear:
        if id(matrix) not in made:
            made[id(matrix)] = linears(matrix)
            progress(len(made), total)
        return made[id(matrix)]

    decoder, how, names = _with_step(weights(), linear, backend, options)
    facts = _facts(weights(), linears, names)
    return decoder, lambda: _account(name, backend, facts, options, how), Interrupts()


def _may_be_kept(layered: LayeredWeights, backend: Backend, options: Options) -> bool:
    """Whether a kept step may exist: the backend keeps steps, and this model is not a large directory."""
    if not backend.keeps_steps or options.step not in ("auto", "compiled"):
        return False
    return not isinstance(layered, Checkpoint) or layered.nbytes <= MOST_KEPT


def _identity(layered: LayeredWeights, options: Options) -> tuple[str, ...] | None:
    """The identity of a model and of its products; None if it does not come from a file."""
    if isinstance(layered, DeferredWeights):
        source = layered.digest()
    elif isinstance(layered, Checkpoint):
        source = hashlib.sha256(json.dumps(layered.contents(), sort_keys=True).encode()).hexdigest()
    else:
        return None
    plan = "as stored" if options.plan is None else json.dumps(options.plan.fields(), sort_keys=True)
    return source, plan, options.contract, options.keys or "float32"


def _kept(
    name: str,
    layered: LayeredWeights,
    weights: Callable[[], LlamaWeights],
    backend: Backend,
    options: Options,
    report: Report,
) -> Placed | None:
    """A decoder whose compiled step the backend keeps between processes; None if there is none for this model."""
    if (identity := _identity(layered, options)) is None:
        return None

    def make(engine: Backend) -> tuple[Decoder, Mapping[str, Any]]:
        linears, held = BackendLinears(engine, options.contract), weights()
        part_of(report, f"preparing {engine.name}")
        steps = elementwise.on_backend(engine, held.config, FORMULAS, elementwise.OPERATIONS, options.keys)
        elementwise.check_all(engine, held.config, steps.names)
        return Decoder(held, linears, ops=steps.ops), _facts(held, linears, steps.names)

    request = StepRequest(identity, layered.config, lambda: step_of(weights()), make)
    if (found := backend.kept_step(request)) is None:
        return None
    decoder, facts = found
    return decoder, lambda: _account(name, backend, facts, options, "compiled"), Interrupts()


def _with_step(
    weights: LlamaWeights, linear: MakeLinear, backend: Backend, options: Options
) -> tuple[AnyDecoder, str, tuple[str, ...]]:
    """A decoder whose step runs as the options ask, the name of that way, and the elementwise operations on the
    backend.

    Raises:
        NotDeclaredError: the options ask for a compiled step, but the backend has none for this model.
    """
    asked = options.elementwise(backend)
    steps = elementwise.on_backend(backend, weights.config, FORMULAS, asked, options.keys)
    decoder = Decoder(weights, linear, ops=steps.ops)
    if options.step not in ("auto", "compiled") or (options.step == "auto" and not asked):
        return decoder, "operations" if steps.names else "formulas", steps.names
    try:
        elementwise.check_all(backend, weights.config, steps.names)
        return backend.compiled(decoder), "compiled", steps.names
    except NotDeclaredError:
        if options.step == "compiled":
            raise
    formulas = elementwise.on_backend(backend, weights.config, FORMULAS, (), options.keys)
    return Decoder(weights, linear, ops=formulas.ops), "formulas", ()


def _facts(weights: LlamaWeights, linears: BackendLinears, steps: tuple[str, ...]) -> dict[str, Any]:
    """Facts about a model's decoder, in JSON types."""
    size = weight_bytes(weights)
    routers = sum(matrix.nbytes for what, matrix in matrices(weights) if what.endswith("router"))
    return {
        "contract": linears.contract,
        "steps_on_backend": list(steps),
        "weight_bytes": {"blocks": size.blocks, "head": size.head, "read_per_token": linears.read_bytes + routers},
        "matrices": {"by_backend": linears.prepared, "by_numpy_float32": dict(linears.float_matrices)},
    }


def _account(name: str, backend: Backend, facts: Mapping[str, Any], options: Options, how: str) -> Account:
    plan, keys = options.plan, options.keys
    requantized = None if plan is None else plan.fields()
    fields = {"model": name, "backend": backend.name, "step": how, "keys": keys, "requantized": requantized, **facts}
    size, taken = facts["weight_bytes"], facts["matrices"]
    integer = ", integer contract" if facts["contract"] == "integer" else ""
    parts = [f"{name} {_quantisation(plan)}, {(size['blocks'] + size['head']) / 1e6:.1f} MB"]
    parts += [f"{taken['by_backend']} matrices on {backend.name}{integer}"]
    parts += ["step compiled"] if how == "compiled" else []
    parts += [] if keys is None else [f"keys in {keys}"]
    parts += [f"also on {backend.name}: {', '.join(facts['steps_on_backend'])}"] if how == "operations" else []
    parts += [f"{count} in float32 by numpy: {reason}" for reason, count in taken["by_numpy_float32"].items()]
    return Account(fields, "; ".join(parts))


def _quantisation(plan: Plan | None) -> str:
    return "as stored" if plan is None else f"quantised {plan}"
