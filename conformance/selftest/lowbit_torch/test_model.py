"""`lowbit_torch` in a model: saved, loaded, copied, moved and replaced by name; run by ``nox -s torch``."""

import copy
import doctest
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: `nox -s torch` installs it and runs these tests")

import torch
import torch_backends
from paths import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode

from lowbit.backend import find, load
from lowbit.errors import ArgumentError, NotDeclaredError, UnavailableError
from lowbit.linear import linear
from lowbit.linear.bounds import linear_bound
from lowbit.quantization.affine import CONVENTIONS, Convention, QuantizedMatrix, quantize
from lowbit_torch import QuantLinear, Replacement, replace_linears

PAGE = ROOT / "docs/torch.rst"
ROWS, COLUMNS = 64, 12


def layer_of(seed: int = 0, convention: Convention = "minimum", **choices: Any) -> QuantLinear:
    """A layer of random weights with a bias."""
    weights = np.random.default_rng(seed).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    matrix = quantize(weights, bits=4, group_size=24, convention=convention)
    bias = torch.full((COLUMNS,), float(seed))
    return QuantLinear.from_matrix(matrix, bias, **({"backend": "reference"} | choices))


def empty(**choices: Any) -> QuantLinear:
    """A layer of the same form that waits for its numbers."""
    options: dict[str, Any] = {"bits": 4, "group_size": 24, "backend": "reference"}
    return QuantLinear(ROWS, COLUMNS, **(options | choices))


X = torch.randn(3, ROWS, generator=torch.Generator().manual_seed(0))


# What a layer is made from.


def test_a_linear_is_transposed_and_rounded_to_nearest() -> None:
    """Its matrix is lowbit's quantize of the transposed weights; the bias is kept; None is one group a column."""
    given = torch.nn.Linear(ROWS, COLUMNS)
    layer = QuantLinear.from_linear(given, bits=3, group_size=None, backend="reference")
    wanted = quantize(np.ascontiguousarray(given.weight.detach().numpy().T), bits=layer.bits, group_size=ROWS)
    assert same(layer.matrix(), wanted) and torch.equal(layer.bias, given.bias)
    assert (layer.in_features, layer.out_features, layer.group_size) == (ROWS, COLUMNS, ROWS)
    half = QuantLinear.from_linear(copy.deepcopy(given).bfloat16(), backend="reference", group_size=ROWS)
    assert half.bias.dtype == torch.float32 and half.scales.dtype == torch.float32


def test_a_layer_owns_its_numbers() -> None:
    """Neither the matrix that it was made from nor the bias is shared."""
    matrix, bias = layer_of().matrix(), torch.zeros(COLUMNS)
    layer = QuantLinear.from_matrix(matrix, bias, backend="reference")
    before = layer(X)
    bias += 1
    matrix.scales[...] *= 2
    assert torch.equal(layer(X), before)


def same(one: QuantizedMatrix, other: QuantizedMatrix) -> bool:
    parts = [(one.words, other.words), (one.scales, other.scales), (one.zeros, other.zeros)]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in parts) and one.group_size == other.group_size


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"bits": 5}, "bits is 5; allowed: 2, 3, 4 or 8"),
    ({"in_features": 63}, "in_features is 63; allowed: a multiple of 8"),
    ({"in_features": 0}, "in_features is 0; allowed: an integer of at least 1"),
    ({"out_features": 0}, "out_features is 0; allowed: an integer of at least 1"),
    ({"group_size": 65}, "group_size is 65; allowed: an integer from 1 to 64"),
    ({"convention": "both"}, "convention is 'both'; allowed: minimum or zero_point"),
    ({"scale_dtype": "bfloat16"}, "scale_dtype is 'bfloat16'; allowed: float32 or float16"),
    ({"contract": "int8"}, "contract is 'int8'; allowed: float32 or integer"),
    ({"backend": 4}, "backend is 4; allowed: a name, or None for the default"),
    ({"cast": 1}, "cast is 1; allowed: True or False"),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES, ids=[message[:20] for _, message in MISTAKES])
def test_a_wrong_option_is_refused_in_words(change: dict[str, Any], message: str) -> None:
    """When the layer is made, not when it is called."""
    options: dict[str, Any] = {"in_features": ROWS, "out_features": COLUMNS, "group_size": 24, "backend": "reference"}
    with pytest.raises(ArgumentError, match=message):
        QuantLinear(**(options | change))


# Saved and loaded.


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_comes_back(convention: Convention, assign: bool) -> None:
    """Strictly, into a layer that has already been called with other weights, which are forgotten."""
    saved, file = layer_of(1, convention), io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    layer = layer_of(2, convention)
    other = layer(X)
    layer.load_state_dict(torch.load(file, weights_only=True), strict=True, assign=assign)
    assert torch.equal(layer(X), saved(X)) and not torch.equal(layer(X), other)
    assert same(layer.matrix(), saved.matrix())


def test_loading_is_seen_in_inference_mode() -> None:
    """There torch does not count writes; loading says so itself."""
    with torch.inference_mode():
        layer, other = layer_of(1), layer_of(2)
        layer(X)
        layer.load_state_dict(other.state_dict())
        assert torch.equal(layer(X), other(X))


def test_a_state_dict_holds_plain_tensors(tmp_path: Path) -> None:
    """Contiguous, on the CPU, each with memory of its own; safetensors keeps them."""
    state = torch.nn.ModuleDict({"a": layer_of()}).state_dict()
    assert sorted(state) == ["a.bias", "a.layout", "a.scales", "a.words", "a.zeros"]
    assert all(type(t) is torch.Tensor and t.is_contiguous() and t.device.type == "cpu" for t in state.values())
    assert len({t.untyped_storage().data_ptr() for t in state.values()}) == len(state)
    safe = pytest.importorskip("safetensors.torch", reason="safetensors is not installed: `nox -s torch` has it")
    safe.save_file(state, tmp_path / "layer.safetensors")
    model = torch.nn.ModuleDict({"a": empty()})
    model.load_state_dict(safe.load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(model["a"](X), layer_of()(X))


STATES: list[tuple[dict[str, Any], str]] = [
    ({"words": torch.zeros(9, COLUMNS, dtype=torch.int32)}, r"shape of words is \(9, 12\); allowed: \(8, 12\)"),
    ({"words": torch.zeros(8, COLUMNS)}, "dtype of words is torch.float32; allowed: torch.int32"),
    ({"scales": torch.ones(3, COLUMNS).half()}, "dtype of scales is torch.float16; allowed: torch.float32"),
    ({"scales": -torch.ones(3, COLUMNS)}, "scales is as low as -1.0; allowed: above 0"),
    ({"zeros": torch.full((3, COLUMNS), torch.nan)}, r"zeros\[0, 0\] is nan; allowed: finite numbers"),
    ({"bias": torch.zeros(COLUMNS).double()}, "dtype of bias is torch.float64; allowed: torch.float32"),
    ({"bias": torch.zeros(COLUMNS + 1)}, r"shape of bias is \(13,\); allowed: \(12,\)"),
    ({"layout": torch.tensor([1, 4, 64, 25, 0])}, r"layout is \[1, 4, 64, 25, 0\]; allowed: \[1, 4, 64, 24, 0\]"),
    ({"layout": torch.tensor([2, 4, 64, 24, 0])}, r"layout is \[2, 4, 64, 24, 0\]"),
    ({"layout": None}, "Missing key"),
    ({"scales": None}, r"Missing key\(s\) in state_dict: .*scales"),
    ({"weight": torch.zeros(1)}, "Unexpected key"),
]


@pytest.mark.parametrize(("change", "message"), STATES, ids=[message[:20] for _, message in STATES])
def test_a_state_that_does_not_fit_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    """With the words of lowbit in torch's own error; where a tensor is wrong, none of the layer's is taken."""
    model = torch.nn.ModuleDict({"deep": torch.nn.ModuleDict({"a": layer_of(1)})})
    before = model["deep"]["a"](X)
    state = layer_of(2).state_dict() | change
    state = {"deep.a." + name: tensor for name, tensor in state.items() if tensor is not None}
    with pytest.raises(RuntimeError, match=message) as caught:
        model.load_state_dict(state)
    assert "deep.a" in str(caught.value)
    if " key" not in message:
        assert torch.equal(model["deep"]["a"](X), before)


@pytest.mark.parametrize("copied", [False, True])
def test_copies_and_pickles_compute_the_same(copied: bool) -> None:
    """deepcopy, pickle and torch.save of a whole module that has been called; a copy shares nothing."""
    layer = layer_of(1)
    wanted = layer(X).clone()
    if copied:
        other = copy.deepcopy(layer)
    else:
        file = io.BytesIO()
        torch.save(pickle.loads(pickle.dumps(layer)), file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    layer.scales *= 2
    assert torch.equal(other(X), wanted) and not torch.equal(layer(X), wanted)
    assert repr(other) == repr(layer)


# Moved.


def test_another_dtype_leaves_the_layer_as_it_is() -> None:
    """half, bfloat16 and double change the model around it, and not one bit of it."""
    layer = layer_of(cast=True)
    wanted = layer(X)
    for moved in (layer.half(), layer.to(torch.bfloat16), layer.double(), layer.float(), layer.to("cpu")):
        assert moved is layer and torch.equal(layer(X), wanted)
    assert (layer.words.dtype, layer.scales.dtype) == (torch.int32, torch.float32)


def test_another_device_is_refused_in_words() -> None:
    """torch's fake tensors stand for a device that this machine need not have."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(ArgumentError, match="device of QuantLinear is cuda"),
    ):
        torch.nn.ModuleList([layer_of()]).to("cuda:0")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(ArgumentError, match="device of x is cuda"):
        layer_of()(mode.from_tensor(X).to("cuda:0"))


def test_a_layer_on_meta_waits_for_its_numbers() -> None:
    """Shapes only; with x from elsewhere it refuses instead of making numbers up; assigning gives it its own."""
    with torch.device("meta"):
        layer = empty()
    assert layer(X.to("meta")).shape == (3, COLUMNS)
    with pytest.raises(ArgumentError, match="device of words is meta; allowed: cpu, the device of x"):
        layer(X)
    with pytest.raises(ArgumentError, match="device of words is meta"):
        layer.matrix()
    layer.load_state_dict(layer_of(1).state_dict(), assign=True)
    assert torch.equal(layer(X), layer_of(1)(X))
    moved = layer_of(1).to("meta").to_empty(device="cpu")
    moved.load_state_dict(layer_of(2).state_dict())
    assert torch.equal(moved(X), layer_of(2)(X))


# A whole model.


class Block(torch.nn.Module):
    """Attention and a gated feed-forward part, as in a Llama."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = torch.nn.Linear(width, hidden), torch.nn.Linear(width, hidden)
        self.down = torch.nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part(self.norm_1(x)).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)]
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        inner = self.norm_2(x)
        return x + self.down(torch.nn.functional.silu(self.gate(inner)) * self.up(inner))


class Small(torch.nn.Module):
    """Two blocks, an embedding, and a head that is the embedding's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 64)
        self.layers = torch.nn.ModuleList([Block(64, 160), Block(64, 160)])
        self.head = torch.nn.Linear(64, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TOKENS = torch.arange(12).reshape(2, 6)


@pytest.mark.parametrize("name", ["numpy", "cppyy"])
def test_a_replaced_model_keeps_to_the_bound_layer_by_layer(name: str) -> None:
    """Each layer's result, for what it met in the model, is within the derived bound of the float64 reference."""
    if not find(name).availability().usable:
        pytest.skip(f"backend {name} cannot run here")
    model = Small().eval()
    report = replace_linears(model, "layers.*", bits=4, group_size=32, backend=name)
    assert len(report.replaced) == 14 and not report.skipped and type(model.head) is torch.nn.Linear
    declared = load(name).capabilities().operations["linear.qgemm"].arithmetic
    assert declared is not None
    met: list[tuple[QuantLinear, torch.Tensor, torch.Tensor]] = []
    for part in filter(lambda part: isinstance(part, QuantLinear), model.modules()):
        part.register_forward_hook(lambda layer, given, y: met.append((layer, given[0], y)))
    with torch.no_grad():
        model(TOKENS)
    assert len(met) == 14
    for layer, x, y in met:
        matrix, row = layer.matrix(), x.flatten(0, -2)[5].numpy()
        exact = linear.qgemv(row, matrix)
        bias = np.zeros(len(exact)) if layer.bias is None else layer.bias.numpy().astype(np.float64)
        limit = linear_bound(row, matrix, declared, exact).limit
        limit = limit + 2.0**-24 * (np.abs(exact + bias) + limit)  # the one addition of the bias
        assert (np.abs(y.flatten(0, -2)[5].numpy() - (exact + bias)) <= limit).all()


def test_a_replaced_model_is_compiled_saved_and_restored() -> None:
    """Without a graph break; and the state dict of the whole goes into a model that was built on meta."""
    model = Small().eval()
    replace_linears(model, ["layers.0.*", "head"], group_size=None, backend="numpy")
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = model(TOKENS)
        assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(TOKENS), wanted)
        with torch.device("meta"):
            other = Small().eval()
        replace_linears(other, ["layers.0.*", "head"], group_size=None, backend="numpy")
        other.load_state_dict(model.state_dict(), assign=True)
        assert torch.equal(other(TOKENS), wanted)


def test_what_is_not_replaced_is_told_with_the_reason() -> None:
    """Sizes, classes, hooks, numbers, dtypes, and modules that read the weights of their layers."""
    model = torch.nn.ModuleDict(
        {
            "fits": torch.nn.Linear(64, 8),
            "odd": torch.nn.Linear(60, 8),
            "short": torch.nn.Linear(16, 8),
            "attention": torch.nn.MultiheadAttention(64, 2),
            "encoder": torch.nn.TransformerEncoderLayer(64, 2, 64),
            "hooked": torch.nn.Linear(64, 8),
            "infinite": torch.nn.Linear(64, 8),
            "wide": torch.nn.Linear(64, 8).double(),
        }
    ).eval()
    model["hooked"].register_forward_hook(lambda *_: None)
    model["infinite"].weight.data[3, 5] = torch.inf
    report = replace_linears(model, group_size=32, backend="reference")
    assert report.replaced == ["fits"]
    reasons = {name: reason.partition(";")[0] for name, reason in report.skipped.items()}
    other = "a NonDynamicallyQuantizableLinear, which may compute something other than torch.nn.Linear does"
    reads = "TransformerEncoderLayer reads the weights of its layers itself"
    assert reasons == {
        "odd": "in_features is 60",
        "short": "group_size is 32",
        "attention.out_proj": other,
        "encoder.self_attn.out_proj": other,
        "encoder.linear1": reads,
        "encoder.linear2": reads,
        "hooked": "it has hooks, which would be lost",
        "infinite": "weights[5, 3] is inf",
        "wide": "weights in torch.float64, not float32, float16 or bfloat16",
    }
    with torch.no_grad():
        model["encoder"](torch.randn(2, 3, 64))  # works as before


def test_a_layer_in_several_places_is_quantised_once() -> None:
    """And stays one layer."""
    shared = torch.nn.Linear(64, 64)
    model = torch.nn.Sequential(shared, torch.nn.ReLU(), shared)
    assert replace_linears(model, group_size=64, backend="reference") == Replacement(["0", "2"], {})
    assert isinstance(model[0], QuantLinear) and model[0] is model[2]


def test_nothing_is_replaced_where_the_request_is_wrong() -> None:
    """A name that fits nothing, an option, a backend that lacks the product, or one that cannot run."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Linear(8, 8))
    with pytest.raises(ArgumentError, match=r"names is 'layers\.\*'; allowed: the name of a Linear of the model: 0, 1"):
        replace_linears(model, ["0", "layers.*"], backend="reference")
    with pytest.raises(ArgumentError, match="bits is 7"):
        replace_linears(model, bits=7, backend="reference")
    with pytest.raises(NotDeclaredError, match=r"backend turns does not declare linear\.qgemm_bfp"):
        replace_linears(model, group_size=8, backend="torch_backends:Turns", contract="integer")
    with pytest.raises(UnavailableError, match="it needs an abacus"):
        replace_linears(model, group_size=8, backend="odd_backends:Unavailable")
    with pytest.raises(ArgumentError, match="model is a Linear itself"):
        replace_linears(model[0])
    assert all(type(part) is torch.nn.Linear for part in model) and torch_backends.Turns.name == "turns"


def test_the_page_of_the_documentation_is_true() -> None:
    """Every example on it is run, in order."""
    torch._dynamo.reset()
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.failed == 0 and result.attempted > 15
