"""Mutations of files: seeded changes of JSON by its structure, of its spelling, and of plain bytes.

The same seed gives the same mutations on every machine. Nothing here knows what a file is for.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

Tree = Any
Path = tuple[str | int, ...]

INTEGERS = (
    *(0, 1, -1, 2, 3, 7, 255, 256, 65_537),
    *(2**31 - 1, 2**31, -(2**31), 2**40, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**18, 10**30),
)
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, -1e308, 4.0, 1e18)
TEXTS = (
    *("", "a", "0", "nul\0", "esc\x1b[31m", "line\nfeed", "\u202eright to left", "\ud800", "\udfff\ud800", "\ufeff"),
    *("__proto__", "__class__", "constructor", "../../etc/passwd", "/dev/zero", "é" * 300, "x" * 5000),
)
DTYPES = (
    *("<f4", ">f4", "<f8", "<f2", "|u1", "|i1", "<u4", "<i8", "<i2", "|b1", "<c16", "f4", "=f4", "float32"),
    *("|O", "O", "<U5", "|S3", "|V8", "<M8[s]", "<m8", "i4,f4", "(2,3)f4", "<f16", "", "f", "{'names': ['a']}"),
)
SHAPES: tuple[list[Any], ...] = (
    *([], [0], [-1], [1], [0, 2**39], [2**39, 0], [2**39, 2**39, 0], [2**32, 2**32], [2**62, 4], [2**20, 2**20]),
    *([2**39] * 8, [1] * 8, [1] * 9, [1] * 40, [1.0], ["1"], [True], [None], [[1]], [10**30], [65_536, 65_536]),
)
OBJECTS: tuple[Tree, ...] = (
    *(
        {"float": "nan"},
        {"float": "inf"},
        {"float": "-inf"},
        {"float": "1"},
        {"float": 1},
        {"scalar": "<f4", "value": 1},
    ),
    *({"scalar": "|u1", "value": 300}, {"scalar": "<f2", "value": "x"}, {"scalar": "<i8", "value": {"float": "nan"}}),
    {"array": "<f4", "shape": [1, 1], "data": "AAAAAA=="},
    {"array": "<f8", "shape": [2**39], "data": ""},
    {"array": "|u1", "shape": [0, 2**39], "data": ""},
    {"type": "bfp.Format", "fields": {"block": 1, "mantissa": 4, "exponent": 8}},
    {"type": "offload.Arrangement", "fields": {}},
    {"type": "data.Resource", "fields": {}},
    {"type": "os.path", "fields": {}},
    {"type": "rope.np.ndarray", "fields": {}},
    {"fields": {}},
    {},
    [],
)
BASE64 = ("", "A", "AA", "AA==", "AAAA", "====", "AAA=AAAA", "A\nAA", "_-_-", "AAAAAAAA" * 64, "é")


def places(tree: Tree, path: Path = ()) -> Iterator[Path]:
    """Every place of a tree but its root."""
    if isinstance(tree, dict | list):
        for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield (*path, key)
            yield from places(inner, (*path, key))


def part(tree: Tree, path: Path) -> Tree:
    """What is there."""
    for key in path:
        tree = tree[key]
    return tree


def nested(depth: int, innermost: Tree) -> Tree:
    """Lists inside one another."""
    for _ in range(depth):
        innermost = [innermost]
    return innermost


def mutated(tree: Tree, chance: random.Random, times: int = 1) -> Tree:
    """A copy of a tree with some changes."""
    tree = copy.deepcopy(tree)
    for _ in range(times):
        every = list(places(tree))
        if not every:
            break
        path = chance.choice(every)
        chance.choice(CHANGES)(part(tree, path[:-1]), path[-1], tree, every, chance)
    return tree


Change = Callable[[Tree, Any, Tree, list[Path], random.Random], None]


def _another(holder: Tree, key: Any, tree: Tree, every: list[Path], chance: random.Random) -> None:
    """A value of the kind that is there, or that the key asks for."""
    value = holder[key]
    if key == "shape":
        holder[key] = copy.deepcopy(chance.choice(SHAPES))
    elif key in ("array", "scalar"):
        holder[key] = chance.choice(DTYPES)
    elif key == "data":
        holder[key] = chance.choice(BASE64)
    elif isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int):
        step = chance.choice((value + 1, value - 1, -value, value * 2, value * 1000, value << 20, value + 2**40))
        holder[key] = chance.choice((step, chance.choice(INTEGERS)))
    elif isinstance(value, float):
        holder[key] = chance.choice(FLOATS)
    elif isinstance(value, str):
        holder[key] = chance.choice(TEXTS)
    else:
        holder[key] = copy.deepcopy(chance.choice(OBJECTS))


def _of_another_kind(holder: Tree, key: Any, tree: Tree, every: list[Path], chance: random.Random) -> None:
    kinds = (None, True, chance.choice(INTEGERS), chance.choice(FLOATS), chance.choice(TEXTS), chance.choice(OBJECTS))
    holder[key] = copy.deepcopy(chance.choice(kinds))


def _swap(holder: Tree, key: Any, tree: Tree, every: list[Path], chance: random.Random) -> None:
    other = chance.choice(every)
    value = copy.deepcopy(part(tree, other))
    part(tree, other[:-1])[other[-1]] = copy.deepcopy(holder[key])
    try:
        holder[key] = value
    except (KeyError, IndexError):  # the other place held this one
        return


def _copy_from_elsewhere(holder: Tree, key: Any, tree: Tree, every: list[Path], chance: random.Random) -> None:
    holder[key] = copy.deepcopy(part(tree, chance.choice(every)))


def _delete(holder: Tree, key: Any, tree: Tree, every: list[Path], chance: random.Random) -> None:
    del holder[key]


def _add(holder: Tree, key: Any, tree: Tree, every: list[Path], chance: random.Random) -> None:
    if isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(holder[key])] * chance.choice((1, 2, 50))
    else:
        holder[chance.choice((*TEXTS, "shape", "data", "flags", "result", "bound"))] = copy.deepcopy(holder[key])


def _nest(holder: Tree, key: Any, tree: Tree, every: list[Path], chance: random.Random) -> None:
    holder[key] = nested(chance.choice((1, 2, 10, 60)), holder[key])


def _edit_text(holder: Tree, key: Any, tree: Tree, every: list[Path], chance: random.Random) -> None:
    """Change, cut or lengthen a text; base64 stays base64, so the numbers of an array change."""
    text = holder[key]
    if not isinstance(text, str) or not text:
        return _another(holder, key, tree, every, chance)
    where = chance.randrange(len(text))
    ends = (text[:where], text[where:], text + text, text[:where] + chance.choice("A/8f+") + text[where + 1 :])
    holder[key] = chance.choice(ends)


CHANGES: tuple[Change, ...] = (
    *(_another, _another, _another, _another, _of_another_kind, _swap, _copy_from_elsewhere),
    *(_delete, _add, _nest, _edit_text, _edit_text),
)


# **The spelling** of JSON: what a tree cannot say.


def spelled(tree: Tree, chance: random.Random) -> bytes:
    """The text of a tree, in one case of five with something that `json.dumps` does not write."""
    text = json.dumps(tree)
    match chance.randrange(60):
        case 0:
            return b"\xef\xbb\xbf" + text.encode()
        case 1:
            return text.encode(chance.choice(("utf-16", "utf-32", "utf-16-be")))
        case 2:
            return _number(text, chance, "9" * chance.choice((20, 400, 4300, 4301, 100_000)))
        case 3:
            return _number(text, chance, chance.choice(("1e999", "-1e999", "1e-999", "1E400", "NaN", "-Infinity")))
        case 4:
            return _number(text, chance, chance.choice(("01", "+1", "0x10", "1.", ".5", "1_0", "--1", "1e", "٣")))
        case 5:
            return text.replace("{", '{"id": 1, "id": 2, ', 1 + chance.randrange(2)).encode()
        case 6:
            return text.replace(": ", ": [" * 100_000, 1).encode()
        case 7:
            return (text + chance.choice(("}", "\0", " null", text))).encode()
        case 8:
            return text.replace('"', "'").encode()
        case 9:
            return json.dumps(tree, ensure_ascii=False).encode(errors="surrogatepass")
    return text.encode() if chance.randrange(10) else mangled(text.encode(), chance)


def _number(text: str, chance: random.Random, number: str) -> bytes:
    """The text with one of its numbers replaced."""
    starts = [place for place, (a, b) in enumerate(pairwise(text)) if a == " " and b.isdigit()]
    if not starts:
        return text.encode()
    start = chance.choice(starts) + 1
    end = start
    while end < len(text) and text[end] in "0123456789.e+-":
        end += 1
    return (text[:start] + number + text[end:]).encode()


def mangled(data: bytes, chance: random.Random) -> bytes:
    """Bytes flipped, cut off, left out, repeated or put in."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 3, 10))):
        if not changed:
            break
        where, length = chance.randrange(len(changed)), chance.choice((1, 4, 8, 64))
        match chance.randrange(7):
            case 0:
                changed[where] ^= 1 << chance.randrange(8)
            case 1:
                changed[where] = chance.choice((0, 1, 127, 128, 255))
            case 2:
                del changed[where:]
            case 3:
                del changed[where : where + length]
            case 4:
                changed[where:where] = changed[where : where + length]
            case 5:
                changed[where : where + length] = chance.choice((b"\xff", b"\0", b"\x80")) * length
            case 6:
                number = chance.choice(INTEGERS) % 2**64
                changed[where : where + 8] = number.to_bytes(8, "little")
    return bytes(changed)
