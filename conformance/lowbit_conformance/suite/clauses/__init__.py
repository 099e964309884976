"""The tests of the clauses, one module for each chapter."""

import importlib
import pkgutil


def module_names() -> list[str]:
    """The full names of the modules, sorted."""
    return sorted(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__))


def load_suite() -> None:
    """Import all test modules, so that `lowbit_conformance.suite.marking.MARKS` is complete."""
    for name in module_names():
        importlib.import_module(name)
