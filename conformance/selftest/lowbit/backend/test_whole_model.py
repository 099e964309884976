"""What is asked of a model on a device and what it says: sizes, settings, the account, backends that bring none."""

from fractions import Fraction
from typing import Any

import pytest

from lowbit.backend import load
from lowbit.backend.whole_model import UNITS, DeviceAccount, DeviceSettings, bytes_of
from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.model.replay import Recall


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("number", ["1", "12", "0.3", "7.999999999"])
def test_sizes_are_exact(number: str, unit: str) -> None:
    """A size is its number times its unit in exact arithmetic, rounded down, with a space before the unit or none."""
    meant = int(Fraction(number) * UNITS[unit])
    if meant:
        assert bytes_of(number + unit) == bytes_of(f"{number} {unit}") == meant


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1GiB", "1e9", "12gib", "1 2", "0", "0.1", "1,5GiB", "١GiB", "9" * 400, "1.GiB", "nan", "1PiB\n"],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    """Anything else is refused with one line that names the argument."""
    with pytest.raises(ArgumentError, match=r"^--device-memory is ") as caught:
        bytes_of(text, "--device-memory")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [{"memory": 0}, {"context": 0}, {"buffers": 0}, {"mode": "both"}, {"prefetch": "yes"}, {"keys": "int8"}],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    """A setting that there is not is refused by its name."""
    with pytest.raises(ArgumentError, match=f"^{next(iter(wrong))} is "):
        DeviceSettings(**wrong)


def test_the_account_says_everything() -> None:
    """Slots, recall, bytes, prefetch and its reason, and experts on the host are in the sentence and in the JSON."""
    account = DeviceAccount(
        "a device", 2**30, 2**29, 32, 8, 3, Recall(20, 12, 4), 5 * 2**20, "off", "it cost 3 ms a token", 7
    )
    for word in ("512.0 MiB of 1.0 GiB", "3 of 8", "32 layers", "12 of 20", "4 more", "0.600", "5.0 MiB", "3 ms", "7 "):
        assert word in account.sentence()
    assert account.describe()["recall"] == {"needed": 20, "resident": 12, "staged": 4, "value": 0.6}


def test_other_backends_bring_no_decoder() -> None:
    """A backend without a decoder of its own says so, instead of running the model some other way."""
    backend = load("reference")
    assert not backend.runs_models
    nothing: Any = None
    with pytest.raises(NotDeclaredError, match="backend reference does not declare whole models"):
        backend.decoder(nothing, DeviceSettings())
