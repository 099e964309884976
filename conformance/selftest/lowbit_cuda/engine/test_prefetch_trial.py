"""Whether guessing pays: the decision, from times that are made up."""

from collections.abc import Callable

import pytest

from lowbit.errors import ArgumentError
from lowbit_cuda.engine.prefetch_trial import PrefetchTrial, TrialSchedule

SCHEDULE = TrialSchedule(warmup=3, window=2, rounds=2, patience=10)
LENGTH = 4 * 3  # tokens of a measurement: four windows of two, and the first of each that is not counted


def drive(trial: PrefetchTrial, tokens: int, seconds: Callable[[int, bool], float]) -> tuple[list[bool], list[str]]:
    """Run tokens; answers with which were guessed for, and what was said."""
    guessed, said = [], []
    for token in range(tokens):
        guessed.append(trial.guessing)
        note = trial.token(seconds(token, trial.guessing), trial.guessing)
        said += [note] if note else []
    return guessed, said


def test_windows_alternate() -> None:
    """After the warm-up, windows with guesses and without take turns; then the verdict stands for a long while."""
    guessed, said = drive(
        PrefetchTrial(SCHEDULE), 3 + LENGTH + 10 + 3, lambda token, guessing: 1.0 if guessing else 2.0
    )
    assert guessed == [True] * 3 + ([True] * 3 + [False] * 3) * 2 + [True] * 10 + [True] * 3
    assert not said, "nothing has changed"


def test_off_when_it_costs() -> None:
    """Slower with guesses: off, with a sentence that has both times; measured again after the while, and on again."""
    trial = PrefetchTrial(SCHEDULE)
    guessed, said = drive(trial, 3 + LENGTH + 10, lambda token, guessing: 0.030 if guessing else 0.020)
    assert guessed[3 + LENGTH :] == [False] * 10
    assert said == [
        "prefetching is switched off: a token takes 30 ms with it and 20 ms without (medians of 4 tokens each); it is "
        "measured again after 10 tokens"
    ]
    assert trial.measurements[0].benefit == pytest.approx(-0.010)
    guessed, said = drive(trial, LENGTH + 10, lambda token, guessing: 0.010 if guessing else 0.020)
    assert guessed == ([False] * 3 + [True] * 3) * 2 + [True] * 10
    assert len(said) == 1 and said[0].startswith("prefetching is switched on again: a token takes 10 ms")


def test_off_stays_off_silently() -> None:
    """Measured again with the same result, nothing is said twice."""
    trial = PrefetchTrial(SCHEDULE)
    _, said = drive(trial, 4 * (LENGTH + 10), lambda token, guessing: 2.0 if guessing else 1.0)
    assert len(said) == 1 and len(trial.measurements) == 4 and not trial.guessing


def test_a_hiccup_decides_nothing() -> None:
    """One token that is held up for a second is not what guessing costs, nor one that needs nothing what it saves; a
    mean would be taken in by the first, and the least by the second."""
    odd = {3 + 1: 1.0, 3 + 4: 0.001}
    trial = PrefetchTrial(SCHEDULE)
    drive(trial, 3 + LENGTH, lambda token, guessing: odd.get(token, 0.010 if guessing else 0.020))
    assert trial.guessing and trial.measurements[0].benefit == pytest.approx(0.010)


def test_the_first_of_a_window_is_not_counted() -> None:
    """The token after a change pays for what the one before it left undone, and is counted for neither kind."""
    before: list[bool] = [True]

    def seconds(token: int, guessing: bool) -> float:
        changed = guessing != before[-1]
        before.append(guessing)
        return 5.0 if changed else 0.010 if guessing else 0.011

    trial = PrefetchTrial(TrialSchedule(warmup=0, window=1, rounds=3, patience=10))
    drive(trial, 12, seconds)
    assert trial.measurements[0].with_guesses == 0.010 and trial.measurements[0].without == 0.011


def test_tokens_of_the_other_kind() -> None:
    """A token that was begun before the change is not counted for the window after it."""
    trial = PrefetchTrial(TrialSchedule(warmup=0, window=1, rounds=1, patience=10))
    for guessed, seconds in [(True, 9.0), (True, 1.0), (True, 7.0), (False, 9.0), (True, 7.0), (False, 2.0)]:
        assert trial.token(seconds, guessed) is None
    assert (trial.measurements[0].with_guesses, trial.measurements[0].without) == (1.0, 2.0)


def test_equal_is_not_negative() -> None:
    """Where it makes no difference, guessing stays as the paper has it: on."""
    trial = PrefetchTrial(SCHEDULE)
    _, said = drive(trial, 100, lambda token, guessing: 1.0)
    assert not said and len(trial.measurements) > 2 and all(m.benefit == 0 for m in trial.measurements)


@pytest.mark.parametrize("wrong", [{"warmup": -1}, {"window": 0}, {"rounds": 0}, {"patience": 0}, {"window": 1.5}])
def test_a_wrong_plan_is_refused(wrong: dict[str, int]) -> None:
    """Numbers that measure nothing, or never, are refused by name."""
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        TrialSchedule(**wrong)
