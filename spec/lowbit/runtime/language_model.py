"""A language model on a backend: `load` makes it, and it turns text or tokens into tokens.

There are two ways to run a model, and a `LanguageModel` hides which one it is. Most backends multiply by one matrix at
a time: the decoder is the specification's (`lowbit.model.decoder`), all weights are in memory, and each matrix is given
to the backend, or to numpy where the backend does not declare it. A backend with a decoder of its own
(`lowbit.backend.whole_model`) runs the whole model, and gets its weights one block at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lowbit.arrays import F32
from lowbit.backend import registry
from lowbit.backend.base import Backend
from lowbit.backend.whole_model import DeviceSettings
from lowbit.contract.checks import check_choice
from lowbit.errors import ArgumentError
from lowbit.formats.checkpoint.reader import Checkpoint
from lowbit.formats.tokenizer import Tokenizer
from lowbit.model import decoder as decoders
from lowbit.model import perplexity as perplexities
from lowbit.model.block import FORMULAS, Linear
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import AnyDecoder, Decoder, Step
from lowbit.model.perplexity import Perplexity
from lowbit.model.quantization_plan import Plan
from lowbit.model.weights import LayeredWeights, LlamaWeights, Matrix, Progress, in_memory, matrices, weight_bytes
from lowbit.runtime import elementwise
from lowbit.runtime.linears import CONTRACTS, BackendLinears, Contract
from lowbit.runtime.stored import Report, StoredModel, open_model, part_of, quantised, silent
from lowbit.system.interrupts import Interrupts, deferred
from lowbit.system.memory import check_memory

IN_MEMORY = "weights in memory"
"""The name of a model that comes from no file."""


@dataclass(frozen=True)
class Options:
    """How a model is run.

    Attributes:
        plan: quantise its matrices first; None for the weights as they are stored.
        contract: ``float32``, or ``integer`` to multiply by activations cast to 8-bit mantissas.
        steps: also run norms, SwiGLU, RoPE and attention on the backend where it declares them: in float32, and faster;
            or only some of them, by their names in `lowbit.runtime.elementwise.OPERATIONS`.
        device: settings of a backend that runs whole models; None for its defaults.
        by_layer: run one layer at a time, even on a backend that runs whole models.
    """

    plan: Plan | None = None
    contract: Contract = "float32"
    steps: bool | tuple[str, ...] = False
    device: DeviceSettings | None = None
    by_layer: bool = False

    def runs_whole(self, backend: Backend) -> bool:
        """Whether the backend runs the whole model, and not one layer at a time."""
        return backend.runs_models and not self.by_layer

    @property
    def elementwise(self) -> tuple[str, ...]:
        """The elementwise operations that are asked of the backend.

        >>> Options(steps=("attention.attend",)).elementwise, Options().elementwise
        (('attention.attend',), ())
        """
        if isinstance(self.steps, bool):
            return elementwise.OPERATIONS if self.steps else ()
        return self.steps

    def check(self, backend: Backend, spelled: Callable[[str], str] = str) -> None:
        """Refuse options that do not apply to a backend.

        Args:
            backend: the model is to run on it.
            spelled: from the name of an option to how the user knows it.

        Raises:
            ArgumentError: one does not apply, or there is no such contract or elementwise operation.
        """
        check_choice(spelled("contract"), self.contract, CONTRACTS)
        for operation in self.elementwise:
            check_choice(spelled("steps"), operation, elementwise.OPERATIONS)
        if not self.runs_whole(backend):
            if self.device is not None:
                raise not_whole(spelled("device"), self.device, backend)
            return
        for name, given in (("contract", self.contract != "float32"), ("steps", bool(self.steps))):
            if given:
                option = spelled(name)
                sentence = f"{option} does not apply to a backend that runs whole models, such as {backend.name}"
                raise ArgumentError(option, getattr(self, name), "a backend that runs one layer at a time", sentence)


def not_whole(option: str, given: object, backend: Backend) -> ArgumentError:
    """The error of an option for whole models, on a backend that runs one layer at a time."""
    sentence = f"{option} applies only where a backend runs whole models; {backend.name} runs one layer at a time"
    return ArgumentError(option, given, "a backend that runs whole models", sentence)


@dataclass(frozen=True)
class Account:
    """What was run.

    Attributes:
        fields: for programs, in types that JSON has: model, backend and plan; then contract, steps and matrices of a
            backend that runs one layer at a time, or settings and device of one that runs whole models.
        sentence: the same for people.
    """

    fields: Mapping[str, Any]
    sentence: str


class LanguageModel:
    """A model on a backend; `load` makes it, and leaving it as a context manager closes it.

    While a model is on a device, Ctrl-C takes effect between layers and tokens (`lowbit.system.interrupts`).

    Attributes:
        name: of the file or directory.
        decoder: what runs.
    """

    def __init__(
        self,
        name: str,
        decoder: AnyDecoder,
        tokenizer: Tokenizer | None,
        account: Callable[[], Account],
        interrupts: Interrupts,
        opened: ExitStack,
    ) -> None:
        """`load` calls this; `opened` holds what is closed with the model."""
        self.name, self.decoder = name, decoder
        self._tokenizer, self._account, self._interrupts, self._opened = tokenizer, account, interrupts, opened

    @property
    def config(self) -> LlamaConfig:
        """The shape of the model."""
        return self.decoder.config

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to tokens and back.

        Raises:
            ArgumentError: the model was made of weights in memory.
        """
        if self._tokenizer is None:
            sentence = "weights in memory have no tokenizer; give tokens in place of text"
            raise ArgumentError("model", self.name, "a model with a tokenizer", sentence)
        return self._tokenizer

    def tokens_of(self, prompt: str | Sequence[int], *, begin: bool = True) -> list[int]:
        """The tokens of a prompt; tokens stay as they are."""
        return self.tokenizer.encode(prompt, begin=begin) if isinstance(prompt, str) else list(prompt)

    def generate(
        self,
        prompt: str | Sequence[int],
        count: int = 64,
        *,
        stop: Sequence[int] | None = None,
        forced: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> Iterator[Step]:
        """Continue a prompt with the likeliest tokens, yielding each as soon as it is known.

        Args:
            prompt: text, or at least one token.
            count: the most tokens to generate.
            stop: tokens that end the sequence; None for those of the model's own tokenizer.
            forced: as in `lowbit.model.decoder.generate`.
            progress: called while the prompt is read.

        Raises:
            ArgumentError: wrong arguments; raised by the first step.
        """
        if stop is None:
            stop = () if self._tokenizer is None else self._tokenizer.stop
        checked = self._interrupts.checked(progress)
        ids = self.tokens_of(prompt)
        for step in decoders.generate(self.decoder, ids, count, stop=stop, forced=forced, progress=checked):
            yield step
            self._interrupts.check()

    def complete(self, prompt: str, count: int = 64) -> str:
        """The text that follows a prompt: that of the tokens of `generate`."""
        return self.tokenizer.decode(step.token for step in self.generate(prompt, count))

    def logits(self, prompt: str | Sequence[int], progress: Progress | None = None) -> F32:
        """The score of every token that could follow a prompt: float32, vocabulary.

        Raises:
            ArgumentError: no tokens, or more than the context.
        """
        return decoders.next_logits(self.decoder, self.tokens_of(prompt), self._interrupts.checked(progress))

    def perplexity(self, text: str | Sequence[int], window: int = 512, progress: Progress | None = None) -> Perplexity:
        """The perplexity of a text, over windows that do not overlap (`lowbit.model.perplexity`).

        Args:
            text: text, or tokens without a mark of the beginning.
            window: tokens of a window.
            progress: called with the tokens read so far and their number.

        Raises:
            ArgumentError: wrong window; too few tokens to score one.
        """
        bos = None if self._tokenizer is None else self._tokenizer.bos
        ids, checked = self.tokens_of(text, begin=False), self._interrupts.checked(progress)
        return perplexities.perplexity(self.decoder, ids, window, bos=bos, progress=checked)

    def account(self) -> Account:
        """What was run: model, backend, bytes, and what the device did so far."""
        return self._account()

    def close(self) -> None:
        """Give back the device's memory, and the backend if `load` opened it. Closing twice is harmless."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)


AS_STORED = Options()


def load(
    model: str | Path | StoredModel | LayeredWeights,
    backend: str | Backend | None = None,
    options: Options = AS_STORED,
    report: Report = silent,
) -> LanguageModel:
    """Put a model on a backend.

    Args:
        model: the path of a GGUF file or of a checkpoint directory, a model that is open, or weights without a
            tokenizer.
        backend: its name, or None for the default (`lowbit.backend.registry.DEFAULT_ORDER`), which are closed with the
            model; or a backend, which stays open.
        options: how it is run.
        report: called while files are read, and weights quantised and prepared.

    Raises:
        LowbitError: no such model or backend, options that do not apply, weights that cannot be quantised so, too
            little memory.
    """
    with ExitStack() as opened:
        engine = backend if isinstance(backend, Backend) else opened.enter_context(registry.load(backend))
        options.check(engine)
        stored = open_model(Path(model), report) if isinstance(model, str | Path) else model
        if isinstance(stored, StoredModel):
            name, weights, tokenizer = stored.name, stored.layered, stored.tokenizer
        else:
            name, weights, tokenizer = IN_MEMORY, stored, None
        place = _whole if options.runs_whole(engine) else _by_layer
        decoder, account, interrupts = place(name, weights, engine, options, report, opened)
        return LanguageModel(name, decoder, tokenizer, account, interrupts, opened.pop_all())


Placed = tuple[AnyDecoder, Callable[[], Account], Interrupts]
"""A decoder, what it says of itself, and the interrupts that it is to check for."""


# **Whole models.**


def _whole(
    name: str, layered: LayeredWeights, backend: Backend, options: Options, report: Report, opened: ExitStack
) -> Placed:
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
            "requantized": None if options.plan is None else asdict(options.plan),
            "settings": asdict(settings),
            "device": device.describe(),
        }
        return Account(fields, f"{name} {_quantisation(options.plan)} on {backend.name}; {device.sentence()}")

    return decoder, account, interrupts


# **One layer at a time.**


def _by_layer(
    name: str, layered: LayeredWeights, backend: Backend, options: Options, report: Report, opened: ExitStack
) -> Placed:
    linears = BackendLinears(backend, options.contract)  # refuses what is not declared before anything is quantised
    backend.warm_up("linear.qgemv")  # before the first report: some backends must start while there is one thread
    layered = quantised(name, layered, options.plan, report)
    if isinstance(layered, Checkpoint):
        check_memory(f"model {name}", sum(4 * prod(place.shape) for place in layered.table.values()))
    weights = layered if isinstance(layered, LlamaWeights) else in_memory(layered, part_of(report, f"reading {name}"))
    progress = part_of(report, f"preparing {backend.name}")
    steps = elementwise.on_backend(backend, weights.config, FORMULAS, options.elementwise)
    total, done = sum(1 for _ in matrices(weights)), 0

    def linear(matrix: Matrix) -> Linear:
        nonlocal done
        function = linears(matrix)
        done += 1
        progress(done, total)
        return function

    decoder = Decoder(weights, linear, ops=steps.ops)
    return decoder, lambda: _account(name, weights, linears, options.plan, steps.names), Interrupts()


def _account(
    name: str, weights: LlamaWeights, linears: BackendLinears, plan: Plan | None, steps: tuple[str, ...]
) -> Account:
    size, backend = weight_bytes(weights), linears.backend.name
    fields = {
        "model": name,
        "backend": backend,
        "contract": linears.contract,
        "steps_on_backend": list(steps),
        "requantized": None if plan is None else asdict(plan),
        "weight_bytes": {"blocks": size.blocks, "head": size.head, "read_per_token": linears.read_bytes},
        "matrices": {"by_backend": linears.prepared, "by_numpy_float32": dict(linears.float_matrices)},
    }
    contract = ", integer contract" if linears.contract == "integer" else ""
    parts = [f"{name} {_quantisation(plan)}, {size.total / 1e6:.1f} MB"]
    parts += [f"{linears.prepared} matrices on {backend}{contract}"]
    parts += [f"also on {backend}: {', '.join(steps)}"] if steps else []
    parts += [f"{count} in float32 by numpy: {reason}" for reason, count in linears.float_matrices.items()]
    return Account(fields, "; ".join(parts))


def _quantisation(plan: Plan | None) -> str:
    return "as stored" if plan is None else f"quantised {plan}"
