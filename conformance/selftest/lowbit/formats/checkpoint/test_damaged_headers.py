"""Damaged headers of shards: whatever their bytes become, there is a model or an error of lowbit's own."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoint import MIXTRAL, crafted, published, shapes, write

from lowbit.errors import LowbitError
from lowbit.formats.checkpoint.reader import Checkpoint, open_checkpoint
from lowbit.model.decoder import Decoder
from lowbit.model.weights import in_memory

SMALL = MIXTRAL | {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "head_dim": 4, "vocab_size": 4, "num_local_experts": 2}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("checkpoint") / "small", published(SMALL), 1)


def survives(path: Path) -> bool:
    """Open, read and run: True if it spoke, False for an error of lowbit's own."""
    try:
        decoder = Decoder(in_memory(open_checkpoint(path)))
        decoder.logits(decoder.hidden([0, 1], decoder.new_state()))
    except LowbitError as error:
        assert "\n" not in str(error)
        return False
    return True


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(edits=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=4), data=st.data())
def test_a_damaged_header(edits: list[tuple[int, int]], data: st.DataObject, small: Path) -> None:
    """Whatever some bytes of the header become, the directory speaks or is refused by an error of lowbit's own."""
    whole = bytearray((small / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    for place, value in edits:
        whole[place % header] = value
    path = small.parent / "damaged"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_bytes((small / "config.json").read_bytes())
    (path / "model.safetensors").write_bytes(whole)
    survives(path)


TABLES = st.dictionaries(
    st.sampled_from([*shapes(SMALL), "other", ""]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F16", "BF16", "F32", "F64", "I8", "F4", "", None]),
            "shape": st.lists(st.sampled_from([0, 1, 2, 4, 8, 2**31, 2**63, 2**64, -1, 0.5, None]), max_size=4),
            "data_offsets": st.lists(st.sampled_from([0, 8, 16, 32, 64, 128, 2**63, 2**64 - 1, -8]), max_size=3),
        }
    ),
    max_size=5,
)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(table=TABLES, size=st.sampled_from([0, 16, 64, 128]))
def test_a_crafted_header(table: dict[str, Any], size: int, small: Path) -> None:
    """Tables of any claims, none of which is a model, are refused by an error of lowbit's own."""
    path = small.parent / "crafted"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_bytes((small / "config.json").read_bytes())
    (path / "model.safetensors").write_bytes(crafted(table, bytes(size)))
    assert not survives(path)


def test_the_sound_one_survives(small: Path) -> None:
    """The test of the tests above: the directory that they damage speaks."""
    assert survives(small)
    assert isinstance(open_checkpoint(small), Checkpoint)
