"""Plain functions: a kernel that is one function is a backend of one operation.

A kernel author has a function and wants to know whether it is right before writing a class. A `Claim` makes a backend
from it: it says which operation the function computes, and for what format, types and shapes.

>>> def dequantized(blocks, *, rows, columns):
...     d = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
...     return np.ascontiguousarray((d * blocks[:, 2:].view(np.int8)).T)
>>> claim = Claim("formats.dequantize", {"format": "q8_0", "rows": Range(32), "result": "float32"})
>>> backend = FunctionBackend.of(dequantized, claim)
>>> from lowbit.tensor_formats.stored import Stored
>>> backend.run("formats.dequantize", Stored("q8_0", 32, 2, (np.ones((2, 34), np.uint8),))).shape
(32, 2)

**Arguments by name.** The function is called with the values that its parameters name: the arguments of the operation
(``x``, ``result``), and for a stored matrix also the arrays of its format's table (``qweight``, ``scales``), its
options (``bits``, ``group_size``), ``rows`` (K) and ``columns`` (N). For the specification's own matrix these are the
fields of `lowbit.quantization.affine.QuantizedMatrix` (``words``, ``scales``, ``zeros``, ``bits``, ``group_size``,
``convention``), and for blocks those of `lowbit.quantization.bfp.Blocks` (``x_mantissas``, ``x_exponents``). A function
with ``**kwargs`` gets all of them.

>>> def product(x, words, scales, zeros, bits, group_size, rows):
...     shifts = bits * np.arange(32 // bits, dtype=np.uint32)
...     codes = (words[:, np.newaxis] >> shifts[:, np.newaxis] & 2**bits - 1).reshape(rows, -1)
...     group = np.arange(rows) // group_size
...     return x @ (np.float32(scales)[group] * np.float32(codes) + np.float32(zeros)[group])
>>> claim = Claim("linear.qgemv", {"bits": (2, 4, 8), "convention": "minimum"})
>>> from lowbit.quantization.affine import quantize
>>> eye = quantize(np.eye(8, dtype=np.float32) * 15, bits=4, group_size=8)
>>> FunctionBackend.of(product, claim).prepare(eye).qgemv(np.ones(8, np.float32))
array([15., 15., 15., 15., 15., 15., 15., 15.], dtype=float32)

**Arrays** are numpy's, torch's or JAX's. They are passed by DLPack or as bit patterns, without a copy on the CPU; types
that numpy lacks arrive as the library's own (``torch.bfloat16``). A returned tensor must be on the same device, be
contiguous and have no gradient.

**Where the code comes from.** A function of an installed package, or one given as ``module:function``, is sent by its
name. Any other, from a notebook, a script, a test or a closure, is serialised with cloudpickle, if that is installed;
if it cannot be, it is refused with the reason.
"""

import base64
import importlib
import inspect
import json
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.backend.base import Availability, Backend, Capabilities, Declaration
from lowbit.backend.prepared import PreparedLinear
from lowbit.backend.registry import import_named
from lowbit.contract.checks import check_choice, check_instance, spoken
from lowbit.contract.operation import Promise
from lowbit.contract.ranges import Range
from lowbit.contract.rounding import Arithmetic, Weights, any_order
from lowbit.errors import ArgumentError, NotDeclaredError, UnavailableError, words_of
from lowbit.numbers.floats import FLOATS
from lowbit.operations import OPERATIONS
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.quantization.bfp import Blocks
from lowbit.tensor_formats.stored import Stored

Library = Literal["numpy", "torch", "jax"]
ARRAYS: tuple[Library, ...] = get_args(Library)
NEEDS_CLOUDPICKLE = "install cloudpickle, or put the function into a module and name it module:function"
MOST_TEXT = 2**24
"""The most characters of a description: a serialised function may include constants."""


@dataclass(frozen=True)
class Claim:
    """The claim of what a function computes.

    Attributes:
        operation: its id.
        limits: for each parameter of the operation what the function handles: one value, several, or a `Range`.
        arithmetic: for a bounded operation; None for the usual one: weights in the type of the activations, a float32
            accumulator, any order.
        arrays: the library whose arrays it takes.
        device: their device, by its name in that library.
        concurrent: whether several threads may call it at once.
    """

    operation: str
    limits: Mapping[str, object] = field(default_factory=dict)
    arithmetic: Arithmetic | None = None
    arrays: Library = "numpy"
    device: str = "cpu"
    concurrent: bool = False

    def __post_init__(self) -> None:
        check_choice("operation", self.operation, [name for name, each in OPERATIONS.items() if not each.stateful])
        check_choice("arrays", self.arrays, ARRAYS)

    @property
    def declaration(self) -> Declaration:
        """The declaration of the function's backend."""
        bounded = OPERATIONS[self.operation].promise is Promise.BOUNDED
        limits = {name: self.limit_of(each) for name, each in self.limits.items()}
        return Declaration(limits, (self.arithmetic or self._usual()) if bounded else None)

    @staticmethod
    def limit_of(given: Any) -> tuple[object, ...] | Range:
        return given if isinstance(given, Range) else tuple(given) if isinstance(given, list | tuple) else (given,)

    def _usual(self) -> Arithmetic:
        stored = "format" in self.limits or self.operation.startswith("linear.")
        if self.operation == "linear.qgemm_bfp":
            return Arithmetic("integer", "float32", any_order)
        types = self.limit_of(self.limits.get("activations", "float32"))
        shorter: tuple[Weights, ...] = ("bfloat16", "float16")
        coarsest: Weights = next((each for each in shorter if each in types), "float32")
        return Arithmetic("dequantised" if stored else "direct", "float32", any_order, coarsest)


def described(function: Callable[..., Any] | str, claim: Claim) -> str:
    """A function and its claim as a text, from which another process makes the same backend.

    Raises:
        ArgumentError: a function that cannot be named or serialised, with the reason.
    """
    arithmetic = claim.declaration.arithmetic
    if arithmetic is not None and arithmetic.roundings is not any_order:
        raise ArgumentError(
            "roundings of a plain function", "a function", "any_order; write a backend class for others"
        )
    told = None if arithmetic is None else {**vars(arithmetic), "roundings": "any_order"}
    return json.dumps(
        {
            "function": function if isinstance(function, str) else _located(function),
            "operation": claim.operation,
            "limits": Declaration({name: claim.limit_of(each) for name, each in claim.limits.items()}).told_limits,
            "arithmetic": told,
            "arrays": claim.arrays,
            "device": claim.device,
            "concurrent": claim.concurrent,
        }
    )


def _located(function: Callable[..., Any]) -> str | dict[str, str]:
    """``module:name`` of a function of an installed package; else the function itself with its module, serialised."""
    name = str(getattr(function, "__qualname__", function))
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is not None and _is_installed(module) and _named(module, name) is function:
        return f"{module.__name__}:{name}"
    try:
        import cloudpickle
    except ImportError:
        given = f"{name}, which belongs to no installed package"
        raise ArgumentError("function", given, NEEDS_CLOUDPICKLE) from None
    try:
        with _by_value([*_beside(function), *([module] if module else [])], cloudpickle):
            return {"pickle": base64.b64encode(cloudpickle.dumps(function)).decode()}
    except Exception as error:
        given = f"{name}, which cannot be serialised: {words_of(error)}"
        raise ArgumentError("function", given, "a function of a module, named module:function") from None


def _named(module: ModuleType, name: str) -> object:
    """The object of a dotted name in a module; None if it does not exist."""
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _is_installed(module: ModuleType) -> bool:
    """Whether any process of this Python can import it, unlike a module in the folder of a script or test."""
    origin = getattr(module, "__file__", None)
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return origin is None or any(Path(origin).is_relative_to(folder) for folder in folders)


def _beside(function: Callable[..., Any]) -> list[ModuleType]:
    """The modules in the folder of a function's file, which perhaps only its own process can import."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    folder = None if code is None else Path(code.co_filename).parent
    return [
        each
        for each in list(sys.modules.values())
        if getattr(each, "__file__", None) and Path(str(each.__file__)).parent == folder and not _is_installed(each)
    ]


@contextmanager
def _by_value(modules: Iterable[ModuleType], cloudpickle: Any) -> Iterator[None]:
    """Serialise the contents of these modules with their code, since the other process may not find them."""
    named = {each.__name__: each for each in modules if each.__name__ != "__main__"}  # always serialised by value
    for module in named.values():
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in named.values():
            cloudpickle.unregister_pickle_by_value(module)


class FunctionBackend(Backend):
    """The backend of one function."""

    def __init__(self, description: str) -> None:
        """Args:
            description: what `described` gave.

        Raises:
            ArgumentError: a malformed description; the function does not exist.
            UnavailableError: its module, or the library of its arrays, cannot be imported.
        """
        if len(description) > MOST_TEXT:
            raise ArgumentError("description of a function", f"{len(description)} characters", f"at most {MOST_TEXT}")
        told = json.loads(description)
        arithmetic = told["arithmetic"]
        limits = {
            name: Range(**each) if isinstance(each, dict) else tuple(each) for name, each in told["limits"].items()
        }
        usual = None if arithmetic is None else Arithmetic(**{**arithmetic, "roundings": any_order})
        self._claim = Claim(told["operation"], limits, usual, told["arrays"], told["device"], bool(told["concurrent"]))
        self._place: str | dict[str, str] = told["function"]
        self._function: Callable[..., Any] | None = None
        self._library: Arrays | None = None
        place = self._place if isinstance(self._place, str) else "function"
        self.name = place.rpartition(":")[2]

    @classmethod
    def of(cls, function: Callable[..., Any], claim: Claim) -> "FunctionBackend":
        """The backend of a function in this process; nothing is serialised."""
        made = cls(described("this:function", claim))
        made._function, made.name = function, getattr(function, "__name__", "function")
        return made

    def availability(self) -> Availability:
        """Whether it can run here. Imports the function, so that a missing one is an error before any test case.

        Raises:
            ArgumentError: there is no such module or function.
        """
        try:
            self.load()
        except UnavailableError as error:
            return Availability(False, error.reason, error.remedy)
        except ImportError:
            library = self._claim.arrays
            return Availability(False, f"{library} is not installed", f"install {library}")
        return Availability(True)

    def capabilities(self) -> Capabilities:
        return Capabilities({self._claim.operation: self._claim.declaration}, self._claim.concurrent)

    def load(self) -> tuple[Callable[..., Any], "Arrays"]:
        """The function and the library of its arrays; both are imported the first time.

        Raises:
            ArgumentError: there is no such module or function.
            UnavailableError: its module cannot be imported, or the library of its arrays has no such device.
            ImportError: the library of its arrays is not installed.
        """
        if self._library is None:
            self._library = LIBRARIES[self._claim.arrays](self._claim.device)
        if self._function is None:
            self._function = _function_at(self._place)
        return self._function, self._library

    def _hook(self, operation: str) -> Callable[..., Any]:
        def call(*arguments: Any, **choices: Any) -> Any:
            available = _by_name(OPERATIONS[operation].signature.given(arguments, choices))
            function, library = self.load()
            taken = _taken(function, available)
            return library.back(function(**{name: library.to(available[name]) for name in taken}))

        return call

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        """The function with a copy of the matrix, which is converted once."""
        return FunctionLinear(self.name, self._claim.operation, matrix, *self.load())


class FunctionLinear(PreparedLinear):
    """A matrix in the arrays that a function takes, and the function."""

    def __init__(
        self,
        backend: str,
        operation: str,
        matrix: QuantizedMatrix,
        function: Callable[..., Any],
        library: "Arrays",
    ) -> None:
        """Args:
        backend: the name of the backend.
        operation: the product that the function computes.
        matrix: K × N; it is copied, since its arrays are the caller's again.
        function: what is called for each product.
        library: that of the arrays which it takes.
        """
        own = replace(matrix, words=matrix.words.copy(), scales=matrix.scales.copy(), zeros=matrix.zeros.copy())
        nbytes = own.words.nbytes + own.scales.nbytes + own.zeros.nbytes
        super().__init__(backend, matrix.rows, matrix.columns, nbytes)
        self._operation, self._function, self._library = operation, function, library
        self._parts = {name: library.to(each) for name, each in _by_name({"matrix": own}).items()}

    def _qgemv(self, x: F32, out: F32) -> None:
        self._product("linear.qgemv", x, out)

    def _qgemm(self, x: F32, out: F32) -> None:
        self._product("linear.qgemm", x, out)

    def _qgemm_bfp(self, x: Blocks, out: F32) -> None:
        self._product("linear.qgemm_bfp", x, out)

    def _product(self, operation: str, x: Any, out: F32) -> None:
        """Call the function, and write what it returns to `out`.

        Raises:
            ArgumentError: a parameter that is not there; a result of another type or shape.
            NotDeclaredError: the function computes another operation.
        """
        if operation != self._operation:
            raise NotDeclaredError(self.backend, operation)
        available = self._parts | {name: self._library.to(each) for name, each in _by_name({"x": x}).items()}
        taken = _taken(self._function, available)
        result = self._library.back(self._function(**{name: available[name] for name in taken}))
        check_instance("result of the function", result, np.ndarray)
        if (result.dtype, result.shape) != (out.dtype, out.shape):  # `out` would accept others too
            raise ArgumentError("result of the function", f"{result.dtype} {result.shape}", f"{out.dtype} {out.shape}")
        out[...] = result


def _function_at(place: str | dict[str, str]) -> Callable[..., Any]:
    """The function that ``module:name`` names, or that was serialised."""
    if isinstance(place, str):
        named: Callable[..., Any] = import_named(place)
        return named
    import pickle  # the user's own code, which is about to be run anyway

    serialised: Callable[..., Any] = pickle.loads(base64.b64decode(place["pickle"]))
    return serialised


def _parameters(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """The names of a function's parameters; None if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    if positional := [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL)]:
        raise ArgumentError("parameters of the function", positional, "parameters that can be given by name")
    return tuple(each.name for each in parameters)


def _taken(function: Callable[..., Any], available: Mapping[str, Any]) -> Iterable[str]:
    """The names of the arguments that a function takes.

    Raises:
        ArgumentError: one of them is not available.
    """
    wanted = _parameters(function)
    for name in wanted or ():
        if name not in available:
            raise ArgumentError("parameter of the function", repr(name), spoken(sorted(available)))
    return available if wanted is None else wanted


def _by_name(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call and the parts of its matrices; those of x, if it has any, begin with ``x_``."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        prefix = "" if name in ("weights", "matrix") else f"{name}_"
        if isinstance(value, Stored):
            parts = value.by_name | dict(value.options) | {"rows": value.rows, "columns": value.columns}
            found |= {prefix + part: each for part, each in parts.items()}
        elif isinstance(value, QuantizedMatrix | Blocks):
            parts = {part.name: getattr(value, part.name) for part in fields(value)}
            parts |= {"rows": value.rows, "columns": value.columns}
            found |= {prefix + part: each for part, each in parts.items()}
        found[name] = value
    return found


# **Arrays of other libraries.**


class Arrays:
    """Arrays of numpy, to and from which those of other libraries are converted."""

    def __init__(self, device: str) -> None:
        check_choice("device", device, ("cpu",))

    def to(self, value: Any) -> Any:
        """An argument, converted for the function."""
        return value

    def back(self, result: Any) -> Any:
        """A result, converted for the suite."""
        return result


class TorchArrays(Arrays):
    """Tensors of PyTorch."""

    def __init__(self, device: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        try:
            self._device = self._torch.device(device)
            self._torch.empty(0, device=self._device)
        except Exception as error:  # torch raises different types by device
            raise no_device(device, "torch", error) from None

    def to(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype.name in FLOATS and not FLOATS[value.dtype.name].native:
            tensor = self._torch.from_numpy(value.view(FLOATS[value.dtype.name].pattern_dtype))
            kind = getattr(self._torch, value.dtype.name, None)
            if kind is None:
                raise ArgumentError(f"an array of {value.dtype.name}", "for torch", "a type that torch has")
            tensor = tensor.view(kind)
        else:
            tensor = self._torch.from_numpy(value)
        return tensor.to(self._device)

    def back(self, result: Any) -> Any:
        if not isinstance(result, self._torch.Tensor):
            return result
        index = self._device.index
        if result.device.type != self._device.type or index not in (None, result.device.index):
            raise ArgumentError("result", f"a tensor on {result.device}", f"one on {self._device}")
        if result.requires_grad:
            raise ArgumentError("result", "a tensor with a gradient", "one without: torch.no_grad() or .detach()")
        if not result.is_contiguous():
            raise ArgumentError("result", "a tensor that is not contiguous", "a contiguous one: .contiguous()")
        result = result.cpu()
        name = str(result.dtype).removeprefix("torch.")
        if name in FLOATS and not FLOATS[name].native:
            kind = FLOATS[name]
            patterns = result.view(getattr(self._torch, kind.pattern_dtype.name)).numpy()
            return patterns.view(kind.dtype)
        return result.numpy()


class JaxArrays(Arrays):
    """Arrays of JAX, whose types are those of ml_dtypes."""

    def __init__(self, device: str) -> None:
        self._jax: Any = importlib.import_module("jax")
        try:
            self._device = self._jax.devices(device)[0]
        except RuntimeError as error:
            raise no_device(device, "jax", error) from None

    def to(self, value: Any) -> Any:
        return self._jax.device_put(value, self._device) if isinstance(value, np.ndarray) else value

    def back(self, result: Any) -> Any:
        if not isinstance(result, self._jax.Array):
            return result
        if isinstance(result, self._jax.core.Tracer):
            raise ArgumentError("result", "a traced array", "a concrete one: call no jax.grad or jax.vmap around it")
        if result.devices() != {self._device}:
            raise ArgumentError("result", f"an array on {result.devices()}", f"one on {self._device}")
        converted: Array = np.asarray(result)
        return converted


def no_device(device: str, library: str, error: Exception) -> UnavailableError:
    """The error for a device that the library does not have here, with the library's reason."""
    return UnavailableError(f"device {device!r}", f"{library} says: {words_of(error)}", "name another --device")


LIBRARIES: Mapping[str, type[Arrays]] = {"numpy": Arrays, "torch": TorchArrays, "jax": JaxArrays}
