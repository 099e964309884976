"""Reading GGUF: what a sound file says, and that no other file does worse than an error of one line."""

import io
import os
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGMLQuantizationType
from tiny_gguf import CONFIG, Published, published, write

from lowbit.attention.rope import Scaling, llama3_scaling
from lowbit.errors import ArgumentError, FormatError, LowbitError
from lowbit.formats.gguf import header
from lowbit.formats.gguf.reader import check_model, open_gguf, read_llama
from lowbit.formats.gguf.tokenizer import read_tokenizer
from lowbit.model.config import LlamaConfig
from lowbit.model.decoder import Decoder, next_logits
from lowbit.model.matrices import to_float
from lowbit.quantization.affine import QuantizedMatrix
from lowbit.system import memory
from lowbit.tensor_formats.stored import Stored

F16, F32 = GGMLQuantizationType.F16, GGMLQuantizationType.F32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Published]:
    model = published()
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model), model


def load(path: Path) -> Decoder:
    """All that a command does with a file before it computes."""
    source = open_gguf(path)
    read_tokenizer(source)
    weights = read_llama(source)
    return Decoder(weights, lambda matrix: lambda x: x @ to_float(matrix))


# A sound file.


def test_weights_come_as_published(tiny: tuple[Path, Published]) -> None:
    """Every matrix is the published one, transposed, with half-split query and key channels; norms and config too."""
    path, model = tiny
    weights = read_llama(open_gguf(path))
    assert weights.config == LlamaConfig(**(vars(CONFIG) | {"rms_epsilon": float(np.float32(1e-5))}))
    names = {"query": "attn_q", "key": "attn_k", "value": "attn_v", "output": "attn_output"}
    names |= {f"feed_forward.{name}": f"ffn_{name}" for name in ("gate", "up", "down")}
    for i, layer in enumerate(weights.layers):
        for name, stored in names.items():
            matrix = layer.linears()[name]
            assert isinstance(matrix, QuantizedMatrix)
            np.testing.assert_array_equal(to_float(matrix), model.tensors[f"blk.{i}.{stored}"].T, err_msg=name)
        np.testing.assert_array_equal(layer.attention_norm, model.tensors[f"blk.{i}.attn_norm"])
        np.testing.assert_array_equal(layer.feed_forward_norm, model.tensors[f"blk.{i}.ffn_norm"])
    np.testing.assert_array_equal(weights.norm, model.tensors["output_norm"])
    np.testing.assert_array_equal(weights.embedding, model.tensors["token_embd"])
    np.testing.assert_array_equal(to_float(weights.head), model.tensors["token_embd"].T)


def test_a_head_of_its_own_and_plain_floats(tmp_path: Path) -> None:
    """An untied head is its own tensor, matrices of F16 stay so, and those of F32 are arrays."""
    model = published(seed=1, kind=F16, head_kind=F32, tied=False)
    weights = read_llama(open_gguf(write(tmp_path / "f16.gguf", model)))
    query = weights.layers[0].query
    assert isinstance(query, Stored) and query.format == "float16"
    np.testing.assert_array_equal(to_float(query), model.tensors["blk.0.attn_q"].T)
    assert isinstance(weights.head, np.ndarray)
    np.testing.assert_array_equal(weights.head, model.tensors["output"].T)
    np.testing.assert_array_equal(weights.embedding, model.tensors["token_embd"])


def test_the_header_agrees_with_the_gguf_package(tiny: tuple[Path, Published]) -> None:
    """The walk and the package's own reader see the same metadata, shapes, types, offsets and bytes."""
    path, _ = tiny
    header, reader = open_gguf(path).header, GGUFReader(path)
    assert set(header.metadata) == {key for key in reader.fields if not key.startswith("GGUF.")}
    for key, value in header.metadata.items():
        plain = value.tolist() if isinstance(value, np.ndarray) else value
        assert plain == reader.fields[key].contents(), key
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.type.value, info.offset, info.nbytes) == (
            tensor.tensor_type.value,
            tensor.data_offset,
            tensor.n_bytes,
        )


def test_defaults_of_absent_metadata(tmp_path: Path) -> None:
    """Without kv heads there are as many as query heads; without a rope base it is 10000."""
    config = LlamaConfig(**(vars(CONFIG) | {"kv_heads": CONFIG.heads}))
    absent = {"llama.attention.head_count_kv": None, "llama.rope.freq_base": None}
    path = write(tmp_path / "defaults.gguf", published(config=config), metadata=absent)
    found = open_gguf(path).config
    assert (found.kv_heads, found.rope_base) == (config.heads, 10000.0)


def test_rotary_factors(tmp_path: Path) -> None:
    """The factors of a Llama 3.1 come with the file, rounded to float32, and change the answer."""
    scaling = llama3_scaling(CONFIG.head_dim, CONFIG.rope_base, 8.0, 1.0, 4.0, 64)
    model = published(config=replace(CONFIG, rope_scaling=scaling))
    weights = read_llama(open_gguf(write(tmp_path / "m.gguf", model)))
    rounded = np.array(scaling.factors, np.float32)
    assert len(set(rounded)) >= 4
    assert weights.config.rope_scaling == Scaling(tuple(rounded.tolist()))
    plain = replace(weights, config=replace(weights.config, rope_scaling=None))
    logits = [
        next_logits(Decoder(each, lambda matrix: lambda x: x @ to_float(matrix)), [5, 9, 7, 7, 200, 31] * 4)
        for each in (weights, plain)
    ]
    assert float(np.abs(logits[0] - logits[1]).max()) > 1e-2


FACTORS = {
    "number of factors in rope_scaling is 7; allowed: 8": np.ones(7, np.float32),
    r"scaling of the rotation is 0\.0": np.array([1, 1, 1, 1, 1, 1, 1, 0], np.float32),
    r"shape of tensor 'rope_freqs\.weight'": np.ones((1, 8), np.float32),
}


@pytest.mark.parametrize("message", FACTORS)
def test_rotary_factors_that_are_refused(message: str, tmp_path: Path) -> None:
    """One for each pair of channels, above 0, in one row; and only a Llama has them."""
    path = write(tmp_path / "m.gguf", change=lambda writer: writer.add_tensor("rope_freqs.weight", FACTORS[message]))
    with pytest.raises(FormatError, match=message):
        read_llama(open_gguf(path))
    model = published(architecture="qwen2")
    path = write(tmp_path / "q.gguf", model, change=lambda w: w.add_tensor("rope_freqs.weight", np.ones(8, np.float32)))
    with pytest.raises(FormatError, match=r"'rope_freqs\.weight'; allowed: the tensors of architecture 'qwen2'"):
        read_llama(open_gguf(path))


# A file of another kind.


REFUSED_METADATA: list[tuple[str, Any, str]] = [
    ("llama.block_count", None, "missing"),
    ("llama.block_count", 3, "missing"),
    ("llama.block_count", 2**31, "llama.block_count"),
    ("llama.block_count", "two", "an integer"),
    ("llama.block_count", True, "an integer"),
    ("llama.attention.head_count", 0, "heads"),
    ("llama.attention.head_count", 3, "heads"),
    ("llama.attention.head_count_kv", 4, "blk.0.attn_k"),
    ("llama.attention.layer_norm_rms_epsilon", float("nan"), "rms_epsilon is nan"),
    ("llama.rope.freq_base", -1.0, "rope_base is -1.0"),
    ("llama.rope.scaling.type", "ntk", r"llama\.rope\.scaling\.type is 'ntk'; allowed: 'none', 'linear' or 'yarn'"),
    ("llama.rope.scaling.type", "yarn", r"llama\.rope\.scaling\.factor is missing"),
    ("llama.rope.scaling.type", "linear", r"llama\.rope\.scaling\.factor is missing"),
    ("llama.rope.dimension_count", 8, "llama.rope.dimension_count is 8"),
    ("llama.expert_count", 8, "llama.expert_count is 8"),
    ("llama.attention.key_length", 15, "llama.attention.value_length|head_dim"),
    ("general.alignment", 7, "general.alignment"),
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED_METADATA)
def test_metadata_that_is_refused(key: str, value: Any, message: str, tmp_path: Path) -> None:
    """A number that is missing, out of range, of another kind, or that means another model, is named."""
    path = write(tmp_path / "m.gguf", metadata={key: value})
    with pytest.raises(FormatError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("m.gguf: ")


def test_another_architecture_is_named(tmp_path: Path) -> None:
    """The error says which architecture the file has and which ones are read."""
    path = write(tmp_path / "q.gguf", architecture="starcoder")
    with pytest.raises(
        FormatError,
        match=r"general\.architecture is 'starcoder'; allowed: 'llama', 'qwen2', 'qwen3', 'gemma2', 'g",
    ):
        load(path)


def test_a_tensor_that_would_be_left_out_is_named(tmp_path: Path) -> None:
    """A bias, left out in silence, would make another model of the file."""

    def add_bias(writer: GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32))

    with pytest.raises(FormatError, match=r"'blk\.0\.attn_q\.bias'"):
        load(write(tmp_path / "b.gguf", change=add_bias))


@pytest.mark.parametrize("name", ["token_embd", "output_norm", "blk.0.ffn_norm", "blk.1.ffn_down"])
def test_a_tensor_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    """Before any weight is read, whichever it is."""
    model = published()
    del model.tensors[name]
    message = rf"m\.gguf: tensor '{name}\.weight' is missing; it must be in the file"
    with pytest.raises(FormatError, match=message):
        check_model(open_gguf(write(tmp_path / "m.gguf", model)))


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    """The sentence says how to join the parts; a number of parts that is no integer is refused as well."""
    with pytest.raises(FormatError, match=r"split\.count is 2; allowed: 1, .* `llama-gguf-split --merge FIRST_PART"):
        load(write(tmp_path / "m.gguf", metadata={"split.count": 2}))
    with pytest.raises(FormatError, match=r"split\.count is a str; allowed: an integer"):
        load(write(tmp_path / "m.gguf", metadata={"split.count": "2"}))
    load(write(tmp_path / "m.gguf", metadata={"split.count": 1}))


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    """Shapes are those that the metadata ask for."""
    model = published()
    model.tensors["blk.1.ffn_up"] = model.tensors["blk.1.ffn_up"][:64]
    with pytest.raises(FormatError, match=r"layers\[1\]\.feed_forward\.up"):
        load(write(tmp_path / "s.gguf", model))


def test_no_file_and_no_gguf(tmp_path: Path) -> None:
    """A path that leads nowhere, a folder, an empty file and a text are told apart from a model in words."""
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("GGUF is what this is not.\n" * 10)
    (tmp_path / "other").write_bytes(b"PK\x03\x04" + bytes(100))
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ArgumentError, match=r"model is .*allowed: a GGUF file"):
            open_gguf(path)
    for name, message in (("empty", "magic"), ("text", "version"), ("other", r"magic is b'PK\\x03\\x04'")):
        with pytest.raises(FormatError, match=message):
            open_gguf(tmp_path / name)


# A damaged file.


def survive(path: Path) -> bool:
    """Load a file, and let it speak if it loads: True if it did, False for an error of lowbit's own."""
    try:
        decoder = load(path)
        if decoder.config.context >= 2:
            decoder.logits(decoder.hidden([0, 1], decoder.new_state()))
    except LowbitError as error:
        assert "\n" not in str(error)
        return False
    return True


@pytest.fixture(scope="module")
def small_header(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with every kind of field and as few bytes of header as that takes."""
    config = LlamaConfig(1, 32, 32, 2, 1, 16, 8, 8, 10000.0, 1e-5)
    tokens = ["<|end|>", "a", "b", "ab", "c", "d", "e", "f"]
    path = tmp_path_factory.mktemp("fuzz") / "small.gguf"
    metadata = {"general.alignment": 32, "tokenizer.ggml.add_bos_token": True}
    write(path, published(config=config), tokens=tokens, merges=["a b"], metadata=metadata)
    return path.read_bytes()


def header_bytes(data: bytes, path: Path) -> int:
    path.write_bytes(data)
    return min(info.offset for info in open_gguf(path).header.tensors.values())


MEMORY = 1 << 30
DAMAGE: dict[str, Callable[[int], int]] = {
    "zero": lambda byte: 0,
    "ones": lambda byte: 0xFF,
    "lowest bit": lambda byte: byte ^ 1,
    "highest bit": lambda byte: byte ^ 0x80,
    "plus one": lambda byte: (byte + 1) % 256,
}


@pytest.mark.whole
@pytest.mark.parametrize("damage", DAMAGE)
def test_every_byte_of_the_header_damaged(
    damage: str, small_header: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever one byte of the header becomes, the file loads and speaks, or is refused by a LowbitError."""
    monkeypatch.setattr(memory, "available_bytes", lambda: MEMORY)  # asking the system takes half of a load
    path = tmp_path / "damaged.gguf"
    loaded = refused = 0
    for place in range(header_bytes(small_header, path)):
        damaged = bytearray(small_header)
        damaged[place] = DAMAGE[damage](damaged[place])
        path.write_bytes(damaged)
        if survive(path):
            loaded += 1
        else:
            refused += 1
    assert loaded > 0, "damage to a name that nobody reads does no harm"
    assert refused > 500, "most of a header matters"


def test_truncated_at_every_length(small_header: bytes, tmp_path: Path) -> None:
    """A file that ends early is refused, wherever it ends."""
    path = tmp_path / "short.gguf"
    header = header_bytes(small_header, path)
    lengths = [*range(header + 1), *range(header, len(small_header), 97), len(small_header) - 1]
    for length in lengths:
        path.write_bytes(small_header[:length])
        with pytest.raises(FormatError):
            open_gguf(path)


def test_data_damaged_at_random(small_header: bytes, tmp_path: Path) -> None:
    """Damaged weights are weights, or not finite and refused."""
    path, rng = tmp_path / "data.gguf", np.random.default_rng(3)
    header = header_bytes(small_header, path)
    outcomes = set()
    for _ in range(150):
        damaged = bytearray(small_header)
        for place in rng.integers(header, len(damaged), 4):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        outcomes.add(survive(path))
    path.write_bytes(small_header[:header] + b"\xff" * (len(small_header) - header))
    outcomes.add(survive(path))
    assert outcomes == {True, False}


def test_a_file_that_shrinks_after_it_was_opened(tiny: tuple[Path, Published], tmp_path: Path) -> None:
    """Tensors are read and not mapped, so a file cut under the reader is an error and not a fault."""
    path = tmp_path / "shrinks.gguf"
    path.write_bytes(tiny[0].read_bytes())
    source = open_gguf(path)
    path.write_bytes(tiny[0].read_bytes()[:5000])
    with pytest.raises(FormatError, match="changed since it was opened"):
        read_llama(source)


def test_a_file_that_is_replaced_after_it_was_opened(tiny: tuple[Path, Published], tmp_path: Path) -> None:
    """Tensors are those of the file whose header was read, not of another one of the same size and time."""
    path, other = tmp_path / "model.gguf", write(tmp_path / "other.gguf", published(seed=9))
    path.write_bytes(tiny[0].read_bytes())
    for file in (path, other):
        os.utime(file, ns=(0, 0))
    source = open_gguf(path)
    os.replace(other, path)
    with pytest.raises(FormatError, match="changed since it was opened"):
        source.tensor("token_embd.weight")


# Claims that would cost time or memory if they were believed.


def crafted(*, tensors: int = 0, entries: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + body


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return string(name) + shape + struct.pack("<IQ", kind, offset)


HUGE = 2**63 - 1
CRAFTED = {
    "version 1": (crafted(version=1), "version is 1; allowed: 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
    "too many tensors": (crafted(tensors=2**60), "number of tensors"),
    "too many entries": (crafted(entries=2**60), "number of metadata entries"),
    "a long key": (crafted(entries=1, body=struct.pack("<QI", HUGE, 0) + bytes(9)), "length of key"),
    "a long string": (crafted(entries=1, body=entry("k", 8, struct.pack("<Q", HUGE))), "length of value of 'k'"),
    "a long array": (crafted(entries=1, body=entry("k", 9, struct.pack("<IQ", 4, HUGE))), "length of value of 'k'"),
    "a long array of strings": (crafted(entries=1, body=entry("k", 9, struct.pack("<IQ", 8, HUGE))), "length of value"),
    "nested arrays": (crafted(entries=1, body=entry("k", 9, struct.pack("<IQ", 9, 1))), "element type of value of 'k'"),
    "an unknown type": (crafted(entries=1, body=entry("k", 13, bytes(8))), "type of value of 'k' is 13"),
    "a boolean of 2": (crafted(entries=1, body=entry("k", 7, b"\x02")), "0 or 1 for a boolean"),
    "no UTF-8": (crafted(entries=1, body=entry("k", 8, struct.pack("<Q", 2) + b"a\xff")), "byte 0xff at 1"),
    "a key twice": (crafted(entries=2, body=2 * entry("k", 0, b"\x01")), "a key that is not used before"),
    "no dimensions": (crafted(tensors=1, body=tensor("t", [])), "number of dimensions of tensor 't' is 0"),
    "a dimension of 0": (crafted(tensors=1, body=tensor("t", [32, 0])), "dimension 1 of tensor 't'"),
    "too many elements": (crafted(tensors=1, body=tensor("t", [2**40, 2**40])), "dimension 1 of tensor 't'"),
    "a type that is none": (crafted(tensors=1, body=tensor("t", [32], kind=5)), "type of tensor 't' is 5"),
    "half a block": (crafted(tensors=1, body=tensor("t", [48], kind=3)), "a multiple of 32"),
    "an offset off the grid": (crafted(tensors=1, body=tensor("t", [1], offset=4)), "a multiple of 32"),
    "an offset outside": (crafted(tensors=1, body=tensor("t", [1], offset=2**62)), "inside the file"),
    "a tensor twice": (crafted(tensors=2, body=2 * tensor("t", [1]) + bytes(99)), "a name that is not used before"),
    "tensors that overlap": (
        crafted(tensors=2, body=tensor("t", [16]) + tensor("u", [16], offset=32) + bytes(200)),
        "offset of tensor 'u'",
    ),
    "a long name": (crafted(tensors=1, body=tensor("t" * 65, [1])), "at most 64 bytes"),
    "an escape in a name": (crafted(entries=2, body=2 * entry("k\n\x1b[2J", 0, b"\x01")), r"'k\\n\\x1b\[2J'"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_claims_are_held_against_the_file(name: str, tmp_path: Path) -> None:
    """Each violation is refused at once, in a line that names the field and what is allowed."""
    data, message = CRAFTED[name]
    path = tmp_path / "crafted.gguf"
    path.write_bytes(data)
    start = time.perf_counter()
    with pytest.raises(FormatError, match=message) as caught:
        open_gguf(path)
    assert time.perf_counter() - start < 60.0, "it went through all that the file claims to hold"
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


CLAIMED = {
    "strings": entry("k", 9, struct.pack("<IQ", 8, 2**24)),
    "bytes": entry("k", 9, struct.pack("<IQ", 0, 2**38)),
    "a string": entry("k", 8, struct.pack("<Q", 2**38)),
    "a key": struct.pack("<Q", 2**38),
}


@pytest.mark.parametrize("name", CLAIMED)
def test_a_sparse_file_does_not_make_a_header_long(name: str, tmp_path: Path) -> None:
    """A file of a terabyte of which nothing was written holds whatever its header claims; a header has a limit."""
    path = tmp_path / "sparse.gguf"
    path.write_bytes(crafted(entries=1, body=CLAIMED[name]))
    os.truncate(path, 2**40)
    with pytest.raises(FormatError, match=r"length of .* allowed: at most (4|33)\d+ in the bytes that are left"):
        open_gguf(path)


def test_a_string_of_an_array_that_is_refused_is_named(tmp_path: Path) -> None:
    """One that is cut off, and one that is no UTF-8, after some that are sound."""
    path = tmp_path / "crafted.gguf"
    for last, message in (
        (struct.pack("<Q", 9) + b"abc", "length of element 2 of value of 'k' is 9; allowed: at most 3 in"),
        (struct.pack("<Q", 2) + b"a\xff", "element 2 of value of 'k' is byte 0xff at 1; allowed: UTF-8"),
        (b"1234567", "length of element 2 of value of 'k' is 8 bytes long; allowed: at most the 7 bytes"),
    ):
        array = struct.pack("<IQ", 8, 3) + string("a") + string("") + last
        path.write_bytes(crafted(entries=1, body=entry("k", 9, array)))
        with pytest.raises(FormatError, match=message):
            open_gguf(path)


@pytest.mark.parametrize("window", (8, 11, 16, 17, 64))
def test_strings_longer_than_a_read_and_across_two(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read at once, an array holds the same strings, and what follows it is read from its place."""
    monkeypatch.setattr(header, "WINDOW", window)
    texts = ["", "a", "\N{GREEK SMALL LETTER OMEGA}" * 9, "b" * 40, "", "c" * window, "d" * (window - 8), "e"]
    array = struct.pack("<IQ", 8, len(texts)) + b"".join(map(string, texts))
    data = crafted(entries=2, body=entry("k", 9, array) + entry("l", 8, string("after")))
    assert header.walk(io.BytesIO(data), len(data), "m.gguf").metadata == {"k": texts, "l": "after"}
