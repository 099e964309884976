"""Errors: a sentence for people, fields for programs."""

import copy
import pickle

from lowbit.errors import ArgumentError, UnavailableError


def test_a_sentence_of_its_own_takes_the_place_of_the_usual_one() -> None:
    """The fields stay, and the sentence is cleaned like any other."""
    error = ArgumentError("--steps", True, "leave it out", "--steps does not apply to\nwhole models\x07")
    assert str(error) == "--steps does not apply to whole models\\x07"
    assert (error.argument, error.given, error.allowed) == ("--steps", True, "leave it out")
    missing = UnavailableError("a GPU", "none", "buy one", "this machine has no GPU")
    assert str(missing) == "this machine has no GPU"
    assert (missing.what, missing.reason, missing.remedy) == ("a GPU", "none", "buy one")


def test_an_error_can_be_copied_and_sent() -> None:
    """With its sentence and without."""
    for error in (
        ArgumentError("bits", 5, "2 or 4"),
        ArgumentError("bits", 5, "2 or 4", "five bits do not fit"),
        UnavailableError("a GPU", "none", "buy one", "this machine has no GPU"),
    ):
        for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
            assert str(other) == str(error) and vars(other) == vars(error)
