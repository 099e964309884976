"""The search of Algorithm 4 with an artificial clock, its predictions, and the command ``lowbit tune``."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.errors import UnavailableError
from lowbit.kernels.interpreter import run
from lowbit_cppyy.cli import tune as tune_command
from lowbit_cppyy.cli.tune import layout_of
from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.codegen.microkernel import micro_kernel
from lowbit_cppyy.codegen.steps import x_elements
from lowbit_cppyy.layout.panels import PanelLayout
from lowbit_cppyy.recipe import PURPOSES, SEGMENT, Recipe
from lowbit_cppyy.runtime import hardware
from lowbit_cppyy.runtime.activations import ActivationStream
from lowbit_cppyy.tuning import candidates, outcomes
from lowbit_cppyy.tuning.candidates import tiles, unrolled
from lowbit_cppyy.tuning.choices import default_recipe, recipe_for
from lowbit_cppyy.tuning.prediction import Prediction, counted_registers, predict, words_of_a_group
from lowbit_cppyy.tuning.search import WORTH, Location, search
from lowbit_cppyy.tuning.stopwatch import Problem, part_in_cache

AVX2, AVX512 = TABLES["avx2"], TABLES["avx512"]
Told = list[tuple[str, int, int]]


def layout(bits: int = 4, group: int = 128, shape: str = "4096x11008") -> PanelLayout:
    return layout_of(bits, group, shape, "float16", "zero_point")


class Table:
    """A stopwatch that computes times by a rule."""

    def __init__(self, fastest: Recipe) -> None:
        self.fastest = fastest
        self.asked: list[tuple[Recipe, Location]] = []

    def sample(self, recipe: Recipe, location: Location) -> float:
        self.asked.append((recipe, location))
        wrong = 1.0
        for name in ("method", "registers", "chains", "unroll", "panel", "ahead"):
            wrong += 0.1 * (getattr(recipe, name) != getattr(self.fastest, name))
        return 1e-3 * wrong


# The search.


def test_the_search_finds_the_fastest_of_every_choice() -> None:
    """Method, tile, unrolling, panel and prefetch distance, each found in its own step, though all differ at first."""
    default = default_recipe("vector", layout(), AVX512)
    wanted = replace(default, method="shift", registers=2, chains=4, unroll=2, ahead=512, panel=128)
    clock = Table(wanted)
    found = search("vector", layout(), AVX512, clock)
    assert found.default == default
    assert found.chosen == wanted
    assert found.faster >= WORTH
    assert {trial.step for trial in found.trials.values()} == {"tile", "unroll", "ahead", "panel"}


def test_candidates_take_turns_and_the_slower_half_is_dropped() -> None:
    """In every round each candidate that is left is measured once; the slowest has the fewest samples."""
    default = default_recipe("rows", layout(), AVX2)
    clock = Table(replace(default, method="shift"))
    found = search("rows", layout(), AVX2, clock)
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
        def sample(self, recipe: Recipe, location: Location) -> float:
            return 1.0e-3 if recipe.method == "shift" else 1.01e-3

    found = search("vector", layout(), AVX512, Near(default_recipe("vector", layout(), AVX512)))
    assert found.chosen == found.default and 1.0 < found.faster < WORTH


def test_progress_is_told_and_never_beyond_its_end() -> None:
    told: Told = []
    clock = Table(default_recipe("integer rows", layout(), AVX2))
    search("integer rows", layout(), AVX2, clock, lambda *step: told.append(step))
    assert told and all(0 <= done < total for _, done, total in told)


# The candidates.


@pytest.mark.parametrize("isa", ("avx512vnni", "avx2"))  # the others have the same numbers
@pytest.mark.parametrize("purpose", PURPOSES)
def test_every_candidate_can_be_made_and_fits_the_registers(
    isa: str, purpose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default comes first, whatever the model predicts of it; several rows have one chain."""
    table, predicted = TABLES[isa], dict[Recipe, int]()

    def kept(recipe: Recipe, *of: Any) -> Prediction:
        prediction = predict(recipe, *of)
        predicted[recipe] = prediction.registers
        return prediction

    monkeypatch.setattr(candidates, "predict", kept)
    for bits in (3, 4):
        recipes = tiles(purpose, layout(bits), table)
        assert recipes[0] == default_recipe(purpose, layout(bits), table) and len(recipes) > 1
        for recipe in recipes:
            assert not recipe.fits(table.lanes) and ActivationStream(recipe, layout(bits)).whole
            assert purpose == "vector" or recipe.chains == 1
            assert recipe == recipes[0] or predicted[recipe] <= table.registers
        for recipe in unrolled(recipes[0], layout(bits), table):
            assert ActivationStream(recipe, layout(bits)).whole


def test_the_part_in_the_cache_has_the_matrix_s_groups() -> None:
    """For groups that do not divide it, whole columns, and a matrix smaller than it."""
    for shape, group in (("4096x11008", 128), ("11008x4096", 100), ("11008x4096", 0), ("64x8", 16)):
        whole = layout(group=group, shape=shape)
        part = part_in_cache(whole)
        assert part.rows <= whole.rows and part.rows % 8 == 0 and part.groups >= 1
        assert part.group_size == min(whole.group_size, part.rows) and part.columns >= 256


# The predictions.


@pytest.mark.parametrize(
    ("bits", "method", "purpose"), [(4, "fold", "vector"), (3, "shift", "rows"), (2, "sums", "vector")]
)
def test_predicted_words_are_those_that_the_interpreter_counts(bits: int, method: Any, purpose: Any) -> None:
    """Those of one group, without the steps outside the loop over groups."""
    recipe = replace(default_recipe(purpose, layout(bits), AVX512), method=method)
    program = micro_kernel(recipe, 16)
    units = 128 // recipe.unit_codes
    memory: dict[str, Any] = {name: np.zeros(20000, np.uint32) for name in "wsz"}
    elements = (units * x_elements(recipe) + 1) * recipe.rows
    memory |= {"x": np.zeros(elements, np.float32), "y": np.zeros(recipe.rows * recipe.panel, np.float32)}
    iterations = [units // recipe.unroll]
    one, none = (run(program, memory, {"turns": iterations, "groups": groups}) for groups in (1, 0))
    counted = one.instructions - none.instructions
    assert words_of_a_group(recipe, layout(bits), program) == counted


def test_predicted_words_of_integers_are_those_of_a_group_s_segments() -> None:
    """Four segments of 32 mantissas: as many dot products as codes by four, and one rounding a segment."""
    recipe = default_recipe("integer vector", layout(), TABLES["avx512vnni"])
    words = words_of_a_group(recipe, layout(), micro_kernel(recipe, 16))
    assert words["dot4"] == 128 // 4 * recipe.registers
    assert words["cvt_signed_float"] == 128 // SEGMENT * recipe.registers


def test_counted_registers_are_the_sums_and_a_code_being_unpacked() -> None:
    """Two chains of four sums, and one code; the masks, words, activations and y are not counted."""
    recipe = Recipe(4, "float16", "zero_point", "shift", registers=4, chains=2)
    assert counted_registers(micro_kernel(recipe, 16)) == 4 * 2 + 1
    predicted = predict(recipe, layout(), AVX512)
    assert predicted.registers < predicted.live and predicted.equation_4 == 1 + 4 + 4
    assert predicted.bytes_per_code == pytest.approx(0.5 + 3 / 128)


# The caches.


def test_the_sizes_of_caches_are_read_from_the_system_and_have_defaults(tmp_path: Path) -> None:
    """Only a data cache of the level counts; a malformed size is ignored."""
    for number, (level, kind, size) in enumerate(
        (("1", "Instruction", "64K"), ("1", "Data", "48K"), ("2", "Unified", "1M"))
    ):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(text + "\n")
    assert hardware.cache_bytes(1, tmp_path) == 48 * 1024
    assert hardware.cache_bytes(2, tmp_path) == 2**20
    (tmp_path / "index2/size").write_text("much")
    assert hardware.cache_bytes(2, tmp_path) == 512 * 1024
    assert hardware.cache_bytes(1, tmp_path / "nowhere") >= 2**10


# The command.


@pytest.fixture
def rehearsed(kept: Path, monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """`lowbit tune` with searches that take no time: the clock is a rule, and nothing is compiled."""
    from lowbit_cppyy.tuning import tune as tuning

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
    """Predictions and measurements of all candidates; the outcome is used from then on."""
    done = CliRunner().invoke(app, ["tune", "--json", "--purpose", "vector", "--purpose", "rows", "--threads", "1"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["complete"] and [search["purpose"] for search in answer["searches"]] == ["vector", "rows"]
    first = answer["searches"][0]
    assert first["chosen"].endswith("a512_avx2") and first["times_faster_than_default"] > 1
    assert first["eta"] == 16
    assert all(trial["predicted"]["registers"] > 0 for trial in first["trials"])
    outcomes.forget()
    assert recipe_for("vector", layout(), AVX2).ahead == 512


def test_tune_shows_a_table_of_80_columns(rehearsed: list[Problem], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app, ["tune", "--purpose", "vector", "--no-keep"])
    assert done.exit_code == 0, done.output
    assert "η = " in done.stdout and "eq.4" in done.stdout and "times as fast" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert outcomes.read(outcomes.Key.of("vector", layout(), AVX2)) is None


def test_tune_goes_through_all_widths(rehearsed: list[Problem]) -> None:
    done = CliRunner().invoke(app, ["tune", "--all", "--json", "--purpose", "integer vector"])
    assert done.exit_code == 0 and len(json.loads(done.stdout)["searches"]) == 4
    assert [problem.layout.bits for problem in rehearsed] == [2, 3, 4, 8]


def test_an_interrupt_keeps_what_was_finished(rehearsed: list[Problem], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second search is interrupted: the first is printed and kept, and the status is that of an interrupt."""
    from lowbit_cppyy.tuning import tune as tuning

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
    assert outcomes.read(outcomes.Key.of("vector", layout(), AVX2)) is not None


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


def test_a_cache_that_cannot_be_written_is_refused_before_the_search(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after it, which may take an hour; with ``--no-keep`` the folder is not needed."""
    searched: list[object] = []

    def search(run: object, problem: object) -> None:
        searched.append(problem)
        raise KeyboardInterrupt

    monkeypatch.setattr("lowbit_cppyy.cli.tune.Run.search", search)
    (kept / "file").touch()
    monkeypatch.setenv("LOWBIT_CACHE", str(kept / "file"))
    result = CliRunner().invoke(app, ["tune", "--shape", "64x64", "--group", "32"])
    assert isinstance(result.exception, UnavailableError) and not searched
    assert re.search(r"cannot be written: .*; set LOWBIT_CACHE to another folder", str(result.exception))
    assert CliRunner().invoke(app, ["tune", "--shape", "64x64", "--group", "32", "--no-keep"]).exit_code == 130
    assert len(searched) == 1
