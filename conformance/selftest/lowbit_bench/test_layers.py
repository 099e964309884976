"""What `lowbit bench` measures beside products: every operation with the sizes of a model, and what it refuses."""

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from lowbit.backend.reference import ReferenceBackend
from lowbit.cli import app
from lowbit.errors import ArgumentError
from lowbit.operations import OPERATIONS
from lowbit_bench import layers
from lowbit_bench.inputs import PRODUCTS, Problem
from lowbit_bench.judging import WrongResultError
from lowbit_bench.judging_layers import check_of_other
from lowbit_bench.layers import (
    OTHERS,
    WITH_FORMAT,
    WITHOUT_TYPES,
    arguments_of,
    bytes_of,
    call_of_other,
    other_problem,
    types_of,
)
from lowbit_bench.offline import STEPS
from lowbit_bench.sizes import MODELS, Model

FORMATS = {
    "attention.attend_residual": "kivi-keys",
    "attention.attend_stored": "kivi-keys",
    "formats.dequantize": "fp8-channel",
    "formats.quantize": "q8_0",
}


TINY = Model(128, 192, 4, 2, 64, 3, experts=4)


@pytest.fixture(autouse=True)
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model has the sizes of a tiny one: what is tested does not depend on them."""
    monkeypatch.setattr(layers, "MODELS", dict.fromkeys(MODELS, TINY))


def problem_of(operation: str, activations: str = "") -> Problem:
    """A small problem."""
    model, activations = "smollm2-135m", activations or types_of(operation)[0]
    result = activations
    return other_problem(operation, model, 32, 2, FORMATS.get(operation, ""), activations, result, {})


@pytest.mark.parametrize("operation", OTHERS)
def test_an_operation_has_the_sizes_of_a_model(operation: str) -> None:
    """The reference takes the arguments, every size is in the heading, and a problem survives JSON."""
    problem = problem_of(operation)
    call = call_of_other(ReferenceBackend(), problem, arguments_of(problem))
    first, second = call(), call()
    if (check := check_of_other(problem, arguments_of(problem))) is not None:
        check(ReferenceBackend(), first)
    assert bytes_of(first) == bytes_of(second) and (
        bytes_of(first) > 0 or operation.startswith(("routing.top_k", "offload."))
    )
    assert all(f"{name} {value}" in problem.id for name, value in problem.sizes)
    assert Problem.read(json.loads(json.dumps(dataclasses.asdict(problem)))) == problem
    known = dataclasses.asdict(TINY) | {"context": 32, "batch": 2}
    assert dict(problem.sizes).items() <= known.items()


@pytest.mark.parametrize("operation", [name for name in OTHERS if not name.startswith(WITHOUT_TYPES)])
def test_types_of_16_bits(operation: str) -> None:
    """The arrays of the arguments have the type that is asked for."""
    arguments = arguments_of(problem_of(operation, "bfloat16"))
    floats = [each.dtype.name for each in arguments if isinstance(each, np.ndarray) and each.dtype.kind not in "iu"]
    assert set(floats) <= {"bfloat16"}


@pytest.mark.parametrize("operation", ["attention.softmax", "packing.pack", "formats.quantize", "bfp.cast"])
def test_a_wrong_result_is_refused(operation: str) -> None:
    """Of a bounded operation, and of exact ones whose results are arrays or hold arrays."""
    problem = problem_of(operation)
    check = check_of_other(problem, arguments_of(problem))
    right = call_of_other(ReferenceBackend(), problem, arguments_of(problem))()
    assert check is not None
    array = right.mantissas if operation == "bfp.cast" else right.tensors[0] if operation.startswith("f") else right
    array[-1, -1] += array.dtype.type(1)
    with pytest.raises(WrongResultError, match=r"wrong result: .*1 of \d+"):
        check(ReferenceBackend(), right)
    with pytest.raises(WrongResultError, match="wrong result: the result "):
        check(ReferenceBackend(), None)


def test_products_and_these_are_all_operations() -> None:
    """Nothing that the specification has cannot be timed; what keeps a state has steps."""
    assert {*PRODUCTS, *OTHERS} == {*OPERATIONS}
    assert {name for name, operation in OPERATIONS.items() if operation.stateful} == {*STEPS}
    assert {*WITH_FORMAT} <= {*OTHERS}


@pytest.mark.parametrize(
    ("operation", "changed", "said"),
    [
        ("packing.unpack", {"activations": "float16"}, "--activations is 'float16'; allowed: float32"),
        ("blocks.rms_norm", {"format": "q8_0"}, "--format is not possible: blocks.rms_norm has no format"),
        ("blocks.rms_norm", {"model": "tiny"}, "--preset is 'tiny'; allowed: "),
        ("formats.quantize", {"format": "q4_k"}, "--format is 'q4_k'; allowed: "),
        ("formats.dequantize", {"format": ""}, "--format is ''; allowed: "),
        ("attention.attend_stored", {"format": "q4_k", "model": "smollm2-135m"}, "256"),
    ],
)
def test_wrong_arguments_are_refused(operation: str, changed: dict[str, str], said: str) -> None:
    """By the name of the option, before anything is drawn."""
    given = {"model": "llama-7b", "format": "", "activations": "float32", "result": "float32"} | changed
    with pytest.raises(ArgumentError) as caught:
        other_problem(operation, given["model"], 32, 1, given["format"], given["activations"], given["result"], {})
    assert said in str(caught.value)


def test_the_command_takes_contexts_and_no_shapes() -> None:
    """`--context` belongs to attention, `--shape` to products."""
    for words, said in (
        (
            ["--op", "attention.attend", "--shape", "64x64"],
            "--shape is not possible: attention.attend has the sizes of a model",
        ),
        (["--context", "64"], "--context is not possible: "),
        (["--op", "attention.attend", "--context", "0"], "--context is 0"),
    ):
        done = CliRunner().invoke(app, ["bench", "numpy", *words])
        assert isinstance(done.exception, ArgumentError) and said in str(done.exception)


def test_a_layer_is_timed() -> None:
    """Attention over two lengths, by two backends, with the bytes of all its arrays."""
    words = ["bench", "numpy", "reference", "--op", "attention.softmax", "--preset", "smollm2-135m"]
    more = ["--context", "16", "--context", "32", "--rounds", "1", "--verdict", "none", "--json", "--threads", "1"]
    done = CliRunner().invoke(app, [*words, *more])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert [dict(each["problem"]["sizes"])["context"] for each in answer["problems"]] == [16, 32]
    for each, context in zip(answer["problems"], (16, 32), strict=True):
        assert {row["backend"] for row in each["rows"]} == {"numpy", "reference"}
        assert all(row["bytes"] >= 2 * 4 * TINY.heads * context for row in each["rows"])
