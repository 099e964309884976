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

    name: str

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
        q4_0: whether it reads the file in Q4_0, in place of the file's own types.
        options: of the class.
    """

    name: str
    made_by: tuple[str, str]
    distribution: str
    q4_0: bool = False
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


def _llama(title: str, *, q4_0: bool = False, **options: Any) -> Engine:
    ik = title.startswith("ik")
    given = {"module": "ik_llama_cpp._ctypes_api" if ik else "llama_cpp", **options}
    return Engine(title, _LLAMA, "ik-llama-cpp-python" if ik else "llama-cpp-python", q4_0, given)


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
    return (*engines, Engine(f"lowbit{told} integer Q4_0", _LOWBIT, "lowbit", q4_0=True, options=more))


OTHERS = (
    _llama("llama.cpp", flash=False),
    _llama("llama.cpp flash attention", flash=True),
    _llama("llama.cpp Q4_0 repacked", q4_0=True, flash=False, repacked=True),
    _llama("llama.cpp Q4_0 as stored", q4_0=True, flash=False, repacked=False),
    _llama("ik_llama.cpp", flash=False),
    _llama("ik_llama.cpp flash attention", flash=True),
    _llama("ik_llama.cpp Q4_0 repacked", q4_0=True, flash=True, repacked=True),
    Engine("OpenVINO GenAI", ("engine_openvino", "OpenVino"), "openvino-genai", options={"exact": False}),
    Engine("OpenVINO GenAI float32", ("engine_openvino", "OpenVino"), "openvino-genai", options={"exact": True}),
    Engine("ONNX Runtime GenAI", ("engine_onnx", "OnnxRuntime"), "onnxruntime-genai"),
)
"""Those of other projects. llama.cpp and ik_llama.cpp read the file's own types where the name says nothing else."""
