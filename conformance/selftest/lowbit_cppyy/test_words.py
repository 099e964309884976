"""The words of the instruction tables: each computes on a processor what the vocabulary defines.

One C++ function calls every word of every table of this processor on registers that are read from memory. It is
compiled by g++ with the sanitizer for undefined behaviour, and by cppyy; both must answer with the bits of the
vocabulary's own functions. The tables that this processor lacks are at least compiled.
"""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sanitized_programs
from kernel_runs import ADDS_TO, HERE

from lowbit.arrays import U32
from lowbit.kernels.vector import UNUSED, VOCABULARY, multiply_then_add
from lowbit_cppyy.codegen.isa import TABLES, InstructionSet
from lowbit_cppyy.codegen.lowering import prelude
from lowbit_cppyy.emulation import guest
from lowbit_cppyy.runtime.compiler import runtime

COMPILERS = sanitized_programs.sanitizing()
TRIALS = 400
COUNTS = (0, 1, 4, 9, 15, 28, 31)
WORDS = [name for name, word in VOCABULARY.items() if name not in UNUSED and word.function is not None]
ARM = [table for table in TABLES.values() if table.name in guest.PROCESSORS]
SILENT = [name for name, word in VOCABULARY.items() if word.function is None]

Bits = U32


# **The harness**: for each word, operands from three registers of memory; an answer of a register for each trial.


def calls(name: str) -> list[str]:
    """The calls of a word, one for each count of bits if it takes one."""
    operands = []
    for kind, place in zip(VOCABULARY[name].takes, ("p", "q", "r"), strict=False):
        scalar = f"{place}[0]" if VOCABULARY[name].gives == "int" else f"real({place})"
        load = {"int": f"load_int({place})", "float": f"load_float({place})", "address": place, "scalar": scalar}
        operands.append(load.get(kind, "COUNT"))
    function = {"and": "and_", "or": "or_"}.get(name, name)
    if name == "store":
        return ["store(d, load_float(q));"]
    keep = "store(d, {});" if VOCABULARY[name].gives == "float" else "const vint v = {}; std::memcpy(d, &v, sizeof v);"
    call = f"{function}({', '.join(operands)})"
    counts = COUNTS if "COUNT" in call else (0,)
    return ["{ " + keep.format(call.replace("COUNT", str(count))) + " }" for count in counts]


def harness(table: InstructionSet) -> str:
    """C++: ``words_<table>(registers, answers)`` for `TRIALS` trials of three registers each."""
    lines = [f"namespace lowbit::{table.name} {{", "inline float real(const std::uint32_t* a) {"]
    lines += ["float d; std::memcpy(&d, a, 4); return d; }"]
    lines += [f"{table.attribute} inline void words(const std::uint32_t* p, std::uint32_t* out) {{".lstrip()]
    lines += [f"for (int trial = 0; trial < {TRIALS}; ++trial, p += {3 * table.lanes}) {{"]
    lines += [f"const std::uint32_t *q = p + {table.lanes}, *r = q + {table.lanes}; float* d; (void)r;"]
    for name in WORDS:
        for call in calls(name):
            lines += [f"d = reinterpret_cast<float*>(out); out += {table.lanes};", call]
    lines += [*(f"{name}(p);" for name in SILENT), "}", "}", "}"]
    return "\n".join(lines) + "\n"


# **Registers**, and the results of the vocabulary for them.


def registers(lanes: int) -> Bits:
    """Random bits, random floats and integers of all sizes, extremes; trials × 3 × lanes."""
    random = np.random.default_rng(lanes)
    bits = random.integers(0, 2**32, (TRIALS, 3, lanes), np.uint32)
    quarter = TRIALS // 4
    floats = random.standard_normal((quarter, 3, lanes)) * np.exp2(random.integers(-12, 12, (quarter, 3, lanes)))
    bits[:quarter] = floats.astype(np.float32).view(np.uint32)
    extremes = [0, 1, 0x7F800000, 0xFF800000, 0x80000000, 0x00800000, 0x7F7FFFFF, 0x7F7F7F7F, 0x80808080, 0xFFFFFFFF]
    extremes += [0x80008000, 0x7FFF7FFF, 0x7C00FC00, 0x03FF0001, 0x83FF8001, 0x7BFF0400, 0x3F800000, 0x33800000]
    bits[quarter : 2 * quarter] = random.choice(np.array(extremes, np.uint32), (quarter, 3, lanes))
    bits[2 * quarter : 3 * quarter] >>= random.integers(0, 32, (quarter, 3, lanes), np.uint32)
    return bits


def expected(name: str, trial: Bits, fused: bool) -> Iterator[Bits]:
    """The answers of the vocabulary's function, as bits; one for each count."""
    word, lanes = VOCABULARY[name], trial.shape[1]
    function: Callable[..., Any] | None = multiply_then_add if name == "fmadd" and not fused else word.function
    assert function is not None
    for count in COUNTS if "count" in word.takes else (0,):
        operands: list[Any] = []
        for kind, register in zip(word.takes, trial, strict=False):
            one = register[0] if word.gives == "int" else register.view(np.float32)[0]
            memory = register[: lanes * word.lane_bytes // 4]
            kinds = {"int": register, "float": register.view(np.float32), "address": memory, "scalar": one}
            operands.append(kinds.get(kind, count))
        if name == "store":
            yield trial[1]
            continue
        with np.errstate(all="ignore"):
            result = function(*operands, lanes) if "scalar" in word.takes else function(*operands)
        yield result.view(np.uint32)


DEFINED_BELOW = {"cvt_int_float": 2**31, "cvt_int_subnormal": 2**24}
"""Words that are not defined for larger integers."""
MOVES = ("load_int", "load_float", "store", "permute", "permute_pair", "as_float", "broadcast_float")
"""Words that give floats and keep all bits of a NaN; where a float was computed, a NaN is any NaN."""


def wrong(table: InstructionSet, given: Bits) -> list[str]:
    """The words whose answers differ from the vocabulary's."""
    answers, found = iter(given.reshape(-1, table.lanes)), set()
    for trial in registers(table.lanes):
        for name in WORDS:
            for bits in expected(name, trial, table.fused):
                answer = next(answers)
                same = bits == answer
                if VOCABULARY[name].gives == "float" and name not in MOVES:
                    same |= np.isnan(bits.view(np.float32)) & np.isnan(answer.view(np.float32))
                if name in DEFINED_BELOW:
                    same |= trial[0] >= DEFINED_BELOW[name]
                if not same.all():
                    found.add(name)
    return sorted(found)


def answers(table: InstructionSet) -> Bits:
    return np.empty(TRIALS * sum(len(calls(name)) for name in WORDS) * table.lanes, np.uint32)


MAIN = """
#include <cstdio>
#include <vector>
template <class F> void table(F words, std::size_t lanes, std::size_t answers) {
  std::vector<std::uint32_t> in(lanes * 3 * TRIALS), out(lanes * answers * TRIALS);
  if (std::fread(in.data(), 4, in.size(), stdin) != in.size()) std::abort();
  words(in.data(), out.data());
  std::fwrite(out.data(), 4, out.size(), stdout);
}
"""


@pytest.mark.skipif(not COMPILERS, reason="neither g++ nor clang++ is installed")
@pytest.mark.parametrize("compiler", COMPILERS, ids=lambda path: Path(path).name)
def test_compiled_words_are_those_of_the_vocabulary(compiler: str, tmp_path: Path) -> None:
    """Every word of every table of this processor, optimised, with nothing undefined on the way."""
    number = sum(len(calls(name)) for name in WORDS)
    source = "".join(prelude(table) + harness(table) for table in HERE) + MAIN.replace("TRIALS", str(TRIALS))
    source += "int main() {" + "".join(f"table(lowbit::{t.name}::words, {t.lanes}, {number});" for t in HERE) + "}\n"
    (tmp_path / "words.cpp").write_text(source)
    options = ("-std=c++17", "-O1", "-ffp-contract=off", "-Wno-psabi", "-fsanitize=undefined", "-fno-sanitize-recover")
    subprocess.run([compiler, *options, "words.cpp", "-o", "words"], cwd=tmp_path, check=True, timeout=120)
    registers_of_all = b"".join(registers(table.lanes).tobytes() for table in HERE)
    result = subprocess.run([tmp_path / "words"], input=registers_of_all, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
    given, place = np.frombuffer(result.stdout, np.uint32), 0
    for table in HERE:
        stop = place + len(answers(table))
        assert wrong(table, given[place:stop]) == [], table.name
        place = stop
    assert place == len(given)


@pytest.mark.parametrize("table", HERE, ids=lambda table: table.name)
def test_words_compiled_by_cppyy_are_those_of_the_vocabulary(table: InstructionSet) -> None:
    """By the compiler that compiles the kernels."""
    compiled = runtime()
    compiled.include_table(table)
    compiled.define(harness(table))
    given = answers(table)
    words = getattr(compiled.namespace, table.name).words
    words(registers(table.lanes).reshape(-1), given)
    assert wrong(table, given) == []


def test_a_wrong_word_is_found() -> None:
    """The tests above can fail: an answer with one bit changed names its word."""
    table = HERE[-1]
    given = np.concatenate(
        [bits for trial in registers(table.lanes) for name in WORDS for bits in expected(name, trial, table.fused)]
    )
    assert wrong(table, given) == []
    at = sum(len(calls(name)) for name in WORDS[: WORDS.index("dot2")]) * table.lanes
    given[at + 1] ^= 4
    assert wrong(table, given) == ["dot2"]


@pytest.mark.skipif(not COMPILERS, reason="neither g++ nor clang++ is installed")
@pytest.mark.parametrize("compiler", COMPILERS, ids=lambda path: Path(path).name)
def test_every_table_compiles_on_a_processor_that_lacks_it(compiler: str, tmp_path: Path) -> None:
    """All tables of this kind of processor in one file, for the most basic one, without a warning."""
    source = "".join(prelude(table) + harness(table) for table in TABLES.values() if table not in ARM)
    (tmp_path / "all.cpp").write_text(source)
    options = ("-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wno-ignored-attributes")
    subprocess.run([compiler, *options, "all.cpp"], cwd=tmp_path, check=True, timeout=60)


@pytest.mark.toolchain
@pytest.mark.skipif(guest.missing() is not None, reason=f"{guest.missing()} is not installed")
@pytest.mark.parametrize("table", ARM, ids=lambda table: table.name)
def test_emulated_words_are_those_of_the_vocabulary(table: InstructionSet) -> None:
    """Every word of the tables for ARM."""
    number = sum(len(calls(name)) for name in WORDS)
    source = "#include <cstdlib>\n" + prelude(table) + harness(table) + MAIN.replace("TRIALS", str(TRIALS))
    source += f"int main() {{ table(lowbit::{table.name}::words, {table.lanes}, {number}); }}\n"
    program = guest.compiled(source, table)
    command, given = guest.command(program, table), registers(table.lanes).tobytes()
    result = subprocess.run(command, input=given, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
    assert wrong(table, np.frombuffer(result.stdout, np.uint32)) == []


def test_every_table_has_a_function_for_every_word() -> None:
    """All but `reduce_add`, which no kernel uses, because lanes are columns (errata Q5)."""
    for table in TABLES.values():
        assert set(table.words) == set(VOCABULARY) - set(UNUSED), table.name


@pytest.mark.parametrize("name", ADDS_TO)
def test_a_table_that_adds_an_instruction_differs_in_nothing_else(name: str) -> None:
    """So tests of kernels without `dot4` need not be made for it again."""
    table, other = TABLES[name], ADDS_TO[name]
    assert {word for word in table.words if table.words[word] != other.words[word]} == {"dot4"}
    same = ("lanes", "registers", "fused", "headers", "types")
    assert all(getattr(table, field) == getattr(other, field) for field in same)
