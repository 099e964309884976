"""Small launches of every kernel of `lowbit_cuda.kernels`, each with how far its result may lie from its meaning.

Where sums can be exact they are: small integers and powers of two, of which any order of additions makes the same
float32, so a result is held to every bit. Where an exponential or a root is in it, the bound is the specification's.
`cuda_cases_linear` has the products.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import numpy as np

from lowbit.arrays import F32, Array
from lowbit.attention.bounds import attend_bound
from lowbit.contract.rounding import Arithmetic, gamma
from lowbit.model.bounds import rms_norm_bound, swiglu_bound
from lowbit_cuda.kernels.table import MAKERS, kernel
from lowbit_cuda.port import Kernel, Number
from lowbit_gpusim.meanings import meaning_of
from lowbit_gpusim.shim.launching import Launch, Options

Limits = dict[str, Array]

FLOAT32 = Arithmetic("direct", "float32", lambda rows, group: rows + 16)
"""A sum in float32, in any order, and what the kernels do around it."""


@dataclass(frozen=True, eq=False)
class Case:
    """One launch.

    Attributes:
        what: what is special about it.
        kernel: which.
        arrays: by name; outputs are made when it is launched.
        numbers: the others.
        limits: for a written array how far from the meaning it may lie; the others have its bits.
    """

    what: str
    kernel: Kernel
    arrays: dict[str, Array]
    numbers: dict[str, Number]
    limits: Limits = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kernel.name}-{self.what}"

    def launch(self, options: Options | None = None) -> Launch:
        """With arrays of its own."""
        arrays = {name: array.copy() for name, array in self.arrays.items()}
        for parameter in self.kernel.parameters:
            if parameter.access == "write" and parameter.exact:
                count = parameter.nbytes(self.numbers) // np.dtype(parameter.kind).itemsize
                arrays[parameter.name] = np.zeros(count, parameter.kind)
        return Launch(self.kernel, arrays, self.numbers, options or Options())

    def expected(self) -> dict[str, Array]:
        """What the meaning writes."""
        launch = self.launch()
        meaning_of(self.kernel)(**launch.arrays, **self.numbers)
        return self.written(launch)

    def written(self, launch: Launch) -> dict[str, Array]:
        """What a launch wrote."""
        return {p.name: launch.arrays[p.name] for p in self.kernel.parameters if p.access in ("write", "update")}

    def wrong(self, launch: Launch) -> str:
        """What is wrong with what a launch wrote; nothing, if it is right."""
        for name, meant in self.expected().items():
            given = launch.arrays[name]
            if name not in self.limits:
                same = given.view(np.uint8) == meant.view(np.uint8)
                if not same.all():
                    first = int(np.argmin(same)) // given.itemsize
                    return f"{name}[{first}] is {given[first]}, and means {meant[first]}"
                continue
            off = np.abs(given.astype(np.float64) - meant.astype(np.float64))
            beyond = ~(off <= self.limits[name].ravel())
            if beyond.any():
                first = int(np.argmax(beyond))
                limit = self.limits[name].ravel()[first]
                return f"{name}[{first}] is {given[first]}, and means {meant[first]} within {limit:.3g}"
        return ""


def random(seed: int) -> np.random.Generator:
    """Numbers that are the same everywhere."""
    return np.random.default_rng([6, seed])


def integers(seed: int, *shape: int, most: int = 3) -> F32:
    """Small integers of both signs, as float32."""
    return random(seed).integers(-most, most, shape, endpoint=True).astype(np.float32)


def floats(seed: int, *shape: int) -> F32:
    """Of both signs, most of them below 3."""
    return random(seed).standard_normal(shape).astype(np.float32)


def choices_of(name: str) -> Iterator[dict[str, object]]:
    """Every choice of a kernel."""
    allowed = MAKERS[name][1]
    for values in product(*allowed.values()):
        yield dict(zip(allowed, values, strict=True))


def variants(name: str) -> list[Kernel]:
    """A kernel in all its variants."""
    return [kernel(name, **choices) for choices in choices_of(name)]


def every_kernel() -> list[Kernel]:
    """Each kernel of the table with each combination of its choices."""
    return [one for name in MAKERS for one in variants(name)]


# **Between products.**


def rms_norm() -> Iterator[Case]:
    for tokens, columns in ((1, 8), (3, 300), (2, 1024)):
        x, gain = floats(columns, tokens, columns), floats(columns + 1, columns)
        numbers: dict[str, Number] = {"tokens": tokens, "columns": columns, "epsilon": 1e-5}
        wide, given = x.astype(np.float64), gain.astype(np.float64)
        epsilon = float(np.float32(1e-5))
        exact = wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + epsilon) * given
        limit = rms_norm_bound(x, gain, epsilon, FLOAT32, exact).limit + np.abs(exact) * 2.0**-24
        yield Case(f"{tokens}x{columns}", kernel("rms_norm"), {"x": x.ravel(), "gain": gain}, numbers, {"y": limit})


def swiglu() -> Iterator[Case]:
    for count in (1, 1023, 1030):
        gate, up = 8 * floats(count, 1, count), floats(count + 1, 1, count)
        exact = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * up
        limit = swiglu_bound(gate, up, FLOAT32, exact).limit + np.abs(exact) * 2.0**-24
        yield Case(f"{count}", kernel("swiglu"), {"gate": gate[0], "up": up[0]}, {"count": count}, {"y": limit})


def add() -> Iterator[Case]:
    for count in (1, 1023, 1030):
        yield Case(f"{count}", kernel("add"), {"y": floats(count, count), "x": floats(0, count)}, {"count": count})


def combine() -> Iterator[Case]:
    for tokens, experts, columns in ((1, 2, 300), (3, 1, 7), (2, 5, 256)):
        arrays = {
            "y": integers(1, tokens * columns),
            "answers": integers(2, tokens * experts * columns),
            "weights": np.exp2(integers(3, tokens * experts)),
        }
        numbers: dict[str, Number] = {"tokens": tokens, "experts": experts, "columns": columns}
        yield Case(f"{tokens}x{experts}x{columns}", kernel("combine"), arrays, numbers)


def gather() -> Iterator[Case]:
    for table in MAKERS["gather"][1]["table"]:
        x = floats(1, 5 * 300).astype(str(table))
        index = np.array([4, -1, 0, 4, 5, 2], np.int32)
        numbers: dict[str, Number] = {"count": 6, "rows": 5, "columns": 300}
        yield Case("5x300", kernel("gather", table=table), {"x": x, "index": index}, numbers)


def scatter() -> Iterator[Case]:
    index = np.array([4, -1, 0, 5, 2], np.int32)
    arrays = {"y": floats(1, 5 * 300), "x": floats(2, 5 * 300), "index": index}
    yield Case("5x300", kernel("scatter"), arrays, {"count": 5, "rows": 5, "columns": 300})


# **Attention.** A head of 6 channels has a half that no vector divides; positions before, at and after the end.


def rope() -> Iterator[Case]:
    for tokens, heads, head_dim, position in ((1, 3, 6, 0), (3, 2, 64, 4), (3, 9, 64, 6), (2, 1, 8, 8), (2, 1, 8, -1)):
        angles = floats(4, 8, head_dim // 2)
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        x = floats(tokens, tokens, heads, 2, head_dim // 2)
        size = np.abs(x.astype(np.float64))
        limit = gamma(4, 2.0**-24) * (size + size[:, :, ::-1])
        numbers: dict[str, Number] = {"tokens": tokens, "heads": heads, "head_dim": head_dim, "context": 8}
        arrays = {"x": x.ravel(), "table": table.ravel(), "position": np.array([position], np.int32)}
        yield Case(f"{tokens}x{heads}x{head_dim}at{position}", kernel("rope"), arrays, numbers, {"x": limit})


def cache_of(kind: str, seed: int, *shape: int) -> Array:
    """What a cache of such numbers may hold already."""
    if kind == "bfp12":
        return random(seed).integers(0, 256, int(np.prod(shape)) // 2, np.uint8)
    return floats(seed, *shape).astype(kind).ravel()


def append() -> Iterator[Case]:
    for kind in map(str, MAKERS["append"][1]["keys"]):
        for tokens, kv_heads, head_dim, position in ((1, 2, 32, 0), (3, 1, 64, 4), (3, 5, 64, 6), (1, 2, 32, -1)):
            x = floats(tokens, tokens, kv_heads, head_dim) * np.exp2(integers(5, tokens, kv_heads, 1))
            x[0, 0] = 0
            shape = kv_heads, 8, head_dim
            arrays = {"cache": cache_of(kind, 1, *shape), "x": x.ravel(), "position": np.array([position], np.int32)}
            if kind == "bfp12":
                arrays["exponents"] = random(2).integers(120, 130, int(np.prod(shape)) // 32, np.uint8)
            numbers: dict[str, Number] = {"tokens": tokens, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": 8}
            yield Case(f"{tokens}x{kv_heads}x{head_dim}at{position}", kernel("append", keys=kind), arrays, numbers)


ATTENTIONS = (  # tokens, heads, key-value heads, head_dim, capacity, window, position
    *((1, 4, 2, 32, 8, 0, 3), (3, 2, 2, 64, 8, 2, 4), (3, 3, 1, 32, 8, 0, 6), (1, 2, 1, 256, 8, 0, 0)),
    *((1, 1, 1, 32, 600, 0, 599), (1, 2, 1, 64, 600, 300, 590), (1, 1, 1, 32, 8, 0, -1)),
)
GREATEST = 20
"""In steep cases, the token whose score is so far above all others that its exponential overflows, unless the greatest
is taken off first. Its thread is in the second half of a warp."""


def attend() -> Iterator[Case]:
    for keys, values in product(MAKERS["attend"][1]["keys"], MAKERS["attend"][1]["values"]):
        for shape in ATTENTIONS:
            yield attention(str(keys), str(values), shape)
        yield attention(str(keys), str(values), (1, 1, 1, 32, 300, 0, 299), steep=True)


def attention(keys: str, values: str, shape: tuple[int, ...], steep: bool = False) -> Case:
    """One launch of `attend`; what lies beyond the tokens in the cache is NaN, where it can be."""
    tokens, heads, kv_heads, head_dim, capacity, window, position = shape
    names = ("tokens", "heads", "kv_heads", "head_dim", "capacity", "window")
    queries = floats(1, tokens, heads, head_dim) * np.float32(100 if steep else 1)
    cached = {"keys": cache_of(keys, 2, kv_heads, capacity, head_dim)}
    cached["values"] = cache_of(values, 3, kv_heads, capacity, head_dim)
    count = max(0, min(tokens, capacity - position)) if position >= 0 else 0
    for name, kind in (("keys", keys), ("values", values)):
        if kind != "bfp12":
            cached[name].reshape(kv_heads, capacity, head_dim)[:, max(0, position) + count :] = np.nan
    if keys == "bfp12":
        cached["exponents"] = random(4).integers(121, 127, kv_heads * capacity * head_dim // 32, np.uint8)
    if steep:
        _point(cached, keys, queries[0, 0])
    limit = np.zeros((tokens, heads, head_dim))
    if count:
        seen = slice(0, position + count)
        k = _decoded(cached, keys, kv_heads, capacity, head_dim)[:, seen]
        v = cached["values"].reshape(kv_heads, capacity, head_dim)[:, seen].astype(np.float32)
        exact = np.zeros((count, heads, head_dim))
        bound = attend_bound(queries[:count], np.ascontiguousarray(k), v, window or None, FLOAT32, exact)
        limit[:count] = bound.limit + 2.0**-24 * np.abs(v).max()
    arrays = {**cached, "queries": queries.ravel(), "position": np.array([position], np.int32)}
    what = "x".join(map(str, shape[:-1])) + f"at{position}"
    numbers: dict[str, Number] = dict(zip(names, shape, strict=False))
    return Case(what, kernel("attend", keys=keys, values=values), arrays, numbers, {"y": limit})


def _point(cached: dict[str, Array], kind: str, query: F32) -> None:
    """Give one token the direction of a query for its key."""
    if kind != "bfp12":
        cached["keys"].reshape(-1, query.size)[GREATEST] = query / 8
        return
    nibbles = np.where(query > 0, 7, 9).astype(np.uint8)  # 7 and -7
    cached["keys"].reshape(-1, query.size // 2)[GREATEST] = nibbles[0::2] | nibbles[1::2] << 4
    cached["exponents"].reshape(-1, query.size // 32)[GREATEST] = 127


def _decoded(cached: dict[str, Array], kind: str, *shape: int) -> F32:
    if kind != "bfp12":
        return cached["keys"].reshape(shape).astype(np.float32)
    stored = cached["keys"].reshape(-1, 16)
    mantissas = np.stack([stored & 15, stored >> 4], axis=-1).astype(np.int64).reshape(-1, 32)
    signed = np.where(mantissas > 7, mantissas - 16, mantissas)
    exponents = cached["exponents"].astype(np.int64)[:, np.newaxis] - 127
    return np.ldexp(signed.astype(np.float32), exponents).reshape(shape).astype(np.float32)


OTHERS = (rms_norm, swiglu, add, combine, gather, scatter, rope, append, attend)


@cache
def cases() -> list[Case]:
    """All of them, products first."""
    from cuda_cases_linear import LINEAR  # which takes its pieces from here

    return [case for make in (*LINEAR, *OTHERS) for case in make()]
