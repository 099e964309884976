"""The options of every command on a model, and what they ask for."""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lowbit.backend import registry
from lowbit.backend.base import Backend
from lowbit.backend.registry import DEFAULT_ORDER
from lowbit.backend.whole_model import PREFETCHES, DeviceSettings, bytes_of
from lowbit.cli.progress import changing_bar, note
from lowbit.contract.checks import check_choice, check_integer, spoken
from lowbit.errors import ArgumentError
from lowbit.formats.checkpoint.architectures import ARCHITECTURES as MODEL_TYPES
from lowbit.formats.checkpoint.gptq_version import VERSIONS, Version
from lowbit.formats.fetch import DEFAULT_MODEL, TABLE, begin_check, fetch, read_text
from lowbit.formats.gguf.architectures import ARCHITECTURES
from lowbit.formats.tokenizer import Tokenizer
from lowbit.model.caches import KEYS
from lowbit.model.calibration import CalibrationText
from lowbit.model.quantization_plan import METHODS, Plan, Quantization
from lowbit.model.sampling import GREEDY, Sampling
from lowbit.moe.offload import MEMORIES
from lowbit.quantization.packing import BITS
from lowbit.runtime import CONTRACTS, Options, StoredModel, open_model
from lowbit.runtime.options import STEPS, not_whole

DEFAULT_GROUP_SIZE = 64
DEFAULT_TOKENS, DEFAULT_WINDOW = 4096, 512
"""Of a calibration text."""
CALIBRATION_TEXT = "lcet10"
"""The calibration text of commands that run a model; not the text whose perplexity they measure by default."""

ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help=f"A GGUF file of architecture {spoken(list(ARCHITECTURES))}, or a directory with config.json and "
        f"safetensors of model type {spoken(list(MODEL_TYPES))}. By default {TABLE[DEFAULT_MODEL].file} is fetched.",
    ),
]
BackendOption = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help="A backend that `lowbit backends` lists. By default the first of these that can run here: "
        f"{', '.join(DEFAULT_ORDER)}.",
    ),
]
PromptOption = Annotated[str, typer.Option("--prompt", help="The text to continue.")]
BitsOption = Annotated[
    int | None,
    typer.Option("--bits", help="Quantise the linear layers again to this many bits. By default they stay as stored."),
]
GroupOption = Annotated[
    int | None,
    typer.Option(
        "--group-size", help=f"With --bits: the number of weights in a group; {DEFAULT_GROUP_SIZE} by default."
    ),
]
ExpertsBitsOption = Annotated[
    int | None,
    typer.Option(
        "--experts-bits", help="Bits of the experts (or of the dense feed-forward part); by default as --bits."
    ),
]
ExpertsGroupOption = Annotated[
    int | None,
    typer.Option("--experts-group-size", help="Weights in a group of the experts; by default as --group-size."),
]
MethodOption = Annotated[
    str | None,
    typer.Option("--method", help=f"How to quantise: {spoken(METHODS)}; {METHODS[0]} by default."),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        help=f"With --method gptq: a text in UTF-8 to calibrate on. By default {TABLE[CALIBRATION_TEXT].file}.",
    ),
]
CalibrationTokensOption = Annotated[
    int | None,
    typer.Option(
        "--calibration-tokens",
        help=f"With --method gptq: the maximum number of tokens of that text to read; {DEFAULT_TOKENS} by default.",
    ),
]
ContractOption = Annotated[
    str,
    typer.Option(
        "--contract",
        help="float32 or integer. With integer, activations of linear layers are cast to BFP16, which is faster and "
        "less exact.",
    ),
]
StepOption = Annotated[
    str,
    typer.Option(
        "--step",
        help="How the step of a decoder runs: compiled, one call for each token; operations, the backend's one by one; "
        "formulas, the specification's in float64 with products on the backend; or auto, compiled where the backend "
        "can, otherwise formulas.",
    ),
]
DeviceMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--device-memory",
        help="For a backend that runs whole models, such as cuda: the maximum of device memory to use, such as 12GiB. "
        "Experts that do not fit are copied when needed. By default all free memory, minus what the driver needs.",
    ),
]
BuffersOption = Annotated[
    int | None,
    typer.Option(
        "--buffers",
        help=f"On a device: the number of staging buffers for experts; {DeviceSettings.buffers} by default.",
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory",
        help=f"On a device: {spoken(MEMORIES)}. The host keeps a copy of every expert (mirror) or exchanges experts "
        f"with the device (swap); {DeviceSettings.mode} by default.",
    ),
]
PrefetchOption = Annotated[
    str | None,
    typer.Option(
        "--prefetch",
        help=f"On a device: {spoken(PREFETCHES)}: whether to guess the next experts and copy them ahead; "
        f"{DeviceSettings.prefetch} by default, which stops where copying ahead does not save time.",
    ),
]
KeysOption = Annotated[
    str | None,
    typer.Option(
        "--keys",
        help=f"The number format of keys and values: {spoken(KEYS)}; bfp12 keeps keys in BFP12 and values in float16. "
        f"By default {DeviceSettings.keys} on a device; elsewhere the format in which attention computes.",
    ),
]
ColdOption = Annotated[
    str | None,
    typer.Option(
        "--cold-experts",
        help="On a device: the backend that runs experts on the host where that is faster than copying them. It rounds "
        "differently, so the text may depend on which experts were cached.",
    ),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        help="Draw tokens at this temperature; 0 takes the likeliest. The default is 1 if another sampling option is "
        "given; otherwise the likeliest token is always taken.",
    ),
]
TopKOption = Annotated[int | None, typer.Option("--top-k", help="Draw from this many of the likeliest tokens.")]
TopPOption = Annotated[
    float | None,
    typer.Option("--top-p", help="Draw from the fewest likeliest tokens that together have this probability."),
]
MinPOption = Annotated[
    float | None,
    typer.Option("--min-p", help="Draw from tokens at least this many times as likely as the likeliest."),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed", help="The seed of the draws; the same seed repeats them. By default every run has a new one."
    ),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", help="A text that ends the answer and is not part of it. May be given several times."),
]
GPTQOption = Annotated[
    str | None,
    typer.Option(
        "--gptq-version",
        help="For a GPTQ directory: v1 if zeros are stored minus one, v2 if they are stored as they are. By default "
        "the zeros decide where they can, otherwise the label; without a label it is v1.",
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--context",
        help="The longest text, in tokens. A model whose rotary embedding depends on the length of the text, such as "
        "Phi-3, opens with its short context unless a longer one is requested.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


# **Files.**


def file_of(path: Path | None, default: str) -> Path:
    """The given file, or the default from `lowbit.formats.fetch.TABLE`, which is fetched if necessary.

    Raises:
        UnavailableError: it cannot be fetched; the message says which file to put where.
    """
    if path is not None:
        return path
    with changing_bar() as report:
        return fetch(default, report)


@contextmanager
def loaded_backend(backend: str | None, model: Path | None) -> Iterator[Backend]:
    """The backend of a command. Meanwhile the default model is checked, if no other was given.

    Raises:
        LowbitError: as `registry.load`.
    """
    if model is None:
        begin_check(DEFAULT_MODEL)
    with registry.load(backend) as engine:
        yield engine


@contextmanager
def called(argument: str, option: str) -> Iterator[None]:
    """Make errors that name this argument of the library name the option instead."""
    try:
        yield
    except ArgumentError as error:
        if error.argument != argument:
            raise
        raise ArgumentError(option, error.given, error.allowed) from error


def opened(
    path: Path | None, gptq_version: str | None = None, context: int | None = None, *, identified: bool = False
) -> StoredModel:
    """The given model, or the default; `identified` as for `open_model`. Prints its remarks.

    Raises:
        LowbitError: it cannot be fetched or read.
    """
    version, file = asked_version(gptq_version), file_of(path, DEFAULT_MODEL)
    found = open_model(file, identified=identified, gptq_version=version, context=context)
    for remark in found.remarks:
        note(remark)
    return found


def asked_version(gptq_version: str | None) -> Version | None:
    """The version of ``--gptq-version``.

    Raises:
        ArgumentError: there is no such version.
    """
    return None if gptq_version is None else check_choice("--gptq-version", gptq_version, VERSIONS)


# **Settings of a run.**


def check_needless(given: Mapping[str, object], holds: bool, condition: str) -> None:
    """Refuse given options whose condition, such as ``--method gptq``, does not hold."""
    for option, value in given.items():
        if value is not None and not holds:
            raise ArgumentError(option, value, f"only with {condition}", f"{option} applies only to {condition}")


def chosen(
    bits: int | None,
    group_size: int | None,
    experts_bits: int | None = None,
    experts_group_size: int | None = None,
    method: str | None = None,
) -> Plan | None:
    """The plan of the options on bits, groups and method; None means the weights as stored.

    >>> str(chosen(4, 64, experts_bits=2))
    'experts to 2 bits, groups of 64; attention to 4 bits, groups of 64'

    Raises:
        ArgumentError: a wrong number or method, or one that has no effect because the bits are not given.
    """
    needed = {
        "--group-size": (group_size, bits is None, "--bits"),
        "--experts-group-size": (experts_group_size, bits is None and experts_bits is None, "--bits or --experts-bits"),
        "--method": (method, bits is None and experts_bits is None, "--bits or --experts-bits"),
    }
    for option, (given, lacks, other) in needed.items():
        if given is not None and lacks:
            sentence = f"{option} {given} applies only together with {other}"
            raise ArgumentError(option, given, f"only together with {other}", sentence)
    for option, given in (("--bits", bits), ("--experts-bits", experts_bits)):
        if given is not None:
            check_choice(option, given, BITS)
    for option, given in (("--group-size", group_size), ("--experts-group-size", experts_group_size)):
        if given is not None:
            check_integer(option, given, least=1)
    by = METHODS[0] if method is None else check_choice("--method", method, METHODS)

    def part(bits: int | None, group_size: int | None) -> Quantization | None:
        return None if bits is None else Quantization(bits, group_size or DEFAULT_GROUP_SIZE, by)

    attention = part(bits, group_size)
    experts = part(experts_bits or bits, experts_group_size or group_size)
    return None if attention is experts is None else Plan(experts, attention)


@dataclass(frozen=True)
class CalibrationOptions:
    """The options of calibration, which apply only to GPTQ.

    Attributes:
        plan: how the model is quantised, still without a text.
        text: a file, or None for the default.
        tokens: the most to read, or None for the default.

    Raises:
        ArgumentError: an option that does not apply; a number of tokens below 1.
    """

    plan: Plan | None
    text: Path | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        given = {"--calibration": self.text, "--calibration-tokens": self.tokens}
        check_needless(given, self.is_needed, "--method gptq")
        if self.tokens is not None:
            check_integer("--calibration-tokens", self.tokens, least=1)

    @property
    def is_needed(self) -> bool:
        """Whether a text is read."""
        return self.plan is not None and self.plan.needs_text

    def added(self, options: Options, model: StoredModel) -> Options:
        """The options with the tokens of the text, if it is needed.

        Raises:
            LowbitError: the text cannot be read or fetched.
        """
        if options.plan is None or not self.is_needed:
            return options
        _, tokens = first_tokens(model.tokenizer, self.text, CALIBRATION_TEXT, self.tokens)
        text = CalibrationText(tokens, min(DEFAULT_WINDOW, model.config.context))
        return replace(options, plan=replace(options.plan, text=text))


def first_tokens(
    tokenizer: Tokenizer, text: Path | None, default: str, count: int | None
) -> tuple[Path, tuple[int, ...]]:
    """The file of a calibration text and its first tokens.

    Args:
        tokenizer: of the model.
        text: the file; None for the default.
        default: a key of `lowbit.formats.fetch.TABLE`.
        count: the most tokens; None for `DEFAULT_TOKENS`.

    Raises:
        LowbitError: the text cannot be read or fetched.
    """
    file = file_of(text, default)
    return file, tuple(tokenizer.encode(read_text(file), begin=False)[: DEFAULT_TOKENS if count is None else count])


def sampling_of(
    temperature: float | None, top_k: int | None, top_p: float | None, min_p: float | None, seed: int | None
) -> Sampling:
    """How tokens are chosen, from the sampling options; greedily if none is given.

    >>> sampling_of(None, None, None, None, None) is GREEDY
    True
    >>> sampling_of(None, 40, None, None, 1)
    Sampling(temperature=1.0, top_k=40, top_p=1.0, min_p=0.0, seed=1)

    Raises:
        ArgumentError: a number outside its range.
    """
    named = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if not given:
        return GREEDY
    try:
        return Sampling(**{"seed": secrets.randbits(32)} | given)
    except ArgumentError as error:
        option = f"--{error.argument.replace('_', '-')}"
        raise ArgumentError(option, error.given, error.allowed) from error


def stops_of(given: list[str] | None) -> tuple[str, ...]:
    """The texts of ``--stop``.

    Raises:
        ArgumentError: an empty text.
    """
    stops = tuple(given or ())
    if "" in stops:
        raise ArgumentError("--stop", "''", "a text of at least one character")
    return stops


@dataclass(frozen=True)
class DeviceOptions:
    """The options of a backend that runs whole models, and `keys`, which other backends also have; None if not
    given."""

    memory: str | None = None
    buffers: int | None = None
    mode: str | None = None
    prefetch: str | None = None
    keys: str | None = None
    cold_experts: str | None = None

    def settings(self, backend: Backend) -> DeviceSettings | None:
        """The settings for a backend; None if the backend does not run whole models.

        Raises:
            ArgumentError: a wrong option, or one for whole models on another backend.
        """
        names = {"memory": "--device-memory", "mode": "--memory"}
        given = {name: value for name, value in asdict(self).items() if value is not None}
        options = {name: names.get(name, "--" + name.replace("_", "-")) for name in given}
        if not backend.runs_models:
            for name, value in given.items():
                if name != "keys":
                    raise not_whole(options[name], value, backend)
            return None
        for name, allowed in (("mode", MEMORIES), ("prefetch", PREFETCHES), ("keys", KEYS)):
            if name in given:
                check_choice(options[name], given[name], allowed)
        if self.buffers is not None:
            check_integer("--buffers", self.buffers, least=1)
        if self.memory is not None:
            given["memory"] = bytes_of(self.memory, "--device-memory")
        if self.cold_experts is not None:
            _check_backend("--cold-experts", self.cold_experts)
        return DeviceSettings(**given)


def _check_backend(option: str, name: str) -> None:
    """Refuse the name of a backend that does not exist or cannot run here, before a model is quantised for it."""
    try:
        registry.load(name).close()
    except ArgumentError as error:
        raise ArgumentError(option, error.given, error.allowed) from error


def options_for(
    backend: Backend, plan: Plan | None, device: DeviceOptions, contract: str = "float32", step: str = "auto"
) -> Options:
    """How a model is run, from the command line.

    Raises:
        ArgumentError: an option that does not apply to this backend, or a contract or step that does not exist.
    """
    by, how = check_choice("--contract", contract, CONTRACTS), check_choice("--step", step, STEPS)
    keys = None if backend.runs_models or device.keys is None else check_choice("--keys", device.keys, KEYS)
    options = Options(plan, by, how, device.settings(backend), keys=keys)
    options.check(backend, lambda name: f"--{name}")
    return options
