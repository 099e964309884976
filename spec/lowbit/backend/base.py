"""Backends: what a kernel author implements. The chapter `lowbit.backend.registry` says how lowbit finds it.

A *backend* is a class with a name, a check whether it can run here, a list of what it claims to do, and the operations
themselves. Weights go through `prepare` once, where a backend may change their layout, specialise and compile. The
result is called many times.

Three rules keep comparisons honest. What a backend does not declare is not tested, and is reported as *not declared*.
What it declares but lacks is a failure. It computes the result itself: it calls no function of the specification that
computes, and imports no other backend. Any backend may use the types, constants, checks and errors of lowbit.

**Where arguments are checked.** `Backend.run` checks the arguments of any operation as the specification says, then
whether it is declared, and then calls the method named after it with underscores, the *hook*: ``_packing_pack`` for
`packing.pack`. `PreparedLinear` does the same for products, and `lowbit.backend.session.Session` for each step of a
stateful operation. A backend overrides hooks only, so it never sees a wrong bit width, a strided array or a read-only
output, and such an error reads the same for every backend. The smallest backend is one hook:

>>> class Mine(Backend):
...     name = "mine"
...     def capabilities(self) -> Capabilities:
...         limits = {"bits": (4,), "convention": ("minimum",)}
...         return Capabilities({"linear.qgemv": Declaration(limits, Arithmetic("dequantised"))})
...     def _prepare(self, matrix: QuantizedMatrix) -> "PreparedLinear":
...         return MyWeights("mine", matrix.rows, matrix.columns, matrix.nbytes, own_weights(matrix))
>>> def own_weights(matrix):
...     shifts = 4 * np.arange(8, dtype=np.uint32)
...     codes = (matrix.words[:, np.newaxis] >> shifts[:, np.newaxis] & 15).reshape(matrix.rows, -1)
...     group = np.arange(matrix.rows) // matrix.group_size
...     return np.float32(matrix.scales)[group] * np.float32(codes) + np.float32(matrix.zeros)[group]
>>> class MyWeights(PreparedLinear):
...     def __init__(self, backend, rows, columns, nbytes, weights):
...         super().__init__(backend, rows, columns, nbytes)
...         self.weights = weights
...     def _qgemv(self, x, out):
...         np.dot(x, self.weights, out=out)
>>> import numpy as np
>>> from lowbit.quantization.affine import quantize
>>> eye = quantize(np.eye(8, dtype=np.float32) * 15, bits=4, group_size=8)
>>> Mine().prepare(eye).qgemv(np.ones(8, np.float32))
array([15., 15., 15., 15., 15., 15., 15., 15.], dtype=float32)

**Whose memory.** Arguments belong to the caller again when the call has returned: they may be freed, or have other
contents by the next call, at the same address and in the same Python object. So a backend reads the arguments of a call
during that call and not after it. This holds for `prepare` and for each step of a session too: a backend copies what it
needs later, as `lowbit.h` asks of libraries. It does not recognise an array by its address, its object or a part of its
contents, since none of these shows what an array holds now. A result other than the `out` that was given belongs to the
caller, who may write to it: it is not a view of an argument, nor an array that the backend keeps or returns again.
Arrays begin at any multiple of the size of their elements; `Capabilities.alignment` asks for more.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from lowbit.arrays import F32, Activations, Array
from lowbit.backend.prepared import PreparedLinear
from lowbit.backend.prepared_stored import PreparedStored
from lowbit.backend.session import Session
from lowbit.contract.checks import check_choice, check_instance, check_integer
from lowbit.contract.operation import IMPLIED, Parameters
from lowbit.contract.ranges import Range
from lowbit.contract.rounding import Arithmetic
from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.operations import OPERATIONS
from lowbit.quantization import bfp
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.tensor_formats.stored import Result, Stored

if TYPE_CHECKING:  # importing the model chapters declares operations, which a backend must not require
    from lowbit.backend.whole_model import DeviceDecoder, DeviceSettings
    from lowbit.model.config import LlamaConfig
    from lowbit.model.decoder import AnyDecoder, Decoder
    from lowbit.model.step import Step
    from lowbit.model.weights import LayeredWeights, Progress

MOST_ALIGNMENT = 4096
"""Bytes: a page of memory."""
PRODUCTS = ("linear.qgemv", "linear.qgemm", "linear.qgemm_bfp")
"""The operations for which a matrix is prepared."""
STORED_PRODUCTS = ("linear.gemv", "linear.gemm", "linear.gemm_cast")
"""The operations for which a stored matrix is prepared."""


# **Declarations.**


@dataclass(frozen=True)
class Availability:
    """Whether a backend can run on this machine; if not, the reason, and what the user can do."""

    usable: bool
    reason: str = ""
    remedy: str = ""


_IMPLIED_LIMITS = {name: (value,) for name, value in IMPLIED.items()}


@dataclass(frozen=True)
class Declaration:
    """What a backend claims for one operation.

    Attributes:
        limits: for each parameter of which it handles only some values, those values:
            ``{"bits": (2, 4), "convention": ("minimum",)}``, or for a size a `Range`: ``{"columns": Range(8)}``. An
            unnamed parameter has no limit, except those of `IMPLIED`: a declaration that does not name the type of its
            ``inputs`` handles float32. A limit on a parameter that a call does not have is ignored.
        arithmetic: how it computes, for a bounded operation; ``None`` for an exact one.
    """

    limits: Mapping[str, "tuple[object, ...] | Range"] = field(default_factory=dict)
    arithmetic: Arithmetic | None = None

    @property
    def told_limits(self) -> dict[str, object]:
        """The limits in JSON types: a list of values, or an object for a `Range`."""
        return {name: each.told if isinstance(each, Range) else list(each) for name, each in self.limits.items()}

    def lacks(self, parameters: Parameters) -> str:
        """A description of the undeclared part of these parameters; empty if all are declared.

        >>> Declaration({"bits": (2, 4)}).lacks({"bits": 3, "convention": "minimum"})
        'bits 3'
        >>> Declaration().lacks({"inputs": "float16"}), Declaration({"inputs": ("float16",)}).lacks({})
        ('inputs float16', 'inputs float32')
        """
        for name, allowed in {**_IMPLIED_LIMITS, **self.limits}.items():
            meant = parameters.get(name, IMPLIED.get(name))
            if meant not in allowed and (name in parameters or name in IMPLIED):
                return f"{name} {meant}"
        return ""


@dataclass(frozen=True)
class Capabilities:
    """All that a backend claims.

    Attributes:
        operations: operation id to the declaration of the operation.
        concurrent: whether several threads may call it at once.
        details: anything a report should state: version, instruction set, threads.
        alignment: the addresses of its arguments' arrays must be multiples of this number of bytes, a power of two; 0
            stands for the alignment of the elements, which numpy guarantees.
        overread: the number of bytes past the end of an array that it may read but must not use; the caller ensures
            that they are readable.
        profiles: the names of the `lowbit.profiles` that it claims to keep.
    """

    operations: Mapping[str, Declaration]
    concurrent: bool = False
    details: Mapping[str, str] | None = None
    alignment: int = 0
    overread: int = 0
    profiles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.alignment & (self.alignment - 1) or not 0 <= self.alignment <= MOST_ALIGNMENT:
            raise ArgumentError("alignment", self.alignment, f"0 or a power of two up to {MOST_ALIGNMENT}")
        check_integer("overread", self.overread, 0, MOST_ALIGNMENT)


# **The backend itself.**


@dataclass(frozen=True)
class StepRequest:
    """A compiled step that a backend may keep; its functions are called only if none is kept.

    Attributes:
        identity: what distinguishes it from any other step, such as the digest of a file and the operations of its
            products.
        config: the shape of the model.
        step: reads the model and returns the program of the step.
        make: takes a backend of the same kind; returns the decoder that runs the step one operation at a time on it,
            and facts for the caller, in JSON types.
    """

    identity: tuple[str, ...]
    config: "LlamaConfig"
    step: "Callable[[], Step]"
    make: "Callable[[Backend], tuple[Decoder, Mapping[str, Any]]]"


class Backend(ABC):
    """The class that a kernel author derives from; see the top of this chapter for the smallest example.

    A backend is also a context manager: leaving it closes it.
    """

    name: str

    def availability(self) -> Availability:
        """Whether it can run here. The check is quick: it compiles nothing and opens no device."""
        return Availability(True)

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What it claims; the same answer every time."""

    def close(self) -> None:  # noqa: B027 - most backends own nothing to release
        """Release threads and memory; the backend is not used afterwards. Closing twice is harmless."""

    def warm_up(self, operation: str) -> None:  # noqa: B027 - most backends have nothing to prepare
        """Prepare an operation before its first call; by default nothing.

        Otherwise the first call does so. But only this method and `prepare` may start a compiler or any other program:
        the conformance suite reports a program started in a call as a breach of H6.

        Args:
            operation: one that the backend declares; others are ignored.

        Raises:
            UnavailableError: a requirement is missing.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # The operations: check, then hook.

    def run(self, operation: str, *arguments: Any, **choices: Any) -> Any:
        """Run one operation of the specification, with the arguments of its reference function.

        Raises:
            ArgumentError: there is no such operation, it is stateful, or an argument is wrong.
            NotDeclaredError: the backend does not declare it, or not for these arguments.
        """
        if operation not in OPERATIONS or OPERATIONS[operation].stateful:
            check_choice("operation", operation, sorted(name for name in OPERATIONS if not OPERATIONS[name].stateful))
        return self._call(operation, *arguments, **choices)

    def unchecked(self, operation: str, *choices: Parameters) -> Callable[..., Any]:
        """The operation itself, without a check of its arguments at each call.

        For a caller that makes the arguments itself and calls often: checking would read the whole cache of a decoder
        for every token. Arguments that `run` would refuse have no defined result.

        Args:
            operation: as for `run`.
            choices: the parameters of the later calls, by the operation's names.

        Raises:
            NotDeclaredError: the backend does not declare it, or not for these choices.
        """
        for parameters in choices or ({},):
            self._check_declared(operation, parameters)
        return self._hook(operation)

    def open(self, operation: str, *arguments: Any, **choices: Any) -> Session:
        """Open a stateful operation; its hook returns an object with `step`, and `close` if needed.

        >>> from lowbit.moe.offload import Arrangement, Request
        >>> from lowbit.backend.reference import ReferenceBackend
        >>> with ReferenceBackend().open("offload.engine", Arrangement(layers=1, experts=4, slots=2)) as engine:
        ...     print(*(event.kind for event in engine.step(Request(0, (3,)))))
        load promote

        Raises:
            ArgumentError: there is no such operation, it is not stateful, or an argument is wrong.
            NotDeclaredError: the backend does not declare it, or not for these arguments.
        """
        check_choice("operation", operation, sorted(name for name in OPERATIONS if OPERATIONS[name].stateful))
        check_step = OPERATIONS[operation].check_step
        assert check_step is not None
        steps = self._call(operation, *arguments, **choices)
        return Session(operation, steps, check_step(*arguments, **choices))

    def _call(self, operation: str, *arguments: Any, **choices: Any) -> Any:
        """Check the arguments, then the declaration, then call the hook."""
        specified = OPERATIONS[operation]
        specified.check(*arguments, **choices)
        self._check_declared(operation, specified.parameters(*arguments, **choices))
        return self._hook(operation)(*arguments, **choices)

    def _hook(self, operation: str) -> Callable[..., Any]:
        """The method that computes an operation.

        Raises:
            NotDeclaredError: there is no such method.
        """
        hook: Callable[..., Any] | None = getattr(self, "_" + operation.replace(".", "_"), None)
        if hook is None:
            raise NotDeclaredError(self.name, operation)
        return hook

    def prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        """Prepare a matrix for `linear.qgemv`, `linear.qgemm` and `linear.qgemm_bfp`, as far as they are declared.

        The matrix is copied or laid out anew: afterwards its arrays may be freed or written to.

        Raises:
            ArgumentError: not a `QuantizedMatrix`.
            NotDeclaredError: none of them is declared for its bits, groups, convention and scales.
        """
        check_instance("matrix", matrix, QuantizedMatrix)
        missing = self._missing(PRODUCTS, matrix.parameters)
        prepared = self._prepare(matrix)
        if isinstance(prepared, PreparedLinear):  # the suite reports any other result
            prepared._lacking = missing
            prepared._alignment, prepared._overread = self._claimed.alignment, self._claimed.overread
            if "linear.qgemm_bfp" in missing:
                claim = self._claimed.operations["linear.qgemm_bfp"]
                prepared._format_lacks = cache(lambda format: claim.lacks(format.parameters))
        return prepared

    def prepare_stored(self, weights: Stored) -> PreparedStored:
        """Prepare a stored matrix for `linear.gemv`, `linear.gemm` and `linear.gemm_cast`, as far as declared.

        The matrix is copied or laid out anew: afterwards its arrays may be freed or written to.

        Raises:
            ArgumentError: not a `lowbit.tensor_formats.stored.Stored`.
            NotDeclaredError: none of them is declared for its format, options and sizes; or the backend has no
                prepared form.
        """
        check_instance("weights", weights, Stored)
        own = weights.parameters
        self._missing(STORED_PRODUCTS, own)
        prepared = self._prepare_stored(weights)
        if isinstance(prepared, PreparedStored):
            prepared._refuse = lambda operation, call: self._check_declared(operation, {**own, **call})
            prepared._alignment, prepared._overread = self._claimed.alignment, self._claimed.overread
        return prepared

    @property
    def prepares_stored(self) -> bool:
        """Whether it can prepare stored matrices; otherwise models pass it none."""
        return type(self)._prepare_stored is not Backend._prepare_stored

    @property
    def runs_models(self) -> bool:
        """Whether it has its own decoder, which runs whole models."""
        return type(self).decoder is not Backend.decoder

    def decoder(
        self, weights: "LayeredWeights", settings: "DeviceSettings", progress: "Progress | None" = None
    ) -> "DeviceDecoder":
        """A decoder for a whole model (`lowbit.backend.whole_model`); most backends have none.

        Args:
            weights: the model, one layer at a time.
            settings: how much of the device it may use, and how.
            progress: called after each layer.

        Raises:
            NotDeclaredError: it has none, or none for such a model.
            ArgumentError: less memory than this model needs; the message says how much it needs.
        """
        raise NotDeclaredError(self.name, "whole models")

    @property
    def compiles_steps(self) -> bool:
        """Whether it compiles the steps of some decoders."""
        return type(self).compiled is not Backend.compiled

    def compiled(self, decoder: "Decoder") -> "AnyDecoder":
        """The same decoder with its step compiled, for a backend that can; most cannot.

        Every logit has the same bits as from the given decoder, which runs the step one operation at a time on this
        backend.

        Args:
            decoder: its linear layers are `lowbit.runtime.linears.BackendLinear` of this backend, and its elementwise
                operations are this backend's.

        Raises:
            NotDeclaredError: the backend does not compile steps, or not this one; the reason says what is missing.
        """
        raise NotDeclaredError(self.name, "compiled steps")

    @property
    def keeps_steps(self) -> bool:
        """Whether it keeps compiled steps between processes."""
        return type(self).kept_step is not Backend.kept_step

    def kept_step(self, request: "StepRequest") -> "tuple[AnyDecoder, Mapping[str, Any]] | None":
        """A decoder whose compiled step was kept by an earlier process, or is kept now for later ones.

        Its results have the same bits as those of `compiled`. A kept step is checked before use, and compiled again if
        it is damaged.

        Args:
            request: the step.

        Returns:
            The decoder and the facts of the request; None if none can be kept, for any reason.

        Raises:
            LowbitError: what making it raises.
        """
        return None

    # The hooks. Those of products go through `prepare`; the others are named after their operations.

    def _prepare(self, matrix: QuantizedMatrix) -> PreparedLinear:
        raise NotDeclaredError(self.name, "linear.qgemv")

    def _prepare_stored(self, weights: Stored) -> PreparedStored:
        raise NotDeclaredError(self.name, "linear.gemv", "matrices that are prepared once")

    def _linear_gemv(self, x: Activations, weights: Stored, result: Result = "float32") -> Array:
        return self.prepare_stored(weights).gemv(x, result)

    def _linear_gemm(self, x: Activations, weights: Stored, result: Result = "float32") -> Array:
        return self.prepare_stored(weights).gemm(x, result)

    def _linear_gemm_cast(self, x: Stored, weights: Stored, result: Result = "float32") -> Array:
        return self.prepare_stored(weights).gemm_cast(x, result)

    def _linear_qgemv(self, x: F32, matrix: QuantizedMatrix) -> F32:
        return self.prepare(matrix).qgemv(x)

    def _linear_qgemm(self, x: F32, matrix: QuantizedMatrix) -> F32:
        return self.prepare(matrix).qgemm(x)

    def _linear_qgemm_bfp(self, x: bfp.Blocks, matrix: QuantizedMatrix) -> F32:
        return self.prepare(matrix).qgemm_bfp(x)

    @property
    def _claimed(self) -> Capabilities:
        """Its capabilities, cached because they never change.

        The cache has no lock such as that of `functools.cached_property`: a child forked while another thread holds the
        lock would wait for ever.
        """
        claimed: Capabilities = self.__dict__.get("_claims") or self.__dict__.setdefault("_claims", self.capabilities())
        return claimed

    def _check_declared(self, operation: str, parameters: Parameters) -> None:
        declaration = self._claimed.operations.get(operation)
        if declaration is None:
            raise NotDeclaredError(self.name, operation)
        if missing := declaration.lacks(parameters):
            raise NotDeclaredError(self.name, operation, missing)

    def _missing(self, products: tuple[str, ...], parameters: Parameters) -> dict[str, str]:
        """For each declared product, a description of what it lacks for a matrix with these parameters; empty if
        nothing.

        Raises:
            NotDeclaredError: every product lacks something, or none is declared.
        """
        declared = self._claimed.operations
        missing = {name: declared[name].lacks(parameters) for name in products if name in declared}
        if all(missing.values()):
            name = next(iter(missing), products[0])
            raise NotDeclaredError(self.name, name, missing.get(name, ""))
        return missing
