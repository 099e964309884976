"""The search of Algorithm 4 with a clock of its own, what it keeps on disk, and how the backend goes by it."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import lowbit_cppyy
from lowbit.affine import QuantizedMatrix, quantize
from lowbit.cli import app
from lowbit.errors import UnavailableError
from lowbit.interpreter import run
from lowbit_cppyy import CppyyBackend, choices, hardware, outcomes, tune_command
from lowbit_cppyy.candidates import Candidate, block, tiles, turns
from lowbit_cppyy.choices import default_recipe, layout_for, recipe_for
from lowbit_cppyy.isa import TABLES
from lowbit_cppyy.layout import PanelLayout
from lowbit_cppyy.microkernel import micro_kernel, x_elements
from lowbit_cppyy.outcomes import Key, Outcome, OutcomeWarning
from lowbit_cppyy.prediction import counted_registers, predict, words_of_a_group
from lowbit_cppyy.recipe import PURPOSES, SEGMENT, Recipe
from lowbit_cppyy.search import WORTH, Place, search
from lowbit_cppyy.stopwatch import Problem, part_in_cache
from lowbit_cppyy.streams import Stream
from lowbit_cppyy.tune_command import layout_of

AVX2, AVX512 = TABLES["avx2"], TABLES["avx512"]
GAMMA = 32 * 1024 * 8
Told = list[tuple[str, int, int]]


def layout(bits: int = 4, group: int = 128, shape: str = "4096x11008") -> PanelLayout:
    return layout_of(bits, group, shape, "float16", "zero_point")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, with outcomes in use, on a processor that has a name."""
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path))
    monkeypatch.setenv(outcomes.VARIABLE, "on")
    for module in (outcomes, hardware):
        monkeypatch.setattr(module, "processor_key", lambda: "Abacus 3000; avx2; L1 49152")
    outcomes.forget()
    yield tmp_path
    outcomes.forget()


class Table:
    """A stopwatch that answers from a rule."""

    def __init__(self, fastest: Recipe, blocks: float = 2.0) -> None:
        self.fastest, self.blocks = fastest, blocks
        self.asked: list[tuple[Candidate, Place]] = []

    def sample(self, candidate: Candidate, place: Place) -> float:
        self.asked.append((candidate, place))
        recipe, wrong = candidate.recipe, 1.0
        for name in ("method", "registers", "chains", "turn", "panel", "ahead"):
            wrong += 0.1 * (getattr(recipe, name) != getattr(self.fastest, name))
        return 1e-3 * wrong * (self.blocks if candidate.block_groups else 1.0)


# The search.


def test_the_search_finds_the_fastest_of_every_choice() -> None:
    """Method, tile, turn, panel and distance ahead, each found in its own step, though all six differ at first."""
    default = default_recipe("vector", layout(), AVX512)
    wanted = replace(default, method="table", registers=2, chains=4, turn=2, ahead=512, panel=128)
    clock = Table(wanted)
    found = search("vector", layout(), AVX512, GAMMA, clock)
    assert found.default.recipe == default
    assert found.chosen == Candidate(wanted)
    assert found.faster >= WORTH and found.block is not None
    assert {trial.step for trial in found.trials.values()} == {"tile", "turn", "ahead", "panel", "block"}


def test_candidates_take_turns_and_the_slower_half_is_dropped() -> None:
    """In every round each candidate that is left is measured once; the slowest has the fewest samples."""
    default = default_recipe("rows", layout(), AVX2)
    clock = Table(replace(default, method="shift"))
    found = search("rows", layout(), AVX2, GAMMA, clock)
    first = [candidate for candidate, _ in clock.asked[: len(tiles("rows", layout(), AVX2))]]
    assert len(set(first)) == len(first)
    counts = {
        candidate: len(trial.samples["cache"]) for candidate, trial in found.trials.items() if trial.step == "tile"
    }
    slowest = max(counts, key=lambda candidate: found.trials[candidate].seconds("cache") or 0.0)
    assert counts[slowest] == min(counts.values()) < max(counts.values())


def test_the_default_stays_if_another_is_not_worth_it() -> None:
    """A difference of one percent may be chance."""

    class Near(Table):
        def sample(self, candidate: Candidate, place: Place) -> float:
            return 1.0e-3 if candidate.recipe.method == "table" else 1.01e-3

    found = search("vector", layout(), AVX512, GAMMA, Near(default_recipe("vector", layout(), AVX512)))
    assert found.chosen == found.default and 1.0 < found.faster < WORTH


def test_blocks_along_the_z_curve_win_where_they_are_faster() -> None:
    default = default_recipe("vector", layout(), AVX2)
    assert search("vector", layout(), AVX2, GAMMA, Table(default, blocks=0.5)).chosen.block_panels > 0
    assert search("vector", layout(), AVX2, GAMMA, Table(default, blocks=2.0)).chosen.block_panels == 0


def test_progress_is_told_and_never_beyond_its_end() -> None:
    told: Told = []
    clock = Table(default_recipe("integer rows", layout(), AVX2))
    search("integer rows", layout(), AVX2, GAMMA, clock, lambda *step: told.append(step))
    assert told and all(0 <= done < total for _, done, total in told)


# What is tried.


@pytest.mark.parametrize("isa", ("avx512vnni", "avx2"))  # the others differ from these in no number
@pytest.mark.parametrize("purpose", PURPOSES)
def test_every_candidate_can_be_made_and_fits_the_registers(isa: str, purpose: Any) -> None:
    """The default comes first, whatever the model says of it; for several rows there is one chain."""
    table = TABLES[isa]
    for bits in (3, 4):
        found = tiles(purpose, layout(bits), table)
        recipes = list(found)
        assert recipes[0] == default_recipe(purpose, layout(bits), table) and len(recipes) > 1
        for recipe in recipes:
            assert not recipe.fits(table.lanes) and Stream(recipe, layout(bits)).whole
            assert recipe.method != "mantissa" and (purpose == "vector" or recipe.chains == 1)
            assert recipe == recipes[0] or found[recipe].registers <= table.registers
        for recipe in turns(recipes[0], layout(bits), table):
            assert Stream(recipe, layout(bits)).whole


def test_the_block_of_equation_5_is_whole_groups_and_panels_and_fits() -> None:
    """Also where no block fits: a group of a whole column, whose part of x alone is larger than γ."""
    candidate = Candidate(default_recipe("vector", layout(), AVX2))
    blocked = block(candidate, layout(), AVX2, GAMMA)
    assert blocked is not None and blocked.block_groups is not None
    m_b, t_b = blocked.block_groups * 128, blocked.block_panels * 64
    assert 32 * m_b + 4 * m_b * t_b + 32 * t_b + 64 * t_b * blocked.block_groups <= GAMMA
    assert block(candidate, layout(group=0, shape="11008x4096"), AVX2, GAMMA) is None


def test_the_part_in_the_cache_has_the_matrix_s_groups() -> None:
    """For groups that do not divide it, whole columns, and a matrix smaller than it."""
    for shape, group in (("4096x11008", 128), ("11008x4096", 100), ("11008x4096", 0), ("64x8", 16)):
        whole = layout(group=group, shape=shape)
        part = part_in_cache(whole)
        assert part.rows <= whole.rows and part.rows % 8 == 0 and part.groups >= 1
        assert part.group_size == min(whole.group_size, part.rows) and part.columns >= 256


# What is predicted.


@pytest.mark.parametrize(
    ("bits", "method", "purpose"), [(4, "fold", "vector"), (3, "shift", "rows"), (2, "sums", "vector")]
)
def test_predicted_words_are_those_that_the_interpreter_counts(bits: int, method: Any, purpose: Any) -> None:
    """Of one group, less what stands outside of the loop over groups."""
    recipe = replace(default_recipe(purpose, layout(bits), AVX512), method=method)
    program = micro_kernel(recipe, 16)
    units = 128 // recipe.unit_codes
    memory: dict[str, Any] = {name: np.zeros(20000, np.uint32) for name in "wsz"}
    elements = (units * x_elements(recipe) + 1) * recipe.rows
    memory |= {"x": np.zeros(elements, np.float32), "y": np.zeros(recipe.rows * recipe.panel, np.float32)}
    turns_of = [units // recipe.turn]
    one, none = (run(program, memory, {"turns": turns_of, "groups": groups}) for groups in (1, 0))
    counted = one.instructions - none.instructions
    assert words_of_a_group(recipe, layout(bits), program) == counted


def test_predicted_words_of_integers_are_those_of_a_group_s_segments() -> None:
    """Four segments of 32 mantissas: as many dot products as codes by four, and one rounding a segment."""
    recipe = default_recipe("integer vector", layout(), TABLES["avx512vnni"])
    words = words_of_a_group(recipe, layout(), micro_kernel(recipe, 16))
    assert words["dot4"] == 128 // 4 * recipe.registers
    assert words["cvt_signed_float"] == 128 // SEGMENT * recipe.registers


def test_counted_registers_are_the_sums_and_what_is_on_its_way() -> None:
    """Two chains of four sums, and one code; the masks, words, activations and y are not counted."""
    recipe = Recipe(4, "float16", "zero_point", "shift", registers=4, chains=2)
    assert counted_registers(micro_kernel(recipe, 16)) == 4 * 2 + 1
    predicted = predict(recipe, layout(), AVX512)
    assert predicted.registers < predicted.live and predicted.equation_4 == 1 + 4 + 4
    assert predicted.bytes_per_code == pytest.approx(0.5 + 3 / 128)


# γ.


def test_gamma_is_read_from_the_system_and_has_a_default(tmp_path: Path) -> None:
    """Only a data cache of the level counts; what cannot be read as a size does not."""
    for number, (level, kind, size) in enumerate(
        (("1", "Instruction", "64K"), ("1", "Data", "48K"), ("2", "Unified", "1M"))
    ):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(text + "\n")
    assert hardware.cache_of_level(1, tmp_path).bits == 48 * 1024 * 8
    assert hardware.cache_of_level(2, tmp_path).bytes == 2**20
    (tmp_path / "index2/size").write_text("much")
    assert hardware.cache_of_level(2, tmp_path) == hardware.Cache(512 * 1024, "not known: a usual size")
    assert hardware.cache_of_level(1, tmp_path / "nowhere").bytes >= 2**10


# What is kept.


def an_outcome(**changes: Any) -> Outcome:
    recipe = replace(default_recipe("vector", layout(), AVX2), ahead=512, **changes)
    return Outcome(recipe, None, 0, {"made": "today"})


def a_key(purpose: str = "vector") -> Key:
    return Key.of(purpose, layout(), AVX2)


def test_an_outcome_is_read_back_and_used(kept: Path) -> None:
    """By the choices for a matrix of its class, and not for others, and not when it is turned off."""
    path = outcomes.write(a_key(), an_outcome())
    assert outcomes.read(a_key()) == an_outcome()
    assert recipe_for("vector", layout(), AVX2) == an_outcome().recipe
    assert recipe_for("vector", layout(shape="512x2048"), AVX2).ahead == 512
    for other in (layout(shape="512x2040"), layout(bits=2), layout(group=64)):
        assert recipe_for("vector", other, AVX2) == default_recipe("vector", other, AVX2)
    assert recipe_for("rows", layout(), AVX2) == default_recipe("rows", layout(), AVX2)
    assert "vector_wide: f32_u4" in outcomes.described(AVX2) and outcomes.described(AVX512) == "default"
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_environment_turns_outcomes_off_and_its_mistakes_are_named(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes.write(a_key(), an_outcome())
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
    outcomes.write(a_key(), an_outcome())
    assert outcomes.tuned("vector", layout(), AVX2) is None
    outcomes.forget()
    assert outcomes.tuned("vector", layout(), AVX2) == an_outcome()


def test_an_outcome_of_another_generator_or_compiler_does_not_count(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passed over in silence: nothing is wrong with it."""
    outcomes.write(a_key(), an_outcome())
    monkeypatch.setattr(outcomes, "version", lambda name: "99.0")
    assert outcomes.read(a_key()) is None
    monkeypatch.undo()


def test_the_digest_covers_every_module_that_shapes_a_kernel() -> None:
    """All that `kernels`, `layout` and `streams` import of this package, at any distance."""
    folder = Path(lowbit_cppyy.__file__).parent
    pending, found = ["kernels", "layout", "streams"], set[str]()
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lowbit_cppyy."):
                pending.append(str(node.module).split(".")[1])
    assert found == set(outcomes.SHAPING)


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
        "block": changed(block=None),
        "panels": changed(block={"groups": 3, "panels": -1}),
        "fields": recipe(colour="red"),
        "method": recipe(method="mantissa"),
        "bits": recipe(bits=8),
        "text": recipe(rows="1"),
        "true": recipe(rows=True),
        "huge": recipe(turn=64, registers=8, rows=16),
        "long": json.dumps(document) + " " * outcomes.MOST_BYTES,
        "integer": recipe(method="dot4"),
    }


@pytest.mark.parametrize("kind", spoilt({"recipe": {}, "key": {}}))
def test_a_spoilt_file_is_passed_over_with_a_warning(kept: Path, kind: str) -> None:
    """Cut off, foreign, newer, or stating what no search writes: the default is used, and said so, once."""
    path = outcomes.write(a_key(), an_outcome())
    path.write_text(spoilt(json.loads(path.read_text()))[kind])
    with pytest.warns(OutcomeWarning, match="is passed over, and default kernels are used: ") as caught:
        assert recipe_for("vector", layout(), AVX2) == default_recipe("vector", layout(), AVX2)
        assert recipe_for("vector", layout(), AVX2) == default_recipe("vector", layout(), AVX2)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)


def test_what_is_no_file_is_no_outcome(kept: Path) -> None:
    """A folder, a pipe that nobody writes to, and bytes that are no text."""
    path = outcomes.write(a_key(), an_outcome())
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
    """A turn of the loop that its groups are not whole turns of; a panel that the layout does not have."""
    outcomes.write(a_key(), an_outcome(turn=8))
    odd = layout(group=72)
    assert group_of(odd) == "128" and recipe_for("vector", odd, AVX2) == default_recipe("vector", odd, AVX2)
    outcomes.write(a_key("rows"), Outcome(replace(default_recipe("rows", layout(), AVX2), panel=128), None, 0, {}))
    assert recipe_for("rows", layout(), AVX2).panel == layout().panel


def group_of(matrix: PanelLayout) -> str:
    return outcomes.group_class(matrix.group_size)


def small_matrix(columns: int = 2100) -> QuantizedMatrix:
    weights = np.random.default_rng(1).standard_normal((512, columns)).astype(np.float32)
    return quantize(weights, bits=4, group_size=128, scale_dtype="float16")


def test_the_layout_of_a_matrix_is_that_of_its_outcome(kept: Path) -> None:
    """Panels and blocks; the other purposes then take the default for that panel."""
    matrix = small_matrix()
    plain = PanelLayout.of(matrix, choices.PANEL)
    key = Key.of("vector", plain, AVX2)
    recipe = replace(default_recipe("vector", plain, AVX2), panel=128)
    outcomes.write(key, Outcome(recipe, 2, 3, {}))
    tuned = layout_for(matrix, AVX2)
    assert (tuned.panel, tuned.block_groups, tuned.block_panels) == (128, 2, 3)
    assert recipe_for("vector", tuned, AVX2) == recipe and recipe_for("rows", tuned, AVX2).panel == 128


def test_a_folder_that_cannot_be_written_is_an_error_in_words(kept: Path) -> None:
    (kept / "tuned").write_text("in the way")
    with pytest.raises(UnavailableError, match=r"cannot be written: .*set LOWBIT_CACHE"):
        outcomes.write(a_key(), an_outcome())


WRITER = """
import sys
from unittest import mock
from lowbit_cppyy import outcomes
from lowbit_cppyy.isa import TABLES
from lowbit_cppyy.choices import default_recipe
from lowbit_cppyy.tune_command import layout_of
from dataclasses import replace
with mock.patch.object(outcomes, "processor_key", lambda: "Abacus 3000; avx2; L1 49152"):
    layout = layout_of(4, 128, "4096x11008", "float16", "zero_point")
    key = outcomes.Key.of("vector", layout, TABLES["avx2"])
    recipe = replace(default_recipe("vector", layout, TABLES["avx2"]), ahead=int(sys.argv[1]))
    for _ in range(30):
        outcomes.write(key, outcomes.Outcome(recipe, None, 0, {"filling": "x" * 50_000}))
"""


def test_two_processes_may_write_at_once(kept: Path) -> None:
    """Whoever reads meanwhile sees the whole outcome of one or of the other, and nothing is left lying about."""
    first = outcomes.write(a_key(), an_outcome())
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, ahead]) for ahead in ("512", "2048")]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        outcome = outcomes.read(a_key())
        assert outcome is not None
        seen.add(outcome.recipe.ahead)
    assert [writer.returncode for writer in writers] == [0, 0] and seen <= {512, 2048}
    assert [file.name for file in first.parent.iterdir()] == [first.name]


# The backend.


def test_the_backend_says_what_it_uses_and_computes_with_it(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tuned kernel of one chain instead of two the sum is another order, and still right."""
    matrix = small_matrix()
    monkeypatch.setenv("LOWBIT_CPPYY_ISA", "plain")
    table = TABLES["plain"]
    plain = PanelLayout.of(matrix, choices.PANEL)
    recipe = replace(default_recipe("vector", plain, table), method="shift", registers=2, chains=4, turn=2)
    outcomes.write(Key.of("vector", plain, table), Outcome(recipe, 2, 5, {}))
    x = np.random.default_rng(0).integers(-8, 9, 512).astype(np.float32)
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
    np.testing.assert_allclose(tuned, default, rtol=1e-4, atol=1e-2)


# The command.


@pytest.fixture
def rehearsed(kept: Path, monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """`lowbit tune` with searches that take no time: the clock is a rule, and nothing is compiled."""
    from lowbit_cppyy import tuning

    problems: list[Problem] = []
    real = tuning.tune

    def rehearse(problem: Problem, watch: Any) -> tuning.Tuned:
        problems.append(problem)
        default = default_recipe(problem.purpose, problem.layout, problem.table)
        return real(problem, watch, Table(replace(default, ahead=512)))

    monkeypatch.setattr(tuning, "tune", rehearse)
    monkeypatch.setattr(tune_command, "choose_table", lambda isa: TABLES[isa or "avx2"])
    monkeypatch.setattr(tune_command, "check_toolchain", lambda: None)
    return problems


def test_tune_answers_in_json_and_keeps_what_it_found(rehearsed: list[Problem]) -> None:
    """Predicted and measured of everything that was tried; the outcome is used from then on."""
    done = CliRunner().invoke(app, ["tune", "--json", "--purpose", "vector", "--purpose", "rows", "--threads", "1"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["complete"] and [search["purpose"] for search in answer["searches"]] == ["vector", "rows"]
    first = answer["searches"][0]
    assert first["chosen"].endswith("a512_avx2") and first["times_faster_than_default"] > 1
    assert first["gamma"]["bytes"] > 0 and first["eta"] == 16
    assert all(trial["predicted"]["registers"] > 0 for trial in first["trials"])
    outcomes.forget()
    assert recipe_for("vector", layout(), AVX2).ahead == 512


def test_tune_shows_a_table_of_80_columns(rehearsed: list[Problem], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app, ["tune", "--purpose", "vector", "--no-keep"])
    assert done.exit_code == 0, done.output
    assert "γ = " in done.stdout and "eq.4" in done.stdout and "times as fast" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert outcomes.read(a_key()) is None


def test_tune_goes_through_all_widths(rehearsed: list[Problem]) -> None:
    done = CliRunner().invoke(app, ["tune", "--all", "--json", "--purpose", "integer vector"])
    assert done.exit_code == 0 and len(json.loads(done.stdout)["searches"]) == 4
    assert [problem.layout.bits for problem in rehearsed] == [2, 3, 4, 8]


def test_an_interrupt_keeps_what_was_finished(rehearsed: list[Problem], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second search is interrupted: the first is answered and kept, and the status is that of an interrupt."""
    from lowbit_cppyy import tuning

    first = tuning.tune

    def interrupted(problem: Problem, watch: Any) -> Any:
        if rehearsed:
            raise KeyboardInterrupt
        return first(problem, watch)

    monkeypatch.setattr(tuning, "tune", interrupted)
    done = CliRunner().invoke(app, ["tune", "--json", "--bits", "4"])
    assert done.exit_code == 130
    answer = json.loads(done.stdout)
    assert not answer["complete"] and len(answer["searches"]) == 1
    assert outcomes.read(a_key()) is not None


def test_a_figure_is_drawn_or_refused_before_anything_is_measured(
    rehearsed: list[Problem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for figure, said in ((tmp_path / "a.pdf", ".svg or .png"), (tmp_path / "no/a.svg", "a folder that exists")):
        done = CliRunner().invoke(app, ["tune", "--figure", str(figure)])
        assert said in str(done.exception) and not rehearsed
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda name: None)
        done = CliRunner().invoke(app, ["tune", "--figure", str(tmp_path / "a.svg")])
        assert "matplotlib is not installed" in str(done.exception) and not rehearsed


def test_the_picture_shows_every_search(rehearsed: list[Problem], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.svg"
    done = CliRunner().invoke(app, ["tune", "--purpose", "vector", "--no-keep", "--json", "--figure", str(picture)])
    assert done.exit_code == 0 and picture.read_text().startswith("<?xml")
    assert [file.name for file in tmp_path.iterdir() if file.name.endswith(".part")] == []
