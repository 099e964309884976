"""``lowbit inspect``: what it says of a file is what the file holds, and what a backend then does."""

import json
import shutil
from collections import Counter
from math import prod
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
import tiny_gguf
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_families import converted
from inspecting import answer, rows, run
from typer.testing import CliRunner, Result

from lowbit.cli import app
from lowbit.errors import ArgumentError, FormatError
from lowbit.formats.checkpoint.reader import open_checkpoint
from lowbit.formats.gguf.reader import check_model, open_gguf
from lowbit.runtime import Options, load
from lowbit.runtime.linears import CONTRACTS, Contract

FLOATS = Path(__file__).parents[1] / "formats" / "checkpoint" / "data"
"""Directories of models that are not quantised."""
QUANTISED = FLOATS.parent / "quantised"


# **Models that lowbit runs.**


def test_a_gguf_file(tmp_path: Path) -> None:
    """Shape, tokenizer, and bytes by part and type: with blocks of 32 weights, 20 bytes in Q4_1 and 34 in Q8_0."""
    found = answer(tiny_gguf.write(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": "{{ messages }}"}))
    assert (found["kind"], found["architecture"], found["runs"], found["reason"]) == ("GGUF file", "llama", True, None)
    assert found["shape"] == {
        "layers": 2,
        "hidden": 64,
        "feed_forward": 96,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "vocabulary": 265,
        "context": 64,
        "experts": None,
        "top_k": None,
    }
    assert found["tokenizer"] == {"kind": "gpt2 (smollm)", "chat_template": True}
    attention, feed_forward = 2 * (2 * 64 * 64 + 2 * 32 * 64), 2 * 3 * 96 * 64
    assert rows(found) == {
        ("embedding", "Q8_0"): (1, 265 * 64, 265 * 64 // 32 * 34),
        ("attention", "Q4_1"): (8, attention, attention // 32 * 20),
        ("feed-forward", "Q4_1"): (6, feed_forward, feed_forward // 32 * 20),
        ("norms", "F32"): (5, 5 * 64, 5 * 64 * 4),
    }
    assert found["parameters"] == 265 * 64 + attention + feed_forward + 5 * 64
    assert found["bits_per_weight"] == 8 * found["bytes"] / found["parameters"]
    assert (found["quantization"], found["next_step"]) == (None, None)
    assert found["backends"]["numpy"]["advice"] == "Nothing to do: every matrix is multiplied as it is stored."


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "F16", "F32"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("backend", ["numpy", "gguf", pytest.param("cppyy", marks=pytest.mark.toolchain)])
def test_what_is_native_is_what_runs(kind: str, tied: bool, backend: str, tmp_path: Path) -> None:
    """The matrices that the header calls native are those that the backend takes when the model is loaded."""
    model = tiny_gguf.published(kind=GGMLQuantizationType[kind], tied=tied)
    path = tiny_gguf.write(tmp_path / "m.gguf", model)
    (of_backend,) = answer(path, "--backend", backend)["backends"].values()
    taken = sum(each["float32"]["native"] for each in of_backend["matrices"])
    with load(path, backend) as loaded:
        ran = loaded.account().fields["matrices"]
    assert taken == ran["by_backend"]
    others = [each["float32"]["lacking"] for each in of_backend["matrices"]]
    assert sum(sum(each.values()) for each in others) == sum(ran["by_numpy_float32"].values())
    assert ("stored as floats" in ran["by_numpy_float32"]) == any("stored as floats" in each for each in others)


@pytest.mark.toolchain
@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("name", ["gpt-oss", "gpt-oss-mxfp4", "phi3", "qwen3-moe", "qwen3", "mistral", "smollm3"])
def test_floats_that_are_native_are_what_runs(name: str, contract: Contract) -> None:
    """Stacked experts and separate ones, matrices that share a tensor, a head tied to the embedding, and rows that are
    no whole blocks of 8 bits."""
    (found,) = answer(FLOATS / name, "--backend", "cppyy")["backends"].values()
    with load(open_checkpoint(FLOATS / name), "cppyy", Options(contract=contract)) as loaded:
        ran = loaded.account().fields
    assert sum(each[contract]["native"] for each in found["matrices"]) == ran["matrices"]["by_backend"]
    lacking = sum((Counter(each[contract]["lacking"]) for each in found["matrices"]), Counter[str]())
    assert dict(lacking) == ran["matrices"]["by_numpy_float32"]
    assert (ran["step"] == "compiled") == (not lacking)


@pytest.mark.parametrize("name", ["gptq-v1-8-phi3", "bitsandbytes-nf4-phi3"])
def test_quantised_matrices_that_share_a_tensor_are_counted_apart(name: str) -> None:
    """The seven products of a layer of Phi-3 lie in four tensors, and its queries have more columns than its keys."""
    found = answer(QUANTISED / name)
    with load(open_checkpoint(QUANTISED / name), "numpy") as loaded:
        ran = loaded.account().fields["matrices"]
    numbers = [each["matrices"] for each in found["backends"]["numpy"]["matrices"]]
    assert sum(numbers) == ran["by_backend"] + sum(ran["by_numpy_float32"].values()) == 7 + 1
    assert sum(found["quantization"]["formats"].values()) == 7


@pytest.mark.parametrize("name", ["phi3", "smollm3"])
def test_a_file_whose_matrices_share_a_tensor(name: str, tmp_path: Path) -> None:
    """``attn_qkv`` and ``ffn_up`` of Phi-3 are five matrices; ``ffn_up`` of other models is one."""
    path = converted(FLOATS / name, tmp_path / "m.gguf")
    with load(open_checkpoint(FLOATS / name), "numpy") as loaded:
        ran = loaded.account().fields["matrices"]
    numbers = [each["matrices"] for each in answer(path)["backends"]["numpy"]["matrices"]]
    assert sum(numbers) == ran["by_backend"] + sum(ran["by_numpy_float32"].values())


@pytest.mark.parametrize("claimed", [-1, 0, 1000])
def test_heads_that_a_shared_tensor_has_no_columns_for(claimed: int, tmp_path: Path) -> None:
    """The model is refused in a sentence, and its matrices are counted all the same."""
    folder = shutil.copytree(FLOATS / "phi3", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | {"num_key_value_heads": claimed}
    (folder / "config.json").write_text(json.dumps(config))
    found = answer(folder)
    assert not found["runs"] and "heads" in found["reason"]
    right = answer(FLOATS / "phi3")["backends"]["numpy"]["matrices"]
    numbers = [each["matrices"] for each in found["backends"]["numpy"]["matrices"]]
    assert sum(numbers) == sum(each["matrices"] for each in right)


def test_advice(tmp_path: Path) -> None:
    """A backend without a product for a type is told of one that has it; for floats there is quantisation."""
    stored = answer(tiny_gguf.write(tmp_path / "m.gguf"), "--backend", "gguf", "--backend", "numpy")["backends"]
    assert stored["gguf"]["advice"] == "Use --backend numpy, which multiplies by Q8_0, Q4_1 as stored."
    assert stored["gguf"]["matrices"][0]["integer"]["lacking"] == {"linear.qgemm_bfp is not declared": 1}
    floats = answer(tiny_checkpoint.write(tmp_path / "tiny"))["backends"]["numpy"]
    assert {each["type"] for each in floats["matrices"]} == {"F16", "BF16", "F32"}
    assert floats["advice"].startswith("Use --bits 4 --group-size 64: numpy multiplies natively")


@pytest.mark.parametrize("shards", [1, 3])
def test_a_directory(shards: int, tmp_path: Path) -> None:
    """One file or several: every tensor counts once, in its own type, and experts are not the router."""
    model = tiny_checkpoint.published()
    found = answer(tiny_checkpoint.write(tmp_path / "tiny", model, shards))
    assert (found["kind"], found["architecture"]) == ("checkpoint directory", "MixtralForCausalLM")
    assert found["runs"] and found["tokenizer"] == {"kind": "BPE", "chat_template": False}
    assert (found["shape"]["experts"], found["shape"]["top_k"], found["shape"]["vocabulary"]) == (4, 2, 260)
    shapes = tiny_checkpoint.shapes(model.config)
    assert found["parameters"] == sum(map(prod, shapes.values()))
    assert found["bytes"] == sum(
        prod(shape) * tiny_checkpoint.TYPES[model.types[name]] for name, shape in shapes.items()
    )
    assert found["file_bytes"] == sum(file.stat().st_size for file in (tmp_path / "tiny").glob("*.safetensors"))
    counts: dict[str, int] = {}
    for (part, _), (tensors, _, _) in rows(found).items():
        counts[part] = counts.get(part, 0) + tensors
    assert counts == {"embedding": 1, "attention": 8, "experts": 24, "router": 2, "norms": 5, "head": 1}


@pytest.mark.parametrize("columns", ["80", "200"])
def test_lines_of_eighty_columns(columns: str, tmp_path: Path) -> None:
    """However wide the terminal is, no line is longer, and the numbers are those of the JSON answer."""
    path = tiny_gguf.write(tmp_path / "m.gguf")
    shown = CliRunner().invoke(app, ["inspect", str(path)], env={"COLUMNS": columns})
    assert shown.exit_code == 0 and max(map(len, shown.stdout.splitlines())) <= 80
    total = next(line for line in shown.stdout.splitlines() if line.startswith("total"))
    found = answer(path)
    assert total.split()[1:] == [
        "20",
        f"{found['parameters']:,}",
        f"{found['bytes']:,}",
        f"{found['bits_per_weight']:.2f}",
    ]
    assert "architecture llama; lowbit runs it" in shown.stdout
    assert "numpy                Q8_0                   1  native          native" in shown.stdout


# **Models that lowbit does not run.**


def test_another_architecture(tmp_path: Path) -> None:
    """It is described like any other; the reason is the reader's own sentence."""
    path = tiny_gguf.write(tmp_path / "m.gguf", architecture="stablelm")
    found = answer(path)
    with pytest.raises(FormatError) as refused:
        _ = open_gguf(path).config
    assert (found["runs"], found["reason"]) == (False, str(refused.value))
    assert (found["architecture"], found["shape"]["layers"], found["shape"]["head_dim"]) == ("stablelm", 2, 16)
    folder = tiny_checkpoint.write(tmp_path / "d", tiny_checkpoint.Published(tiny_checkpoint.DENSE, {}))
    config = tiny_checkpoint.DENSE | {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}
    tiny_checkpoint.write(folder, tiny_checkpoint.published(tiny_checkpoint.DENSE))
    (folder / "config.json").write_text(json.dumps(config))
    found = answer(folder)
    with pytest.raises(FormatError) as refused:
        open_checkpoint(folder)
    assert (found["reason"], found["architecture"]) == (str(refused.value), "GPTNeoXForCausalLM")
    assert found["backends"]["numpy"]["advice"] == "No matrix is quantised."


@pytest.mark.parametrize(("kind", "step"), [("Q5_0", "--format q5_0"), ("Q8_0", "--format q8_0"), ("F16", None)])
def test_the_next_step_of_another_architecture(kind: str, step: str | None, tmp_path: Path) -> None:
    """Kernels can be tested for the formats of its matrices."""
    types = GGMLQuantizationType[kind], GGMLQuantizationType[kind]
    path = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.published(0, tiny_gguf.CONFIG, *types), architecture="bloom")
    found = answer(path)
    assert found["next_step"] is None if step is None else found["next_step"].endswith(step)
    told = "No matrix is quantised." if step is None else "It has kernels for every quantised matrix."
    assert found["backends"]["numpy"]["advice"] == told


def test_a_file_that_lacks_tensors(tmp_path: Path) -> None:
    """Some of them are named and the others counted, in the sentence by which the model is refused."""
    model = tiny_gguf.published()
    for name in [name for name in model.tensors if name.startswith("blk.1.")]:
        del model.tensors[name]
    path = tiny_gguf.write(tmp_path / "m.gguf", model)
    found = answer(path)
    with pytest.raises(FormatError) as refused:
        check_model(open_gguf(path))
    assert (found["runs"], found["reason"]) == (False, str(refused.value))
    assert found["reason"] == (
        "m.gguf: number of missing tensors is 9 "
        "('blk.1.attn_q.weight', 'blk.1.attn_k.weight', 'blk.1.attn_v.weight', ...); allowed: 0"
    )
    assert "lowbit does not run it" in run(path).stdout


def test_a_part_of_a_split_model(tmp_path: Path) -> None:
    """Its reason and its next step name the tool that joins the parts, for the first part and for those after it."""
    model = tiny_gguf.published()
    first = tiny_gguf.write(tmp_path / "m-00001-of-00002.gguf", model, metadata={"split.count": 2})
    writer = GGUFWriter(tmp_path / "m-00002-of-00002.gguf", "")  # of which only the first part has the metadata
    writer.kv_data = [{}]
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", 2)
    writer.add_tensor("blk.1.attn_norm.weight", model.tensors["blk.1.attn_norm"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for path in (first, tmp_path / "m-00002-of-00002.gguf"):
        found = answer(path)
        assert not found["runs"]
        assert f"{path.name}: split.count is 2; allowed: 1, a model in one file" in found["reason"]
        assert found["next_step"] == "Join the parts: llama-gguf-split --merge FIRST_PART NEW_FILE."
        assert run(path).stdout.count("llama-gguf-split --merge") == 2  # no line ends inside it
    whole = tiny_gguf.write(tmp_path / "m.gguf", model, metadata={"split.count": 0})  # as the tool writes it
    assert answer(whole)["runs"]


@pytest.mark.parametrize("folder", [FLOATS / "mistral", QUANTISED / "awq-gemm"])
def test_a_directory_without_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    """Nothing else is missing, so the next step is to put the file there; a wrong one is another problem."""
    found = answer(folder)
    assert not found["runs"] and found["tokenizer"] is None and "tokenizer.json" in found["reason"]
    assert found["next_step"] == (
        "tokenizer.json is missing. Put that of the model from which these weights were made into the directory."
    )
    wrong = shutil.copytree(folder, tmp_path / "m")
    (wrong / "tokenizer.json").write_text("{}")
    assert "is missing" not in (answer(wrong)["next_step"] or "")


def test_a_backend_that_cannot_run(tmp_path: Path) -> None:
    """The JSON answer says why; people are told that it is left out."""
    path = tiny_gguf.write(tmp_path / "m.gguf")
    (of_backend,) = answer(path, "--backend", "absent:Backend")["backends"].values()
    assert not of_backend["usable"] and "there is no module 'absent'" in of_backend["reason"]
    assert "Backends that cannot run here are left out" in " ".join(
        run(path, "--backend", "absent:Backend").stdout.split()
    )


def test_a_single_safetensors_file(tmp_path: Path) -> None:
    """Its tensors are counted; which model it is, its directory says."""
    folder = tiny_checkpoint.write(tmp_path / "tiny", shards=1)
    found, whole = answer(folder / "model.safetensors"), answer(folder)
    assert (found["kind"], found["architecture"], found["runs"]) == ("safetensors file", None, False)
    assert found["parts"] == whole["parts"] and "config.json" in found["reason"]


# **Damaged files.**


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-1])
    return path


def test_damaged_files_are_errors(tmp_path: Path) -> None:
    """One sentence of the reader, which the command line prints with status 2."""
    folder = tiny_checkpoint.write(tmp_path / "tiny", shards=1)
    with pytest.raises(FormatError, match="offset of tensor"):
        _raised(run(cut(tiny_gguf.write(tmp_path / "m.gguf"))))
    cut(folder / "model.safetensors")
    for path in (folder, folder / "model.safetensors"):
        with pytest.raises(FormatError, match=r"model\.safetensors: data_offsets of tensor"):
            _raised(run(path))
    (folder / "config.json").write_text("{")
    with pytest.raises(FormatError, match=r"config\.json: content"):
        _raised(run(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ArgumentError, match=r"a directory that holds config\.json"):
        _raised(run(folder))
    with pytest.raises(ArgumentError, match="backend is 'abacus'"):
        _raised(run(folder, "--backend", "abacus"))


def _raised(result: Result) -> None:
    assert result.exception is not None and not result.stdout
    raise result.exception


def test_a_control_character_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    """The names of an architecture and of a method come from a file."""
    config = {"quant_method": "\x1b[31m\nlowbit: fine"}
    folder = tmp_path / "m"
    folder.mkdir()
    tensors = {"a.q_proj.qweight": ("I32", [8, 16])}
    (folder / "model.safetensors").write_bytes(tiny_checkpoint.crafted(*tiny_checkpoint.empty(tensors)))
    written = tiny_checkpoint.DENSE | {"quantization_config": config, "architectures": ["a\x07b"]}
    (folder / "config.json").write_text(json.dumps(written))
    shown = run(folder).stdout
    assert "\x1b" not in shown and "\x07" not in shown and "\nlowbit: fine" not in shown
    assert r"a\x07b" in shown and r"\x1b[31m lowbit: fine" in shown


def test_no_weights_are_read(tmp_path: Path) -> None:
    """A file with a hole of a terabyte for its weights is described."""
    path = tmp_path / "model.safetensors"
    size = 2**40
    header = {"model.embed_tokens.weight": {"dtype": "F16", "shape": [size // 2], "data_offsets": [0, size]}}
    path.write_bytes(tiny_checkpoint.crafted(header))
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size + size)
    found = answer(path)
    assert (found["parameters"], found["bytes"]) == (size // 2, size)
    assert np.isclose(found["bits_per_weight"], 16)
