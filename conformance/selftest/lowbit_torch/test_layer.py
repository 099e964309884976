"""`lowbit_torch`, the layer and its operator; run by ``nox -s torch``, skipped where torch is not installed."""

import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: `nox -s torch` installs it and runs these tests")

import torch
import torch_backends
from torch._subclasses.fake_tensor import FakeTensorMode

from lowbit import backend
from lowbit.errors import ArgumentError, NotDeclaredError, UnavailableError
from lowbit.quantization import affine
from lowbit.quantization.affine import CONVENTIONS, QuantizedMatrix, dequantize, quantize
from lowbit_torch import QuantLinear
from lowbit_torch.operator import engine

ROWS, COLUMNS, GROUP = 96, 32, 32  # what every backend here handles
QLINEAR, DEQUANTIZE = torch.ops.lowbit.qlinear.default, torch.ops.lowbit.dequantize.default
# Inductor imports a part of torch that torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def matrix_of(bits: int = 4, convention: affine.Convention = "minimum", scales: str = "float32") -> QuantizedMatrix:
    weights = np.random.default_rng(bits).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    return quantize(weights, bits=bits, group_size=GROUP, convention=convention, scale_dtype=scales)  # type: ignore[arg-type]  # valid by construction


def layer_of(matrix: QuantizedMatrix | None = None, **choices: Any) -> QuantLinear:
    """A layer with a bias; by the reference backend, whose result depends on nothing."""
    bias = torch.linspace(-1, 1, COLUMNS)
    return QuantLinear.from_matrix(matrix or matrix_of(), bias, **({"backend": "reference"} | choices))


def arguments(layer: QuantLinear) -> tuple[Any, ...]:
    """What the layer gives to its operator after x."""
    weights = (layer.words, layer.scales, layer.zeros, layer.bits, layer.group_size, layer.convention)
    return (*weights, layer.backend, layer.contract)


def x_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, ROWS, generator=torch.Generator().manual_seed(len(shape)))


def test_the_default_backend() -> None:
    """Without a name it is the one that lowbit uses everywhere, and the layer says which."""
    with backend.load() as default:
        layer = QuantLinear.from_matrix(matrix_of())
        assert layer.backend == default.name and f"backend={default.name}" in repr(layer)
    assert QuantLinear(ROWS, COLUMNS, group_size=GROUP, backend="reference").backend == "reference"


# The numbers.


@pytest.mark.parametrize("name", ["numpy", "cppyy", "reference", "torch"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_layer_is_the_backend_to_the_bit(name: str, bits: int) -> None:
    """One row is qgemv and several are qgemm of the same prepared matrix, plus the bias in float32."""
    if not backend.find(name).availability().usable:
        pytest.skip(f"backend {name} cannot run here")
    for convention in CONVENTIONS:
        for scales in affine.SCALE_DTYPES:
            matrix = matrix_of(bits, convention, scales)
            layer, x = layer_of(matrix, backend=name), x_of(2, 3)
            try:
                prepared = backend.load(name).prepare(matrix)
            except NotDeclaredError as error:
                with pytest.raises(NotDeclaredError, match=str(error)):
                    layer(x)
                continue
            wanted = prepared.qgemm(x.reshape(6, ROWS).numpy()).reshape(2, 3, COLUMNS) + layer.bias.numpy()
            assert np.array_equal(layer(x).numpy(), wanted)
            one = prepared.qgemv(x[0, 0].numpy()) + layer.bias.numpy()
            assert np.array_equal(layer(x[0, 0]).numpy(), one)
            assert np.array_equal(layer(x[:1, :1]).numpy(), one[None, None])


def test_the_integer_contract_is_asked_for_and_never_substituted() -> None:
    """It equals qgemm_cast to the bit; a backend without it is not declared, and no other product answers."""
    matrix, x = matrix_of(), x_of(3)
    given = layer_of(matrix, contract="integer")(x).numpy()
    plain = layer_of(matrix)(x).numpy()
    wanted = backend.load("reference").prepare(matrix).qgemm_cast(x.numpy()) + layer_of().bias.numpy()
    assert np.array_equal(given, wanted) and not np.array_equal(given, plain)
    with pytest.raises(NotDeclaredError, match=r"backend dense does not declare linear\.qgemm_bfp"):
        layer_of(matrix, contract="integer", backend="torch_backends:Turns")(x)
    x[1, 7] = torch.inf
    with pytest.raises(ArgumentError, match=r"x\[1, 7\] is inf; allowed: finite numbers"):
        layer_of(matrix, contract="integer")(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused_or_rounded_once(dtype: torch.dtype) -> None:
    """With cast=True the float32 result of the widened x, bias included, is rounded once; without, refused."""
    x = x_of(3).to(dtype)
    with pytest.raises(ArgumentError, match=rf"dtype of x is {dtype}; allowed: torch\.float32; .*cast=True"):
        layer_of()(x)
    given, wanted = layer_of(cast=True)(x), layer_of()(x.float()).to(dtype)
    assert given.dtype == dtype and torch.equal(given, wanted)
    with pytest.raises(ArgumentError, match=r"dtype of x is torch\.float64"):
        layer_of(cast=True)(x_of(3).double())


def test_any_leading_dimensions_and_strides() -> None:
    """None, several, a size of 0, a transposed x, and an x in the middle of a tensor."""
    layer, x = layer_of(), x_of(4, 5)
    whole = layer(x)
    assert layer(x[0, 0]).shape == (COLUMNS,)
    assert layer(x[:, :0]).shape == (4, 0, COLUMNS)
    assert torch.equal(layer(x.transpose(0, 1)), whole.transpose(0, 1))
    assert torch.equal(layer(x.flatten(0, 1)[3:7]), whole.flatten(0, 1)[3:7])
    assert torch.equal(layer(torch.stack([x, x], dim=-1)[..., 1]), whole)


def test_one_row_is_a_vector_and_the_result_is_written_where_torch_allocated_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backend without wishes is given the memory of x and of the result; one row goes to qgemv, several to qgemm."""
    met = []
    for hook in ("_qgemv", "_qgemm"):
        note = lambda self, x, out, hook=hook: met.append((hook, x.ctypes.data, out.ctypes.data))  # noqa: E731 - bound to this hook
        monkeypatch.setattr(torch_backends.Dense, hook, note)
    layer = QuantLinear.from_matrix(matrix_of(), backend="torch_backends:Plain")
    for x, hook in ((x_of(3), "_qgemm"), (x_of(1), "_qgemv"), (x_of(), "_qgemv")):
        y = layer(x)
        assert met.pop() == (hook, x.data_ptr(), y.data_ptr())


def test_a_backend_that_wants_its_arrays_placed_gets_them_so() -> None:
    """Alignment and readable bytes after the end, for weights, x and the result."""
    x = x_of(3)
    given = layer_of(backend="torch_backends:Particular")(x)
    assert torch.equal(given, layer_of(backend="torch_backends:Plain")(x))


# What torch makes of it.


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_in_one_graph_with_a_batch_of_any_size(compiler: str) -> None:
    """fullgraph allows no break; three batches of different sizes are one compilation and give the same bits.

    Inductor compiles C++, which takes seconds the first time.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = torch.nn.Sequential(layer_of(), torch.nn.ReLU())
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=compiler)
    with torch.no_grad():
        results = [(compiled(x_of(rows)), model(x_of(rows))) for rows in (2, 5, 9)]
    assert all(torch.equal(given, wanted) for given, wanted in results)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_compiled_layer_gives_the_same_bits() -> None:
    """The layer alone, also with the casts of half precision in the graph."""
    torch._dynamo.reset()
    layer = layer_of(cast=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for x in (x_of(3), x_of(3).bfloat16()):
        assert torch.equal(compiled(x), layer(x))


def test_exported_with_a_batch_of_any_size_saved_and_loaded(tmp_path: Any) -> None:
    """The program holds one node for the product and plain tensors, and a loaded one computes the same bits."""
    layer, file = layer_of(), tmp_path / "layer.pt2"
    batch = torch.export.Dim("batch")
    program = torch.export.export(layer, (x_of(3),), dynamic_shapes={"x": {0: batch}})
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets == [QLINEAR, torch.ops.aten.add.Tensor]
    assert set(program.state_dict) == {"words", "scales", "zeros", "bias"}
    torch.export.save(program, file)
    loaded = torch.export.load(file).module()
    for x in (x_of(1), x_of(8)):
        assert torch.equal(loaded(x), layer(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # opcheck of torch 2.15 looks at one by itself
@pytest.mark.parametrize("contract", ["float32", "integer"])
def test_torch_finds_nothing_wrong_with_the_operators(contract: str) -> None:
    """torch.library.opcheck: schema, registration of autograd, fake against real, and tracing with dynamic shapes."""
    layer = layer_of(contract=contract)
    for x in (x_of(), x_of(3), x_of(2, 3)):
        torch.library.opcheck(QLINEAR, (x, *arguments(layer)))
    if contract == "float32":
        torch.library.opcheck(QLINEAR, (x_of(3).requires_grad_(), *arguments(layer)))
    torch.library.opcheck(DEQUANTIZE, arguments(layer)[:6])


# Gradients.


def test_the_gradient_of_x_is_that_of_the_dequantised_weights() -> None:
    """It is g Wᵀ in float32, to the bit, also compiled; second derivatives follow from it."""
    layer = layer_of()
    weights = torch.from_numpy(dequantize(matrix_of()))
    assert torch.equal(DEQUANTIZE(*arguments(layer)[:6]), weights)
    torch._dynamo.reset()
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        x, g = x_of(3).requires_grad_(), torch.randn(3, COLUMNS)
        call(x).backward(g)
        assert x.grad is not None and torch.equal(x.grad, g @ weights.T)


def test_gradients_that_do_not_exist_are_refused_in_words() -> None:
    """Those of the weights when the layer is called, that of the integer contract when it is computed."""
    layer = layer_of()
    layer.scales.requires_grad_()
    with pytest.raises(ArgumentError, match="requires_grad of scales is True; allowed: False: quantised weights"):
        layer(x_of(3))
    with torch.no_grad():
        layer(x_of(3))
    y = layer_of(contract="integer")(x_of(3).requires_grad_())
    with pytest.raises(ArgumentError, match="contract is 'integer', and a gradient is required"):
        y.sum().backward()


# Prepared weights.


def test_weights_are_prepared_once_and_again_when_written_to() -> None:
    """A second call, a compiled one and a view prepare nothing; a write to any of the three does."""
    name = "torch_backends:Turns"
    layer, x = layer_of(backend=name), x_of(2)
    before = torch_backends_loaded(name).prepared
    first = layer(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), first)
    QLINEAR(x, *(part.detach() for part in arguments(layer)[:3]), *arguments(layer)[3:])
    assert torch_backends_loaded(name).prepared == before + 1
    layer.scales *= 2
    layer.zeros *= 2
    assert torch.allclose(layer(x) - layer.bias, 2 * (first - layer.bias), atol=1e-5)
    assert torch_backends_loaded(name).prepared == before + 2


def torch_backends_loaded(name: str) -> Any:
    return type(engine(name).backend)


@pytest.mark.parametrize("name", ["reference", "torch_backends:Turns"])
def test_what_was_prepared_goes_with_the_layer(name: str) -> None:
    """Also where the backend keeps the arrays that it was given."""
    cache = engine(name).cache
    before = len(cache)
    layer = layer_of(backend=name)
    layer(x_of(2))
    assert len(cache) == before + 1
    del layer
    assert len(cache) == before


def test_several_threads_prepare_once_and_take_turns() -> None:
    """Eight threads, one layer, a backend that says nothing of threads: no two calls overlap, and all agree."""
    name = "torch_backends:Turns"
    layer, x, results = layer_of(backend=name), x_of(2), []
    kind = torch_backends_loaded(name)
    before = kind.prepared
    threads = [threading.Thread(target=lambda: results.append(layer(x))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kind.prepared == before + 1 and len(results) == 8
    assert kind.linear.overlaps == 0
    assert all(torch.equal(result, results[0]) for result in results)


# What is refused.

WRONG: list[tuple[dict[int, Any], str]] = [
    ({0: x_of(3)[:, :-1]}, r"shape of x is \(3, 95\); allowed: 96 numbers in the last dimension"),
    ({0: torch.tensor(1.0)}, r"shape of x is \(\); allowed: 96 numbers"),
    ({0: x_of(3).double()}, "dtype of x is torch.float64; allowed: torch.float32"),
    ({1: torch.zeros(12, 32)}, "dtype of words is torch.float32; allowed: torch.int32"),
    ({1: torch.zeros(12, dtype=torch.int32)}, r"shape of words is \(12,\); allowed: 2 dimensions"),
    ({3: torch.zeros(3, 32, dtype=torch.uint8)}, "dtype of zeros is torch.uint8; allowed: torch.float32"),
    ({4: 5}, "bits is 5; allowed: 2, 3, 4 or 8"),
    ({2: torch.ones(4, 32)}, r"shape of scales is \(4, 32\); allowed: 3 x 32"),
    ({2: -torch.ones(3, 32)}, "scales is as low as -1.0; allowed: above 0"),
    ({4: 0}, "bits is 0; allowed"),
    ({5: 0}, "group_size is 0; allowed: an integer from 1 to 96"),
    ({6: "maximum"}, "convention is 'maximum'; allowed: minimum or zero_point"),
    ({7: "abacus"}, "backend is 'abacus'; allowed:"),
    ({8: "int4"}, "contract is 'int4'; allowed: float32 or integer"),
]
WITHOUT_NUMBERS = WRONG[:7]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message[:24] for _, message in WRONG])
def test_the_operator_refuses_a_wrong_argument_in_words(change: dict[int, Any], message: str) -> None:
    """Whoever calls it, before the backend sees anything."""
    given = [x_of(3), *arguments(layer_of())]
    for place, value in change.items():
        given[place] = value
    with pytest.raises(ArgumentError, match=message):
        QLINEAR(*given)


@pytest.mark.parametrize(("change", "message"), WITHOUT_NUMBERS, ids=[message[:24] for _, message in WITHOUT_NUMBERS])
def test_the_fake_operator_refuses_in_the_same_words(change: dict[int, Any], message: str) -> None:
    """What can be seen without numbers: dtypes, numbers of dimensions, and the length of x."""
    given = [x_of(3), *arguments(layer_of())]
    for place, value in change.items():
        given[place] = value
    with FakeTensorMode() as mode, pytest.raises(ArgumentError, match=message):
        QLINEAR(*(mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in given))


def test_a_backend_that_cannot_run_says_so_at_the_first_call() -> None:
    """A layer can be made and loaded without it."""
    layer = layer_of(backend="odd_backends:Unavailable")
    with pytest.raises(UnavailableError, match="it needs an abacus; buy one"):
        layer(x_of(2))
