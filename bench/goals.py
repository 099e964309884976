"""What the comparison was made to find out: each goal, what came of it, and whether it was met."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from contests import HEADLINE, LARGE
from peers.registry import CHECKPOINTS

from lowbit_bench.intervals import interval, ratios

Row = dict[str, Any]
Problem = dict[str, Any]

SHARES = {  # bits: least shares of the read limit at the headline, (AVX-512 float32, integer), (AVX2 float32, integer)
    4: ((0.75, 0.95), (0.50, 0.85)),
    3: ((0.80, 0.90), None),
    2: ((0.90, 0.90), None),
}
NEAR = 0.75
"""A share of the read limit above which a peer leaves no room for a ratio of 1.2 or 1.3."""
FAMILIES = {"AVX-512": ("avx512", "avx512vnni"), "AVX2": ("avx2", "avxvnni")}


@dataclass(frozen=True)
class Goal:
    """One goal at one place.

    Attributes:
        goal: in words.
        where: shape, batch and threads.
        value: what was measured.
        wanted: the bound, ``>= 0.75``.
        met: whether the value keeps it.
        by: whose value it is.
    """

    goal: str
    where: str
    value: float
    wanted: str
    met: bool
    by: str


def goals(problems: list[Problem]) -> list[Goal]:
    """All goals that the problems of a report have something to say to."""
    return [
        goal
        for judge in (shares, classes, rivals, groups, stored, authors)
        for problem in problems
        for goal in judge(problem)
    ]


def where(problem: Problem) -> str:
    return f"{problem['rows']}x{problem['columns']}, batch {problem['batch']}, {problem['threads']} threads"


def parts(row: Row) -> tuple[str, str, int | str, int]:
    """Instruction set, contract, bits or type of ggml, and group size (0: the problem's) of one of lowbit's rows."""
    _, isa, contract, bits, *size = row["id"].split("-")
    return isa, contract, int(bits) if bits.isdigit() else bits, int(size[0].removeprefix("g")) if size else 0


def ours(problem: Problem, isas: tuple[str, ...], contract: str, bits: int | str = 4, group_size: int = 0) -> list[Row]:
    """lowbit's rows by some instruction sets and one contract."""
    return [
        row
        for row in problem["contestants"]
        if row["project"] == "lowbit" and parts(row)[0] in isas and parts(row)[1:] == (contract, bits, group_size)
    ]


def fastest(rows: list[Row]) -> Row:
    best: Row = min(rows, key=lambda row: row["ms"][0])
    return best


def at_least(goal: str, problem: Problem, value: float, least: float, by: str) -> Goal:
    return Goal(goal, where(problem), round(value, 3), f">= {least:g}", value >= least, by)


def at_most(goal: str, problem: Problem, value: float, most: float, by: str) -> Goal:
    return Goal(goal, where(problem), round(value, 3), f"<= {most:g}", value <= most, by)


def time_ratio(over: Row, under: Row) -> float:
    """How many times as long one took as another: by rounds where they are known, or else by medians."""
    if "ms_of_rounds" in over and "ms_of_rounds" in under:
        return interval(ratios(over["ms_of_rounds"], under["ms_of_rounds"])).median
    return float(over["ms"][0] / under["ms"][0])


def shares(problem: Problem) -> Iterator[Goal]:
    """Shares of the read limit at the headline."""
    if (problem["rows"], problem["columns"], problem["batch"]) != (*HEADLINE, 1):
        return
    if problem["family"].startswith("groups"):
        return
    for bits, wanted in SHARES.items():
        for (family, isas), pair in zip(FAMILIES.items(), wanted, strict=True):
            for contract, least in zip(("float32", "integer"), pair or (), strict=False):
                if rows := ours(problem, isas, contract, bits):
                    best = fastest(rows)
                    name = f"share of the read limit, {bits} bits, {family}, {contract}"
                    yield at_least(name, problem, best["share"][0], least, best["id"])


def classes(problem: Problem) -> Iterator[Goal]:
    """In each class of accuracy the fastest among those of 4 bits."""
    if problem["family"] != "4 bits":
        return
    for accuracy in ("float32", "16 bits", "8 bits"):
        others = [row for row in problem["contestants"] if row["project"] != "lowbit" and row["accuracy"] == accuracy]
        mine = [row for row in problem["contestants"] if row["project"] == "lowbit" and finer(row, accuracy)]
        if others and mine:
            rival = fastest(others)
            name = f"fastest of class {accuracy}: its time over ours"
            yield at_least(name, problem, time_ratio(rival, fastest(mine)), 1, rival["id"])


def finer(row: Row, accuracy: str) -> bool:
    """Whether a row is of a class of accuracy or of a better one."""
    order = ("float32", "16 bits", "8 bits")
    return row["accuracy"] in order[: order.index(accuracy) + 1]


def rivals(problem: Problem) -> Iterator[Goal]:
    """Against single peers, one vector at a time."""
    if problem["family"] != "4 bits" or problem["batch"] != 1:
        return
    by_id = {row["id"]: row for row in problem["contestants"]}
    best = ours(problem, (*FAMILIES["AVX-512"], *FAMILIES["AVX2"]), "float32")
    bytewise = [row for row in by_id.values() if row["project"] != "lowbit" and row["accuracy"] == "8 bits"]
    if best and bytewise and problem["rows"] * problem["columns"] >= LARGE:
        rival = fastest(bytewise)
        name = "float32 against the fastest of 8 bits: its time over ours"
        yield at_least(name, problem, time_ratio(rival, fastest(best)), 1, rival["id"])
    if best and (onnx := by_id.get("onnxruntime-0")):
        yield at_least("ONNX Runtime's float32 over ours", problem, time_ratio(onnx, fastest(best)), 3, onnx["id"])
    if (avx2 := ours(problem, ("avx2",), "integer")) and (llama := by_id.get("ggml-q4_0")):
        yield at_least("llama.cpp's q4_0 over our AVX2, integer", problem, time_ratio(llama, avx2[0]), 1.3, llama["id"])


def stored(problem: Problem) -> Iterator[Goal]:
    """Products in the bytes of a type of ggml: against ggml with 8-bit activations, and alone with float32; in those of
    a checkpoint: against activations of 16 bits."""
    if not problem["family"].startswith("stored"):
        return
    kind = problem["family"].split()[1]
    for (family, isas), least in zip(FAMILIES.items(), (0.65, 0.5), strict=True):
        if rows := ours(problem, isas, "float32", kind):
            best = fastest(rows)
            yield at_least(f"share of the read limit, {kind}, {family}", problem, best["share"][0], least, best["id"])
    theirs = [row for row in problem["contestants"] if row["project"] != "lowbit"]
    contract, width, least = ("bfloat16", "16 bits", 1.3) if kind in CHECKPOINTS else ("integer", "8 bits", 1.2)
    mine = ours(problem, (*FAMILIES["AVX-512"], *FAMILIES["AVX2"]), contract, kind)
    if not theirs or not mine:
        return
    rival, best = fastest(theirs), fastest(mine)
    if rival["share"][0] > NEAR:  # little is left to be faster by
        yield at_least(f"share of the read limit, {kind}, {width}", problem, best["share"][0], 0.9, best["id"])
    else:
        yield at_least(f"{rival['project']}'s {kind} over ours", problem, time_ratio(rival, best), least, rival["id"])


def authors(problem: Problem) -> Iterator[Goal]:
    """Against the kernels of QIGen's authors, group size by group size."""
    if not problem["family"].startswith("QIGen"):
        return
    by_id = {row["id"]: row for row in problem["contestants"]}
    for id, rival in by_id.items():
        if id.startswith("qigen") and (mine := by_id.get(id.replace("qigen", "lowbit-avx2-float32"))):
            yield at_least(f"{id}: its time over ours", problem, time_ratio(rival, mine), 1.3, id)


def per_byte(row: Row) -> float:
    """Milliseconds for each byte that a product moves."""
    return float(row["ms"][0] / row["bytes"])


def groups(problem: Problem) -> Iterator[Goal]:
    """Groups of 16 against groups of 128, for each byte moved."""
    if not problem["family"].startswith("groups"):
        return
    known = {parts(row): row for row in problem["contestants"]}
    for (isa, contract, bits, size), row in known.items():
        wide = known.get((isa, contract, bits, 128))
        if size == 16 and wide is not None:
            name = f"groups of 16 over groups of 128, by byte, {bits} bits"
            yield at_most(name, problem, per_byte(row) / per_byte(wide), 1.25, f"{isa} {contract}")
