"""Models in directories, quantised or of floats: kernels multiply by the bytes of their matrices as they are."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_families import converted
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import DENSE, TYPES, narrowed, published, widened, write

from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.formats.checkpoint.tensors import WHOLE
from lowbit.formats.gguf.reader import open_gguf, read_llama
from lowbit.model.matrices import Matrix
from lowbit.runtime import Options, linears, load
from lowbit.runtime.linears import CONTRACTS, Contract
from lowbit_cppyy.stored.formats import PARTS

DATA = Path(__file__).parents[1] / "lowbit" / "formats" / "checkpoint" / "quantised"
FLOATS = DATA.parent / "data"
"""Directories of models that are not quantised."""
MODELS = sorted(path.parent.name for path in DATA.glob("*/expected.npz"))
AS_OPERATIONS = Options(step="operations")
LIMIT = 1e-5
"""Of the largest logit: both sides multiply in float32."""


def test_kernels_multiply_by_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every model whose formats are declared: each method that has kernels, at each of its widths."""

    def refused(matrix: Matrix) -> None:
        raise AssertionError(f"{matrix} became floats")

    monkeypatch.setattr(linears, "to_float", refused)
    met = set[str]()
    for name in MODELS:
        checkpoint = open_checkpoint(DATA / name)
        formats = {packed.format for packed in checkpoint.packed.values()}
        if not formats <= PARTS.keys():
            continue
        met |= formats
        with np.load(DATA / name / "expected.npz") as told, load(checkpoint, "cppyy", AS_OPERATIONS) as model:
            taken = model.account().fields["matrices"]
            found, expected = model.logits([int(token) for token in told["tokens"]]), told["logits"]
        assert taken["by_backend"] >= len(checkpoint.packed) and set(taken["by_numpy_float32"]) <= {"stored as floats"}
        largest = float(np.abs(expected).max())
        np.testing.assert_allclose(found, expected[-1], rtol=0, atol=LIMIT * largest, err_msg=name)
    compressed = {"ct-pack", "ct-pack-f16", "ct-pack-asym", "ct-pack-asym-f16", "ct-int", "ct-int-f16", "mxfp4"}
    assert met == {"gptq-v1", "gptq-v2", "awq-gemm", "awq-gemv", "hqq-axis1", *compressed}


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
def test_floats_stay_so(kind: str, contract: Contract, tmp_path: Path) -> None:
    """Every matrix of a directory of such floats, the head included, in one compiled step and one by one."""
    made = published(DENSE | {"tie_word_embeddings": True})
    for name, weights in made.tensors.items():
        made.types[name] = kind
        made.tensors[name] = widened(narrowed(weights, kind), kind).reshape(weights.shape)
    folder, tokens = write(tmp_path / "m", made), [1, 40, 7, 200, 3]
    matrices = [each for each in made.tensors.values() if each.ndim == 2]
    with load(folder, "cppyy", Options(contract=contract)) as model:
        account, compiled = model.account().fields, model.logits(tokens)
    assert account["matrices"] == {"by_backend": len(matrices), "by_numpy_float32": {}}
    size = account["weight_bytes"]["blocks"] + account["weight_bytes"]["head"]
    assert size == TYPES[kind] * sum(each.size for each in matrices)
    with load(folder, "cppyy", Options(contract=contract, step="operations")) as model:
        np.testing.assert_array_equal(model.logits(tokens), compiled)
    with load(folder, "reference") as model:
        expected = model.logits(tokens)
    limit = LIMIT if contract == "float32" else 0.05  # activations of 8 bits lose about a hundredth of a logit
    np.testing.assert_allclose(compiled, expected, rtol=0, atol=limit * float(np.abs(expected).max()))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("kind", ["directory", "file"])
def test_stacked_experts_of_floats_stay_so(kind: str, dtype: str, tmp_path: Path) -> None:
    """All experts of a layer lie in two tensors of a directory and in three of a GGUF file; each is multiplied by as it
    is stored, in one compiled step."""
    folder, file = shutil.copytree(FLOATS / "gpt-oss", tmp_path / "m"), tmp_path / "m.gguf"
    tensors = load_file(folder / WHOLE)
    save_file({name: tensor.astype(dtype) for name, tensor in tensors.items()}, folder / WHOLE)
    config = json.loads((folder / "config.json").read_text())
    layers, experts = config["num_hidden_layers"], config["num_local_experts"]
    source = open_checkpoint(folder) if kind == "directory" else read_llama(open_gguf(converted(folder, file)))
    source = replace(source, config=replace(source.config, activation_limit=1.5))  # a file does not say it
    with np.load(folder / "expected.npz") as told, load(source, "cppyy") as model:
        account, found = model.account().fields, model.logits([int(token) for token in told["tokens"]])
        expected = told["logits"]
    assert account["matrices"] == {"by_backend": layers * (4 + 3 * experts) + 1, "by_numpy_float32": {}}
    assert account["step"] == "compiled"
    sizes = {name: each.size for name, each in tensors.items()}
    weights = sum(size for name, size in sizes.items() if name.endswith(("_proj.weight", "_proj", "lm_head.weight")))
    routers = sum(size for name, size in sizes.items() if name.endswith("router.weight"))  # in float32
    size = account["weight_bytes"]["blocks"] + account["weight_bytes"]["head"]
    assert size == np.dtype(dtype).itemsize * weights + 4 * routers
    np.testing.assert_allclose(found, expected[-1], rtol=0, atol=LIMIT * float(np.abs(expected).max()))


@pytest.mark.parametrize("name", ["fp8-block", "hqq-3", "bitsandbytes-nf4"])
def test_other_formats_are_left_to_numpy(name: str) -> None:
    """And the account says how many matrices, and why."""
    checkpoint = open_checkpoint(DATA / name)
    with np.load(DATA / name / "expected.npz") as told, load(checkpoint, "cppyy", AS_OPERATIONS) as model:
        reasons = model.account().fields["matrices"]["by_numpy_float32"]
        found, expected = model.logits([int(token) for token in told["tokens"]]), told["logits"]
    undeclared = [count for reason, count in reasons.items() if "does not declare" in reason]
    assert sum(undeclared) == len(checkpoint.packed)
    np.testing.assert_allclose(found, expected[-1], rtol=0, atol=LIMIT * float(np.abs(expected).max()))
