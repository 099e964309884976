"""All defects: the arithmetical ones that ship, and the habits.

>>> len(ALL) > len(BANK)
True
>>> backend("nibbles-swapped").name, backend("hangs").name
('bank:nibbles-swapped', 'bank:hangs')
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from kills import addresses, calls, ends, everywhere, memory, sizes, stale, state, stored
from kills.backends import made_of
from kills.habits import Habit
from lowbit.backend import Backend
from lowbit_conformance.defects import bank
from lowbit_conformance.defects.backends import BankBackend
from lowbit_conformance.defects.bank import BANK
from lowbit_conformance.defects.defect import Defect

FACTORY = "kills.bank:backend"
"""How a host process makes a backend of any of them."""
FOLDER = Path(__file__).parents[1]
"""What a process that imports this package needs on its path."""
OWN = ("kills", "lowbit_conformance")
"""The packages that these backends are made of."""

HABITUAL = (memory, addresses, stale, sizes, calls, state, stored, ends, everywhere)
ALL: Mapping[str, Defect] = MappingProxyType(
    bank.gathered([*BANK.values(), *(defect for module in HABITUAL for defect in module.DEFECTS)])
)
"""All defects by name."""


def defect_of(name: str) -> Defect:
    """The defect of this name; that of ``none`` is the control, which has no defect.

    Raises:
        ArgumentError: there is none.
    """
    return bank.defect_of(name, ALL)


def backend(name: str) -> Backend:
    """A backend with the defect of this name.

    Raises:
        ArgumentError: there is none.
    """
    defect = defect_of(name)
    return made_of(defect) if isinstance(defect, Habit) else BankBackend(defect)


def uses_reference(name: str) -> bool:
    """Whether a backend with this defect may call the reference to be right in what it does not spoil."""
    defect = defect_of(name)
    return defect.uses_reference if isinstance(defect, Habit) else True
