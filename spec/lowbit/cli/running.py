"""What commands that run a model share: a model on a backend, and the tokens of a prompt."""

from dataclasses import replace

from lowbit.backend.base import Backend
from lowbit.cli.progress import changing_bar
from lowbit.errors import ArgumentError
from lowbit.runtime import LanguageModel, Options, StoredModel, load


def with_room(options: Options, context: int) -> Options:
    """The options, with room for `context` tokens on a device; other options stay unchanged."""
    if options.device is None:
        return options
    return replace(options, device=replace(options.device, context=context))


def loaded_model(stored: StoredModel, backend: Backend, options: Options) -> LanguageModel:
    """The model on the backend."""
    with changing_bar() as report:
        return load(stored, backend, options, report)


def encoded(model: StoredModel, prompt: str) -> list[int]:
    """The tokens of a prompt.

    Raises:
        ArgumentError: there is none, or more than the model's context.
    """
    ids = model.tokenizer.encode(prompt)
    if not ids:
        raise ArgumentError("--prompt", repr(prompt), "a text of at least one token")
    if len(ids) > model.config.context:
        raise ArgumentError("--prompt", f"{len(ids)} tokens", f"at most {model.config.context}, the model's context")
    return ids
