"""The outcomes that a search keeps on disk, and their use by the backend."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lowbit_cppyy
from lowbit.contract.rounding import Arithmetic
from lowbit.errors import UnavailableError
from lowbit.linear.bounds import linear_bound
from lowbit.linear.linear import qgemv
from lowbit.quantization.affine import QuantizedMatrix, quantize
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.backend import roundings
from lowbit_cppyy.cli.tune import layout_of
from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.recipe import Recipe
from lowbit_cppyy.tuning import choices, outcomes
from lowbit_cppyy.tuning.choices import default_recipe, layout_for, recipe_for
from lowbit_cppyy.tuning.outcomes import Key, OutcomeWarning

AVX2, AVX512 = TABLES["avx2"], TABLES["avx512"]


def layout(bits: int = 4, group: int = 128, shape: str = "4096x11008") -> PanelLayout:
    return layout_of(bits, group, shape, "float16", "zero_point")


def a_recipe(**changes: Any) -> Recipe:
    return replace(default_recipe("vector", layout(), AVX2), ahead=512, **changes)


EVIDENCE = {"made": "today"}


def a_key(purpose: str = "vector") -> Key:
    return Key.of(purpose, layout(), AVX2)


def test_an_outcome_is_read_back_and_used(kept: Path) -> None:
    """By the choices for a matrix of its class, not for others, and not when outcomes are off."""
    path = outcomes.write(a_key(), a_recipe(), EVIDENCE)
    assert outcomes.read(a_key()) == a_recipe()
    assert recipe_for("vector", layout(), AVX2) == a_recipe()
    assert recipe_for("vector", layout(shape="512x2048"), AVX2).ahead == 512
    for other in (layout(shape="512x2040"), layout(bits=2), layout(group=64)):
        assert recipe_for("vector", other, AVX2) == default_recipe("vector", other, AVX2)
    assert recipe_for("rows", layout(), AVX2) == default_recipe("rows", layout(), AVX2)
    assert "vector_wide: f32_u4" in outcomes.described(AVX2) and outcomes.described(AVX512) == "default"
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_environment_turns_outcomes_off_and_its_mistakes_are_named(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes.write(a_key(), a_recipe(), EVIDENCE)
    monkeypatch.setenv(outcomes.VARIABLE, "off")
    assert recipe_for("vector", layout(), AVX2).ahead != 512 and outcomes.described(AVX2) == "default"
    monkeypatch.setenv(outcomes.VARIABLE, "perhaps")
    assert "'perhaps'" in CppyyBackend().availability().reason
    with pytest.raises(UnavailableError, match="set it to on or off"):
        outcomes.tuned("vector", layout(), AVX2)


def test_what_this_process_has_read_does_not_change(kept: Path) -> None:
    """A search that ends while a program runs changes no bits of its results."""
    assert recipe_for("vector", layout(), AVX2).ahead != 512
    (kept / "tuned").mkdir(exist_ok=True)
    assert outcomes.tuned("vector", layout(), AVX2) is None
    outcomes.write(a_key(), a_recipe(), EVIDENCE)
    assert outcomes.tuned("vector", layout(), AVX2) is None
    outcomes.forget()
    assert outcomes.tuned("vector", layout(), AVX2) == a_recipe()


def test_an_outcome_of_another_generator_or_compiler_does_not_count(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ignored in silence: nothing is wrong with it."""
    outcomes.write(a_key(), a_recipe(), EVIDENCE)
    monkeypatch.setattr(outcomes, "version", lambda name: "99.0")
    assert outcomes.read(a_key()) is None
    monkeypatch.undo()


def parts(node: ast.ImportFrom) -> list[str]:
    """The files of the package that an import may refer to: the module, and each name as a module in it."""
    inner = str(node.module).split(".")[1:]
    return ["/".join(inner), *("/".join([*inner, name.name]) for name in node.names)]


def test_the_digest_covers_every_module_that_shapes_a_kernel() -> None:
    """All that `kernels`, `panels` and `activations` import of this package, at any distance."""
    folder = Path(lowbit_cppyy.__file__).parent
    pending, found = ["codegen/kernels", "layout/panels", "runtime/activations"], set[str]()
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lowbit_cppyy."):
                pending += [name for name in parts(node) if (folder / f"{name}.py").is_file()]
    assert found == set(outcomes.SHAPING)


def test_a_file_of_the_first_format_is_still_valid(kept: Path) -> None:
    """The names of its fields are part of the format: `turn`, and a `block` that is no longer written."""
    path = outcomes.write(a_key(), a_recipe(unroll=2), EVIDENCE)
    document = json.loads(path.read_text())
    assert document["recipe"]["turn"] == 2 and "unroll" not in document["recipe"]
    path.write_text(json.dumps(document | {"block": {"groups": None, "panels": 0}}))
    assert outcomes.read(a_key()) == a_recipe(unroll=2)


def spoilt(document: dict[str, Any]) -> dict[str, str]:
    """Ways in which a file can be wrong, by name."""

    def changed(**changes: Any) -> str:
        return json.dumps(document | changes)

    def recipe(**changes: Any) -> str:
        return changed(recipe=document["recipe"] | changes)

    return {
        "empty": "",
        "half": json.dumps(document)[:100],
        "deep": "[" * 100_000,
        "list": "[]",
        "foreign": '{"format": "others"}',
        "newer": changed(version=2),
        "key": changed(key=document["key"] | {"bits": 2}),
        "fields": recipe(colour="red"),
        "method": recipe(method="exotic"),
        "bits": recipe(bits=8),
        "text": recipe(rows="1"),
        "true": recipe(rows=True),
        "huge": recipe(turn=64, registers=8, rows=16),
        "long": json.dumps(document) + " " * outcomes.MOST_BYTES,
        "integer": recipe(method="dot4"),
    }


@pytest.mark.parametrize("kind", spoilt({"recipe": {}, "key": {}}))
def test_a_spoilt_file_is_ignored_with_a_warning(kept: Path, kind: str) -> None:
    """Cut off, foreign, newer, or with content that no search writes: the default is used, with one warning."""
    path = outcomes.write(a_key(), a_recipe(), EVIDENCE)
    path.write_text(spoilt(json.loads(path.read_text()))[kind])
    with pytest.warns(OutcomeWarning, match="is ignored, and default kernels are used: ") as caught:
        assert recipe_for("vector", layout(), AVX2) == default_recipe("vector", layout(), AVX2)
        assert recipe_for("vector", layout(), AVX2) == default_recipe("vector", layout(), AVX2)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)


def test_other_things_than_files_are_not_outcomes(kept: Path) -> None:
    """A folder, a pipe without a writer, and bytes that are not text."""
    path = outcomes.write(a_key(), a_recipe(), EVIDENCE)
    path.unlink()
    path.mkdir()
    assert outcomes.read(a_key()) is None
    path.rmdir()
    os.mkfifo(path)
    assert outcomes.read(a_key()) is None
    path.unlink()
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(OutcomeWarning):
        assert outcomes.read(a_key()) is None


def test_entries_that_do_not_fit_a_matrix_are_not_used(kept: Path) -> None:
    """An iteration of more units than divide its groups; a panel that the layout does not have."""
    outcomes.write(a_key(), a_recipe(unroll=8), EVIDENCE)
    odd = layout(group=72)
    assert group_of(odd) == "128" and recipe_for("vector", odd, AVX2) == default_recipe("vector", odd, AVX2)
    outcomes.write(a_key("rows"), replace(default_recipe("rows", layout(), AVX2), panel=128), EVIDENCE)
    assert recipe_for("rows", layout(), AVX2).panel == layout().panel


def group_of(matrix: PanelLayout) -> str:
    return outcomes.group_class(matrix.group_size)


def small_matrix(columns: int = 2100) -> QuantizedMatrix:
    weights = np.random.default_rng(1).standard_normal((512, columns)).astype(np.float32)
    return quantize(weights, bits=4, group_size=128, scale_dtype="float16")


def test_the_layout_of_a_matrix_is_that_of_its_outcome(kept: Path) -> None:
    """Its panel; the other purposes then take the default for that panel."""
    matrix = small_matrix()
    plain = PanelLayout.of(matrix, choices.PANEL)
    key = Key.of("vector", plain, AVX2)
    recipe = replace(default_recipe("vector", plain, AVX2), panel=128)
    outcomes.write(key, recipe, EVIDENCE)
    tuned = layout_for(matrix, AVX2)
    assert tuned.panel == 128
    assert recipe_for("vector", tuned, AVX2) == recipe and recipe_for("rows", tuned, AVX2).panel == 128


def test_a_folder_that_cannot_be_written_is_an_error_in_words(kept: Path) -> None:
    (kept / "tuned").write_text("in the way")
    with pytest.raises(UnavailableError, match=r"cannot be written: .*set LOWBIT_CACHE"):
        outcomes.write(a_key(), a_recipe(), EVIDENCE)


WRITER = """
import sys
from unittest import mock
from lowbit_cppyy.tuning import outcomes
from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.tuning.choices import default_recipe
from lowbit_cppyy.cli.tune import layout_of
from dataclasses import replace
with mock.patch.object(outcomes, "processor_key", lambda: "Abacus 3000; avx2; L1 49152"):
    layout = layout_of(4, 128, "4096x11008", "float16", "zero_point")
    key = outcomes.Key.of("vector", layout, TABLES["avx2"])
    recipe = replace(default_recipe("vector", layout, TABLES["avx2"]), ahead=int(sys.argv[1]))
    for _ in range(30):
        outcomes.write(key, recipe, {"filling": "x" * 50_000})
"""


def test_two_processes_may_write_at_once(kept: Path) -> None:
    """A reader meanwhile sees the complete outcome of one or of the other, and no other file remains."""
    first = outcomes.write(a_key(), a_recipe(), EVIDENCE)
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, ahead]) for ahead in ("512", "2048")]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        recipe = outcomes.read(a_key())
        assert recipe is not None
        seen.add(recipe.ahead)
    assert [writer.returncode for writer in writers] == [0, 0] and seen <= {512, 2048}
    assert [file.name for file in first.parent.iterdir()] == [first.name]


# The backend.


def test_the_backend_says_what_it_uses_and_computes_with_it(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuned kernel adds in another order than the default one, and both keep the declared bound."""
    matrix = small_matrix()
    monkeypatch.setenv("LOWBIT_CPPYY_ISA", "plain")
    table = TABLES["plain"]
    plain = PanelLayout.of(matrix, choices.PANEL)
    recipe = replace(default_recipe("vector", plain, table), method="shift", registers=2, chains=4, unroll=2)
    outcomes.write(Key.of("vector", plain, table), recipe, EVIDENCE)
    x = np.random.default_rng(0).standard_normal(512).astype(np.float32)
    with CppyyBackend(threads=1) as backend:
        if not backend.availability().usable:
            pytest.skip(backend.availability().reason)
        details = backend.capabilities().details
        assert details is not None and recipe.name in details["kernels"]
        tuned = backend.prepare(matrix).qgemv(x)
    monkeypatch.setenv(outcomes.VARIABLE, "off")
    with CppyyBackend(threads=1) as backend:
        details = backend.capabilities().details
        assert details is not None and details["kernels"] == "default"
        default = backend.prepare(matrix).qgemv(x)
    exact = qgemv(x, matrix)
    bound = linear_bound(x, matrix, Arithmetic("factored", "float32", roundings), exact)
    assert (np.abs(tuned - exact) <= bound.limit).all() and (np.abs(default - exact) <= bound.limit).all()
    assert (tuned != default).any()
