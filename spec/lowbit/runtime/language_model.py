"""A language model on a backend: `load` makes it, and it turns text or tokens into tokens.

There are two ways to run a model, and a `LanguageModel` hides which one it is. Most backends multiply by one matrix at
a time: the decoder is the specification's (`lowbit.model.decoder`), all weights are in memory, and each matrix is given
to the backend, or to numpy where the backend does not declare it. A backend with a decoder of its own
(`lowbit.backend.whole_model`) runs the whole model, and gets its weights one block at a time.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

import numpy as np

from lowbit.arrays import F32
from lowbit.backend import registry
from lowbit.backend.base import Backend, StepRequest
from lowbit.backend.whole_model import DeviceSettings
from lowbit.contract.checks import check_choice
from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.formats.chat import Message
from lowbit.formats.checkpoint.gptq_version import Version
from lowbit.formats.checkpoint.reader import Checkpoint
from lowbit.formats.fetch import Report, silent
from lowbit.formats.tokenizer import Tokenizer
from lowbit.formats.tokenizer import until as text_until
from lowbit.model import decoder as decoders
from lowbit.model import perplexity as perplexities
from lowbit.model.block import FORMULAS, Linear, MakeLinear
from lowbit.model.caches import KEYS, Keys
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import AnyDecoder, Decoder, Step
from lowbit.model.perplexity import DEFAULT_PROTOCOL, Perplexity, Protocol, ProtocolName
from lowbit.model.quantization_plan import Plan
from lowbit.model.sampling import GREEDY, Sampling
from lowbit.model.step import step_of
from lowbit.model.weights import (
    DeferredWeights,
    LayeredWeights,
    LlamaWeights,
    Matrix,
    Progress,
    matrices,
    weight_bytes,
)
from lowbit.runtime import elementwise
from lowbit.runtime.linears import CONTRACTS, BackendLinears, Contract
from lowbit.runtime.stored import StoredModel, all_of, open_model, part_of, quantised
from lowbit.system.interrupts import Interrupts, deferred
from lowbit.system.memory import check_memory

IN_MEMORY = "weights in memory"
"""The name of a model that comes from no file."""

StepChoice = Literal["auto", "compiled", "operations", "formulas"]
STEPS: tuple[StepChoice, ...] = get_args(StepChoice)
"""How the step of a decoder runs: as one ``compiled`` call; by the ``operations`` of the backend, one after the other,
where it declares them; by the ``formulas`` of the specification in float64, with products on the backend; or ``auto``:
compiled where the backend can, else by formulas."""


@dataclass(frozen=True)
class Options:
    """How a model is run.

    Attributes:
        plan: quantise its matrices first; None for the weights as they are stored.
        contract: ``float32``, or ``integer`` to multiply by activations cast to 8-bit mantissas.
        step: how the step of a decoder runs, one of `STEPS`; or the names of elementwise operations
            (`lowbit.runtime.elementwise.OPERATIONS`), which run on the backend while formulas do the rest.
        device: settings of a backend that runs whole models; None for its defaults.
        by_layer: run one layer at a time, even on a backend that runs whole models.
        keys: the number format of keys and values, one of `lowbit.model.caches.KEYS`; None for that in which attention
            computes. A backend that runs whole models takes it from `device`.
    """

    plan: Plan | None = None
    contract: Contract = "float32"
    step: StepChoice | tuple[str, ...] = "auto"
    device: DeviceSettings | None = None
    by_layer: bool = False
    keys: Keys | None = None

    def runs_whole(self, backend: Backend) -> bool:
        """Whether the backend runs the whole model, and not one layer at a time."""
        return backend.runs_models and not self.by_layer

    def elementwise(self, backend: Backend) -> tuple[str, ...]:
        """The elementwise operations that are asked of a backend.

        >>> engine = registry.load("numpy")
        >>> Options(step=("attention.attend",)).elementwise(engine), Options().elementwise(engine)
        (('attention.attend',), ())
        """
        if isinstance(self.step, tuple):
            return self.step
        own = self.step in ("compiled", "operations") or (self.step == "auto" and backend.compiles_steps)
        return elementwise.OPERATIONS if own else ()

    def check(self, backend: Backend, spelled: Callable[[str], str] = str) -> None:
        """Refuse options that do not apply to a backend.

        Args:
            backend: the model is to run on it.
            spelled: from the name of an option to how the user knows it.

        Raises:
            ArgumentError: one does not apply, or there is no such contract or elementwise operation.
        """
        check_choice(spelled("contract"), self.contract, CONTRACTS)
        if isinstance(self.step, tuple):
            for operation in self.step:
                check_choice(spelled("step"), operation, elementwise.OPERATIONS)
        else:
            check_choice(spelled("step"), self.step, STEPS)
        if self.keys is not None:
            check_choice(spelled("keys"), self.keys, KEYS)
        if not self.runs_whole(backend):
            if self.device is not None:
                raise not_whole(spelled("device"), self.device, backend)
            return
        changed = {
            "contract": self.contract != "float32",
            "step": self.step != "auto",
            "keys": self.keys is not None,
        }
        for name, given in changed.items():
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
        sampling: Sampling = GREEDY,
        stop: Sequence[int] | None = None,
        forced: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> Iterator[Step]:
        """Continue a prompt, yielding each token as soon as it is known.

        Args:
            prompt: text, or at least one token.
            count: the most tokens to generate.
            sampling: how a token is chosen (`lowbit.model.sampling`); by default the likeliest.
            stop: tokens that end the sequence; None for those of the model's own tokenizer.
            forced: as in `lowbit.model.decoder.generate`.
            progress: called while the prompt is read.

        Raises:
            ArgumentError: wrong arguments; raised by the first step.
        """
        ids, ends, checked = self.tokens_of(prompt), self._stop(stop), self._interrupts.checked(progress)
        for step in decoders.generate(
            self.decoder, ids, count, sampling=sampling, stop=ends, forced=forced, progress=checked
        ):
            yield step
            self._interrupts.check()

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        count: int = 64,
        *,
        sampling: Sampling = GREEDY,
        stop: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Continue several prompts at once, a token of each at a time (`lowbit.model.decoder.generate_batch`).

        Args:
            prompts: each text, or at least one token.
            count: the most tokens to generate for each.
            sampling: how a token is chosen; each prompt has draws of its own.
            stop: tokens that end a sequence; None for those of the model's own tokenizer.

        Raises:
            ArgumentError: wrong arguments, or a model that reads one sequence at a time.
        """
        decoder: Any = self.decoder
        if not hasattr(decoder, "hidden_batch"):
            raise ArgumentError("model", self.name, "a model that runs several sequences at once; this one does not")
        ids = [self.tokens_of(prompt) for prompt in prompts]
        return decoders.generate_batch(decoder, ids, count, sampling=sampling, stop=self._stop(stop))

    def _stop(self, given: Sequence[int] | None) -> Sequence[int]:
        if given is not None:
            return given
        return () if self._tokenizer is None else self._tokenizer.stop

    def answer(
        self,
        messages: Sequence[Message],
        count: int = 256,
        *,
        sampling: Sampling = GREEDY,
        until: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Iterator[str]:
        """The model's answer in a conversation, in pieces as they come.

        Args:
            messages: the conversation; the last message is the one to be answered.
            count: the most tokens to generate; fewer where the context ends.
            sampling: how a token is chosen.
            until: strings that end the answer, and are no part of it.
            progress: called while the conversation is read.

        Raises:
            ArgumentError: wrong arguments, a model without a chat template, or a conversation that it refuses or that
                leaves no room in the context.
            FormatError: the template cannot be run.
        """
        ids = self.conversation(messages)
        count = min(count, self.config.context - len(ids) + 1)
        steps = self.generate(ids, count, sampling=sampling, progress=progress)
        return text_until(self.tokenizer.stream((step.token for step in steps), special=False), until)

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, up to where the model's answer begins.

        Raises:
            ArgumentError: as `answer`.
            FormatError: as `answer`.
        """
        template = self.tokenizer.chat
        if template is None:
            sentence = f"{self.name} has no chat template; give it a prompt to continue in place of messages"
            raise ArgumentError("model", self.name, "a model with a chat template", sentence)
        ids = self.tokens_of(template.render(messages), begin=False)
        if len(ids) > self.config.context:
            allowed = f"at most {self.config.context} tokens, the model's context"
            raise ArgumentError("conversation", f"{len(ids)} tokens", allowed)
        return ids

    def complete(self, prompt: str, count: int = 64, sampling: Sampling = GREEDY) -> str:
        """The text that follows a prompt: that of the tokens of `generate`, without special ones."""
        tokens = [step.token for step in self.generate(prompt, count, sampling=sampling)]
        return self.tokenizer.decode(tokens, special=False)

    def logits(self, prompt: str | Sequence[int], progress: Progress | None = None) -> F32:
        """The score of every token that could follow a prompt: float32, vocabulary.

        Raises:
            ArgumentError: no tokens, or more than the context.
        """
        return decoders.next_logits(self.decoder, self.tokens_of(prompt), self._interrupts.checked(progress))

    def perplexity(
        self,
        text: str | Sequence[int],
        window: int | None = None,
        progress: Progress | None = None,
        *,
        protocol: ProtocolName | Protocol = DEFAULT_PROTOCOL,
    ) -> Perplexity:
        """The perplexity of a text by a protocol (`lowbit.model.perplexity`).

        Args:
            text: text, or tokens without a mark of the beginning.
            window: tokens of a window; None for the protocol's own.
            progress: called with the tokens read so far and their number.
            protocol: ``lowbit``, ``gptq``, ``llama.cpp`` or ``transformers``, or a `Protocol`.

        Raises:
            ArgumentError: wrong window or protocol; too few tokens to score one.
        """
        bos = None if self._tokenizer is None else self._tokenizer.bos
        ids, checked = self.tokens_of(text, begin=False), self._interrupts.checked(progress)
        return perplexities.perplexity(self.decoder, ids, window, bos=bos, protocol=protocol, progress=checked)

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
    *,
    gptq_version: Version | None = None,
    context: int | None = None,
) -> LanguageModel:
    """Put a model on a backend.

    A remark on how a file is read, such as a GPTQ label that its zeros contradict, becomes a `UserWarning` if the file
    is opened here.

    Args:
        model: the path of a GGUF file or of a checkpoint directory, a model that is open, or weights without a
            tokenizer.
        backend: its name, or None for the default (`lowbit.backend.registry.DEFAULT_ORDER`), which are closed with the
            model; or a backend, which stays open.
        options: how it is run.
        report: called while files are read, and weights quantised and prepared.
        gptq_version: as in `lowbit.runtime.stored.open_model`, for a path.
        context: likewise.

    Raises:
        LowbitError: no such model or backend, options that do not apply, weights that cannot be quantised so, too
            little memory.
    """
    with ExitStack() as opened:
        engine = backend if isinstance(backend, Backend) else opened.enter_context(registry.load(backend))
        options.check(engine)
        if isinstance(model, str | Path):
            found = open_model(Path(model), identified=engine.keeps_steps, gptq_version=gptq_version, context=context)
            for remark in found.remarks:
                warnings.warn(remark, stacklevel=2)
            stored: StoredModel | LayeredWeights = found
        elif gptq_version is not None:
            raise ArgumentError("gptq_version", gptq_version, "None, where the model is open already")
        elif context is not None:
            raise ArgumentError("context", context, "None, where the model is open already")
        else:
            stored = model
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
            "requantized": None if options.plan is None else options.plan.fields(),
            "settings": asdict(settings),
            "device": device.describe(),
        }
        return Account(fields, f"{name} {_quantisation(options.plan)} on {backend.name}; {device.sentence()}")

    return decoder, account, interrupts


# **One layer at a time.**


def _by_layer(
    name: str, layered: LayeredWeights, backend: Backend, options: Options, report: Report, opened: ExitStack
) -> Placed:
    if (found := _kept(name, layered, backend, options, report)) is not None:
        return found
    linears = BackendLinears(backend, options.contract)  # refuses what is not declared before anything is quantised
    backend.warm_up("linear.qgemv")  # before the first report: some backends must start while there is one thread
    layered = quantised(name, layered, options.plan, report)
    if isinstance(layered, Checkpoint):
        check_memory(f"model {name}", layered.nbytes)
    weights = all_of(name, layered, report)
    progress = part_of(report, f"preparing {backend.name}")
    total = sum(1 for what, _ in matrices(weights) if not what.endswith("router"))
    made: dict[int, Linear] = {}

    def linear(matrix: Matrix) -> Linear:
        if id(matrix) not in made:
            made[id(matrix)] = linears(matrix)
            progress(len(made), total)
        return made[id(matrix)]

    decoder, how, names = _with_step(weights, linear, backend, options)
    facts = _facts(weights, linears, names)
    return decoder, lambda: _account(name, backend, facts, options, how), Interrupts()


def _kept(name: str, weights: LayeredWeights, backend: Backend, options: Options, report: Report) -> Placed | None:
    """A decoder whose compiled step the backend keeps between processes; None where there is none of this model."""
    if not (backend.keeps_steps and isinstance(weights, DeferredWeights) and options.plan is None):
        return None
    if options.step not in ("auto", "compiled"):
        return None

    def make(engine: Backend) -> tuple[Decoder, Mapping[str, Any]]:
        linears, whole = BackendLinears(engine, options.contract), all_of(name, weights, report)
        if any(isinstance(matrix, np.ndarray) for what, matrix in matrices(whole) if not what.endswith("router")):
            raise NotDeclaredError(engine.name, "compiled steps with matrices of floats")
        part_of(report, f"preparing {engine.name}")
        steps = elementwise.on_backend(engine, whole.config, FORMULAS, elementwise.OPERATIONS, options.keys)
        elementwise.check_all(engine, whole.config, steps.names)
        return Decoder(whole, linears, ops=steps.ops), _facts(whole, linears, steps.names)

    identity = weights.digest(), options.contract, options.keys or "float32"
    request = StepRequest(identity, weights.config, lambda: step_of(all_of(name, weights, report)), make)
    if (found := backend.kept_step(request)) is None:
        return None
    decoder, facts = found
    return decoder, lambda: _account(name, backend, facts, options, "compiled"), Interrupts()


def _with_step(
    weights: LlamaWeights, linear: MakeLinear, backend: Backend, options: Options
) -> tuple[AnyDecoder, str, tuple[str, ...]]:
    """A decoder whose step runs as the options ask, how that is, and the elementwise operations on the backend.

    Raises:
        NotDeclaredError: the options ask for a compiled step, and the backend has none for this model.
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
    """What was made of a model, in types that JSON has."""
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
