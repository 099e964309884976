"""Declarations that cannot be understood: each is refused before anything is run, with a sentence that mends it."""

import json
import subprocess
from collections import OrderedDict
from enum import IntEnum
from itertools import islice
from typing import Any

import numpy as np
import pytest
from in_process import InProcess
from kills.trial import cases_of, run
from malformed import CLASSES, GIVEN, Controlling, Long, Malformed, WithoutEndAtAll
from paths import SUPPORT

from lowbit.backend import Backend, Capabilities, Declaration
from lowbit.backend import find as find_backend
from lowbit.backend.declarations import LIMITS, availability_of, capabilities_of, check_capabilities
from lowbit.contract.operation import IMPLIED
from lowbit.contract.rounding import Arithmetic
from lowbit.errors import ArgumentError
from lowbit.operations import OPERATIONS
from lowbit.system.interpreters import python_command, python_environment
from lowbit.tensor_formats.stored import FORMATS, OPTIONS
from lowbit_conformance.suite.cases import HABIT

HERE = SUPPORT


@pytest.mark.parametrize("key", GIVEN)
def test_what_cannot_be_understood_is_refused(key: str) -> None:
    """Wrong types, unknown names, values that are none: one sentence, whatever it was."""
    backend = Malformed()
    backend.key = key
    with pytest.raises(ArgumentError) as caught:
        capabilities_of(backend)
    assert GIVEN[key][1] in str(caught.value)
    assert len(str(caught.value)) < 800 and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["numpy", "cppyy", "reference"])
def test_a_right_declaration_is_not_refused(name: str) -> None:
    """Those of lowbit's own backends."""
    backend = find_backend(name)
    assert availability_of(backend)
    assert capabilities_of(backend).operations


def test_an_unusual_declaration_is_not_refused() -> None:
    """Lists, sets and ranges are collections, numpy's numbers are numbers, and an exact operation may say more."""
    limits = {"bits": [np.int64(4)], "group_size": range(1, 5000), "convention": {"minimum"}}
    check_capabilities(Capabilities({"affine.dequantize": Declaration(limits, Arithmetic("direct"))}))  # type: ignore[arg-type]  # limits are wrong on purpose


class Derived(Backend):
    """Declares by classes derived from those of Python, and one long text."""

    name = "derived"

    def capabilities(self) -> Capabilities:
        limits = OrderedDict(bits=[Bits.FOUR, np.int64(8), np.float64(2)])
        details = {"made of": "x" * 10**7, "threads": 4}
        return Capabilities(OrderedDict({"packing.pack": Declaration(limits)}), details=details)  # type: ignore[arg-type]  # wrong on purpose


class Bits(IntEnum):
    FOUR = 4


def test_what_is_handed_on_is_plain() -> None:
    """A copy: what is read again later cannot differ from what was checked."""
    found = capabilities_of(Derived())
    values = found.operations["packing.pack"].limits["bits"]
    assert [(type(value), value) for value in values] == [(int, 4), (int, 8), (float, 2.0)]
    parts: list[Any] = [found.operations, found.operations["packing.pack"].limits, found.details]
    assert [type(part) for part in parts] == [dict] * 3
    assert found.details == {"made of": "x" * 1000, "threads": "4"}


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if not OPERATIONS[name].stateful])
def test_the_limits_are_the_parameters_of_the_operation(operation: str) -> None:
    """What may be limited is what a call names, and every case of the suite says it or implies it."""
    seen = 0
    cases = ((mark, case) for mark, case in cases_of((f"{operation}/C1",), (operation,), 0) if case.parameters())
    for mark, case in islice(cases, 4):
        if case.tier != HABIT:
            limits = set(LIMITS.get(operation, ()))
            if "format" in limits:  # each format has some of the options
                limits -= set(OPTIONS) - set(FORMATS[case.format].options)  # type: ignore[attr-defined]  # a FormatCase
            assert limits <= case.parameters().keys() | IMPLIED.keys()
            owner: Any = InProcess("none")
            assert run(mark, case, owner) == "" and owner.last is not None
            called = owner.last
            named = OPERATIONS[operation].parameters(*called.arguments, **called.choices)
            assert set(named) == limits
            seen += 1
    assert seen


def test_the_limits_of_sessions_are_their_parameters() -> None:
    """The same for operations that are opened."""
    from lowbit.moe.offload import Arrangement
    from lowbit.quantization.bfp import bfp12, bfp16

    opened = {"offload.engine": (Arrangement(1, 4, 2),), "kvcache.bfp": (2, 8, bfp12(4), bfp16(4))}
    opened["kvcache.kivi"] = (2, 8, 2, 4, 8)
    assert opened.keys() == {name for name in OPERATIONS if OPERATIONS[name].stateful}
    for name, arguments in opened.items():
        assert set(OPERATIONS[name].parameters(*arguments)) == set(LIMITS[name])


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_backend_is_refused_as_it_is_loaded(kind: type[Malformed]) -> None:
    """The host asks in this order, and the first refusal is the verdict."""
    with pytest.raises(ArgumentError) as caught:
        availability_of(kind())
        capabilities_of(kind())
    assert str(caught.value).startswith(CLASSES[kind])


@pytest.mark.parametrize("kind", (Controlling, Long, WithoutEndAtAll), ids=lambda kind: kind.__name__)
def test_a_run_has_one_verdict_and_no_case(kind: type[Malformed]) -> None:
    """The whole suite, the verdict before any case, exit status 1.

    One for each thing that the host asks for, its name, its availability and its capabilities: what is wrong with them
    does not reach the judge, which is given the sentence.
    """
    command = python_command("-m", "lowbit", "conformance", f"malformed:{kind.__name__}", "--json")
    done = subprocess.run(
        command, cwd=HERE, env=python_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"], report["counts"]["specified"]) == (1, "failed", 1), done.stderr
    failure = report["failures"][0]
    assert failure["verdict"] == "DECLARATION_REFUSED"
    assert failure["message"].startswith(f"DECLARATION_REFUSED: {CLASSES[kind]}")
    assert not report["passed"] and not report["not_declared"]
