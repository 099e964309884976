"""Every ruling of the errata is a check that computes, and it holds."""

import importlib
import pkgutil

import pytest

from lowbit import errata
from lowbit.errata import RULINGS, ruling

for module in pkgutil.iter_modules(errata.__path__):
    importlib.import_module(f"{errata.__name__}.{module.name}")


@pytest.mark.parametrize("id", RULINGS)
def test_the_printed_form_fails_and_the_ruled_form_holds(id: str) -> None:
    """The check of the ruling computes both forms and raises nothing."""
    RULINGS[id].check()


def test_no_number_stands_for_two_rulings() -> None:
    """An id that is taken is refused, so a ruling cannot replace another in silence."""
    with pytest.raises(ValueError, match="Q3 stands twice"):
        ruling("Q3", printed="", ruled="")(lambda: None)
