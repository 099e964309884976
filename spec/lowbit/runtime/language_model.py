"""A language model on a backend: `load` makes it, and it turns text or tokens into tokens.

There are two ways to run a model, and a `LanguageModel` hides which one it is. Most backends multiply by one matrix at
a time: the decoder is the specification's (`lowbit.model.decoder`), all weights are in memory, and each matrix is given
to the backend, or to numpy where the backend does not declare it. A backend with a decoder of its own
(`lowbit.backend.whole_model`) runs the whole model, and gets its weights one block at a time.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lowbit.arrays import F32
from lowbit.backend import registry
from lowbit.backend.base import Backend
from lowbit.errors import ArgumentError
from lowbit.formats.chat import Message
from lowbit.formats.checkpoint.gptq_version import Version
from lowbit.formats.fetch import Report, silent
from lowbit.formats.tokenizer import Tokenizer
from lowbit.formats.tokenizer import until as text_until
from lowbit.model import decoder as decoders
from lowbit.model import generation
from lowbit.model import perplexity as perplexities
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import AnyDecoder
from lowbit.model.generation import Step
from lowbit.model.perplexity import DEFAULT_PROTOCOL, Perplexity, Protocol, ProtocolName
from lowbit.model.sampling import GREEDY, Sampling
from lowbit.model.weights import LayeredWeights, Progress
from lowbit.runtime import placement
from lowbit.runtime.options import AS_STORED, Options
from lowbit.runtime.placement import Account
from lowbit.runtime.stored import StoredModel, open_model
from lowbit.system.interrupts import Interrupts

IN_MEMORY = "weights in memory"
"""The name of a model that does not come from a file."""


class LanguageModel:
    """A model on a backend, made by `load`; as a context manager it closes itself on exit.

    While a model is on a device, Ctrl-C takes effect between layers and tokens (`lowbit.system.interrupts`).

    Attributes:
        name: of the file or directory.
        decoder: the decoder that runs it.
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
        """Called by `load`; `opened` holds the resources that are closed with the model."""
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
            ArgumentError: the model was made from weights in memory.
        """
        if self._tokenizer is None:
            sentence = "weights in memory have no tokenizer; give tokens in place of text"
            raise ArgumentError("model", self.name, "a model with a tokenizer", sentence)
        return self._tokenizer

    def tokens_of(self, prompt: str | Sequence[int], *, begin: bool = True) -> list[int]:
        """The tokens of a prompt; a sequence of tokens is returned unchanged."""
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
        """Continue a prompt, yielding tokens as they become known (`lowbit.model.generation.generate`).

        Args:
            prompt: text, or at least one token.
            count: the most tokens to generate.
            sampling: how a token is chosen (`lowbit.model.sampling`); by default the likeliest.
            stop: tokens that end the sequence; None for those of the model's own tokenizer.
            forced: as in `lowbit.model.generation.generate`.
            progress: called while the prompt is read.

        Raises:
            ArgumentError: wrong arguments; raised by the first step.
        """
        ids, ends, checked = self.tokens_of(prompt), self._stop(stop), self._interrupts.checked(progress)
        for step in generation.generate(
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
        """Continue several prompts at once, a token of each at a time (`lowbit.model.generation.generate_batch`).

        Args:
            prompts: each text, or at least one token.
            count: the most tokens to generate for each.
            sampling: how a token is chosen; each prompt has its own random numbers.
            stop: tokens that end a sequence; None for those of the model's own tokenizer.

        Raises:
            ArgumentError: wrong arguments, or a model that reads one sequence at a time.
        """
        decoder: Any = self.decoder
        if not hasattr(decoder, "hidden_batch"):
            raise ArgumentError("model", self.name, "a model that runs several sequences at once; this one does not")
        ids = [self.tokens_of(prompt) for prompt in prompts]
        return generation.generate_batch(decoder, ids, count, sampling=sampling, stop=self._stop(stop))

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
        """The model's answer in a conversation, piece by piece as generated.

        Args:
            messages: the conversation; the last message is to be answered.
            count: the most tokens to generate; fewer if the context ends.
            sampling: how a token is chosen.
            until: strings that end the answer and are not part of it.
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
        """The continuation of a prompt: the text of the tokens of `generate`, without special ones."""
        ids = self.tokens_of(prompt)
        tokens = [step.token for step in self.generate(ids, count, sampling=sampling)]
        return self.tokenizer.decode(tokens, special=False, after=ids)

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
            text: text, or tokens without BOS.
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
        """An account of the run: model, backend, bytes, and statistics of the device."""
        return self._account()

    def close(self) -> None:
        """Release the device's memory, and close the backend if `load` opened it. Closing twice is harmless."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)


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
        model: the path of a GGUF file or of a checkpoint directory, an open model, or weights without a tokenizer.
        backend: its name, or None for the default (`lowbit.backend.registry.DEFAULT_ORDER`), closed with the model; or
            a backend, which stays open.
        options: how it is run.
        report: called while files are read, and weights quantised and prepared.
        gptq_version: as in `lowbit.runtime.stored.open_model`, for a path.
        context: likewise.

    Raises:
        LowbitError: no such model or backend, options that do not apply, weights that cannot be quantised in this way,
            too little memory.
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
        place = placement.whole if options.runs_whole(engine) else placement.by_layer
        decoder, account, interrupts = place(name, weights, engine, options, report, opened)
        return LanguageModel(name, decoder, tokenizer, account, interrupts, opened.pop_all())
