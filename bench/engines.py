"""Engines that continue a text with a whole model: lowbit and those beside which it is measured.

Each runs in a process of its own (`engine_process`), because libraries of one name cannot be loaded side by side, and
because a process has a peak of memory. What an engine needs is imported there only.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any


@dataclass(frozen=True)
class Continued:
    """The tokens after a prompt; the seconds to the first of them, and of all that follow it."""

    tokens: list[int]
    first: float
    after: float


class Generator(ABC):
    """A model that is loaded and continues prompts, greedily."""

    @abstractmethod
    def continued(self, prompt: list[int], count: int) -> Continued:
        """Compute `count` tokens after a prompt."""


def timed(tokens: Iterator[int]) -> Continued:
    """Tokens that are computed when they are asked for, and how long they took."""
    start = perf_counter()
    found = [next(tokens)]
    first = perf_counter()
    found += tokens
    return Continued(found, first - start, perf_counter() - first)


class Stepwise(Generator):
    """A generator that is asked for each token, and that continues several sequences at once."""

    @abstractmethod
    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        """Yield `count` tokens after a prompt, each computed when it is asked for."""

    @abstractmethod
    def rounds(self, prompts: list[list[int]], count: int) -> float:
        """Seconds of `count` rounds, in each of which every sequence gets a token; the prompts were read before."""

    @abstractmethod
    def nats(self, window: list[int]) -> float:
        """The sum of the negative log-likelihoods of all tokens of a window but the first."""

    def continued(self, prompt: list[int], count: int) -> Continued:
        return timed(self.tokens(prompt, count))


@dataclass(frozen=True)
class Setting:
    """What every engine of a run is given.

    Attributes:
        file: the GGUF file.
        threads: their number.
        length: the most tokens of a sequence.
        sequences: that are continued at once.
        onnx: a directory with the same model for ONNX Runtime GenAI; None where there is none.
    """

    file: Path
    threads: int
    length: int
    sequences: int = 1
    onnx: Path | None = None


@dataclass(frozen=True)
class Engine:
    """An engine that may take part.

    Attributes:
        name: in reports.
        made_by: the module and the class that runs it.
        distribution: whose version is reported.
        stored: the type in which it reads the file, one of `FTYPES`; None for the file's own.
        options: of the class.
    """

    name: str
    made_by: tuple[str, str]
    distribution: str
    stored: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def made(self, setting: Setting) -> Generator:
        """The engine with its model.

        Raises:
            ImportError, OSError, RuntimeError, AttributeError: it cannot run here.
        """
        module, name = self.made_by
        generator: Generator = getattr(import_module(module), name)(setting, **self.options)
        return generator


_LOWBIT, _LLAMA = ("engine_lowbit", "Lowbit"), ("engine_llama", "LlamaCpp")


FTYPES = {"Q4_0": 2, "Q8_0": 7, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}
"""llama.cpp's names of types of files, with its numbers (``llama_ftype``)."""


def _llama(title: str, *, stored: str | None = None, **options: Any) -> Engine:
    ik = title.startswith("ik")
    given = {"module": "ik_llama_cpp._ctypes_api" if ik else "llama_cpp", **options}
    return Engine(title, _LLAMA, "ik-llama-cpp-python" if ik else "llama-cpp-python", stored, given)


def own(isa: str | None = None) -> tuple[Engine, ...]:
    """lowbit's: both contracts with a compiled step, operations one by one, and the file in Q4_0."""
    ways = (("", "float32", "compiled"), ("", "integer", "compiled"), (", step by operations", "float32", "operations"))
    told = f" {isa}" if isa else ""
    engines = [
        Engine(
            f"lowbit{told} {contract}{way}", _LOWBIT, "lowbit", options={"isa": isa, "contract": contract, "step": step}
        )
        for way, contract, step in ways
    ]
    more = {"isa": isa, "contract": "integer", "step": "compiled"}
    return (*engines, Engine(f"lowbit{told} integer Q4_0", _LOWBIT, "lowbit", "Q4_0", more))


BITS, GROUPS = (4, 3, 2), (128, 64, 32, 16)


def qualities() -> tuple[Engine, ...]:
    """lowbit with matrices quantised to each number of bits in groups of each size, and llama.cpp's types of files."""
    found = [
        Engine(
            f"lowbit {contract} {bits} bits, groups of {group}",
            _LOWBIT,
            "lowbit",
            options={"isa": None, "contract": contract, "step": "compiled", "plan": [bits, group]},
        )
        for contract in ("float32", "integer")
        for bits in BITS
        for group in GROUPS
    ]
    return (*found, *(_llama(f"llama.cpp file of {name}", stored=name, flash=False) for name in FTYPES))


OTHERS = (
    _llama("llama.cpp", flash=False),
    _llama("llama.cpp flash attention", flash=True),
    _llama("llama.cpp Q4_0 repacked", stored="Q4_0", flash=False, repacked=True),
    _llama("llama.cpp Q4_0 as stored", stored="Q4_0", flash=False, repacked=False),
    _llama("ik_llama.cpp", flash=False),
    _llama("ik_llama.cpp flash attention", flash=True),
    _llama("ik_llama.cpp Q4_0 repacked", stored="Q4_0", flash=True, repacked=True),
    Engine("OpenVINO GenAI", ("engine_openvino", "OpenVino"), "openvino-genai", options={"exact": False}),
    Engine("OpenVINO GenAI float32", ("engine_openvino", "OpenVino"), "openvino-genai", options={"exact": True}),
    Engine("ONNX Runtime GenAI", ("engine_onnx", "OnnxRuntime"), "onnxruntime-genai"),
)
"""Those of other projects. llama.cpp and ik_llama.cpp read the file's own types where the name says nothing else."""
