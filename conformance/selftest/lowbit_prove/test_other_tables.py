"""The tables of NEON and of plain C++: mistakes in bodies and in what intrinsics and operators mean are noticed."""

import operator
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lowbit_cppyy.codegen.isa import TABLES
from lowbit_cppyy.emulation import guest
from lowbit_prove import instructions, operators, probes, processors
from lowbit_prove.instructions import decide, ran
from lowbit_prove.intrinsics_neon import NEON_MEANINGS
from lowbit_prove.theorem import Proof, Refutation, Undecided

BODIES = (
    ("neon", "add", "return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.lo)};"),
    ("neon", "subtract_int", "return {vsubq_u32(b.lo, a.lo), vsubq_u32(b.hi, a.hi)};"),
    ("neon", "fmadd", "return {vfmaq_f32(a.lo, b.lo, c.lo), vfmaq_f32(a.hi, b.hi, c.hi)};"),
    ("neon", "fmadd", "return {vaddq_f32(vmulq_f32(a.lo, b.lo), c.lo), vaddq_f32(vmulq_f32(a.hi, b.hi), c.hi)};"),
    ("neon", "srli", "return {vshlq_u32(a.lo, vdupq_n_s32(i)), vshlq_u32(a.hi, vdupq_n_s32(i))};"),
    ("neon", "load_int", "vint d; std::memcpy(&d, a, sizeof d); return {d.hi, d.lo};"),
    ("neon", "add_neighbours", "return {vpaddq_f32(a.lo, b.lo), vpaddq_f32(a.hi, b.hi)};"),
    (
        "neon",
        "maximum",
        "return {vbslq_f32(vcgtq_f32(b.lo, a.lo), b.lo, a.lo), vbslq_f32(vcgtq_f32(b.hi, a.hi), b.hi, a.hi)};",
    ),
    ("neon", "dot4_pairs", "return {sums_of_2(products(b.lo, a.lo)), sums_of_2(products(b.hi, a.hi))};"),
    ("neon", "dot4", "return {sums_of_4(products(b.lo, c.lo)), sums_of_4(products(b.hi, c.hi))};"),
    ("neon", "permute", "return {chosen(a, b.lo), chosen(a, b.lo)};"),
    ("neon", "store", "std::memcpy(a, &a, sizeof b);"),
    ("plain", "load_half", "vhalves d; std::memcpy(&d, a, sizeof d); const vint h = __builtin_convertvector(d, vint); "
     "return (vfloat)((h & 0x8000u) << 16 | (((h & 0x7FFFu) << 13) + (112u << 23)));"),  # all but zeros and infinities
    ("plain", "fmadd", "return a * c + b;"),
    ("plain", "srai", "return a >> i;"),
    ("plain", "srli", "return (vint)((vsigned)a >> i);"),
    ("plain", "maximum", "return a < b ? a : b;"),
    ("plain", "add_pairs", "return a + b;"),
    ("plain", "cvt_signed_float", "return __builtin_convertvector(a, vfloat);"),
    ("plain", "as_float", "return __builtin_convertvector(a, vfloat);"),
    ("plain", "permute", "vfloat d; for (int n = 0; n < 8; ++n) d[n] = a[b[n] & 3u]; return d;"),
    ("plain", "add_neighbours", "return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + a;"),
    ("plain", "dot2", "return a + (b & 65535u) * (c & 65535u) + (vint)((vsigned)b >> 16) * (vint)((vsigned)c >> 16);"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "word", "body"), BODIES, ids=[f"{n}-{each[1]}" for n, each in enumerate(BODIES)])
def test_a_body_with_a_mistake_is_refuted_with_numbers(name: str, word: str, body: str) -> None:
    table = replace(TABLES[name], words={**TABLES[name].words, word: body})
    outcome = decide(table, word)
    assert isinstance(outcome, Refutation), outcome
    assert ran(table, word, outcome.numbers) is not None and ran(TABLES[name], word, outcome.numbers) is None


FUNCTIONS = (
    ("dot4", "vmovl_high_s8(s)", "vmovl_s8(vget_low_s8(s))"),
    ("dot4", "vmovl_s8(vget_low_s8(s))", "vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(u)))"),
    ("dot4_pairs", "vqmovn_high_s32(low, vpaddlq_s16(p.hi))", "vqmovn_high_s32(low, vpaddlq_s16(p.lo))"),
    ("dot2", "vmull_high_s16(p, q)", "vmull_high_s16(p, p)"),
    ("permute", "vdupq_n_u32(7)", "vdupq_n_u32(3)"),
    ("permute", "0x03020100", "0x03020001"),
)


@pytest.mark.parametrize(("word", "old", "new"), FUNCTIONS)
def test_a_mistake_in_a_function_of_a_table_is_refuted(word: str, old: str, new: str) -> None:
    neon = TABLES["neon"]
    assert neon.types.count(old) == 1
    assert isinstance(decide(replace(neon, types=neon.types.replace(old, new)), word), Refutation)


def test_the_last_bit_of_a_rare_product_is_found_by_the_solver() -> None:
    """Random registers do not show it: the body is wrong for one byte beside another."""
    wrong = "((vint)((b & 255u) == 255u) & (vint)((c & 255u) == 128u) & 1u)"
    body = TABLES["plain"].words["dot4"].replace("return a +", f"return a + {wrong} +")
    table = replace(TABLES["plain"], words={**TABLES["plain"].words, "dot4": body})
    outcome = decide(table, "dot4")
    assert isinstance(outcome, Refutation) and ran(table, "dot4", outcome.numbers) is not None


REFUSED = (
    ("plain", "add", "vfloat d; return d;", "before it is written"),
    ("plain", "add", "return a << 1;", "not read"),
    ("plain", "add", "return a + x;", "no value"),
    ("plain", "srli", "return a >> 32;", "number of bits"),
    ("plain", "permute", "vfloat d; for (int n = 0; n < 8; ++n) d[n] = a[b[n]]; return d;", "of 8"),
    ("plain", "permute", "vfloat d; for (int n = 0; n < 9; ++n) d[n] = a[n]; return d;", "element 8 of 8"),
    ("plain", "load_int", "vint d; std::memcpy(&d, a, 33); return d;", "33 bytes"),
    ("plain", "load_byte", "vint d; std::memcpy(&d, a, sizeof d); return d;", "32 bytes are read of 8"),
    ("plain", "add_int", "return (vint)((vpairs)a + b);", "different types"),
    ("plain", "as_int", "return a;", "not uint32 of 8 lanes"),
    ("plain", "as_int", "while (a) { }", "not read"),
    ("neon", "add", "return {vaddq_u32(a.lo, b.lo), vaddq_u32(a.hi, b.hi)};", "not uint32 of 4 lanes"),
    ("neon", "add", "return {a.lo};", "other fields"),
    ("neon", "add", "return {vminq_f32(a.lo, b.lo), b.lo};", "vminq_f32 has no meaning"),
)


@pytest.mark.parametrize(
    ("name", "word", "body", "reason"), REFUSED, ids=[f"{n}-{each[1]}" for n, each in enumerate(REFUSED)]
)
def test_what_is_undefined_or_not_read_is_not_decided(name: str, word: str, body: str, reason: str) -> None:
    outcome = decide(replace(TABLES[name], words={**TABLES[name].words, word: body}), word)
    assert isinstance(outcome, Undecided) and reason in outcome.reason


# Mistakes in meanings.


def _zeros_moved_in(a: Any, count: Any) -> Any:
    plain = np.dtype(f"u{a.dtype.itemsize}")
    return (a.view(plain) >> count.astype(plain)).view(a.dtype)


OPERATORS: tuple[tuple[str, Callable[[Any, Any], Any], str], ...] = (
    ("+", operator.sub, "add_int"),
    (">>", _zeros_moved_in, "srai"),
    ("<<", operator.rshift, "dot2"),
    ("&", operator.or_, "and_or"),
    ("*", operator.add, "dot4"),
)


@pytest.mark.parametrize(("name", "meaning", "word"), OPERATORS)
def test_another_meaning_of_an_operator_is_refuted(
    monkeypatch: pytest.MonkeyPatch, name: str, meaning: Callable[[Any, Any], Any], word: str
) -> None:
    monkeypatch.setattr(operators, "ARITHMETIC", {**operators.ARITHMETIC, name: meaning})
    assert isinstance(decide(TABLES["plain"], word), Refutation)


def _backwards(a: Any, b: Any, *places: int) -> Any:
    return np.concatenate([a, b], axis=-1)[..., [15 - each for each in places]]


FUNCTIONS_OF_VECTORS: tuple[tuple[str, Callable[..., Any], str], ...] = (
    ("each_converted", lambda value, kind: value.view(kind.dtype), "cvt_signed_float"),
    ("reinterpreted", lambda value, kind: value.astype(kind.dtype), "as_float"),
    ("shuffled", _backwards, "add_neighbours"),
    ("_all_bits", lambda truth, dtype: np.where(truth, np.int32(1), np.int32(0)), "load_half"),
)


@pytest.mark.parametrize(("name", "meaning", "word"), FUNCTIONS_OF_VECTORS)
def test_another_meaning_of_a_builtin_is_refuted(
    monkeypatch: pytest.MonkeyPatch, name: str, meaning: Callable[..., Any], word: str
) -> None:
    monkeypatch.setattr(operators, name, meaning)
    assert isinstance(decide(TABLES["plain"], word), Refutation)


def _wrapped(L: int, a: Any) -> Any:
    return a.astype(np.int16)


def _long_wrapped(L: int, a: Any) -> Any:
    return (a[..., ::2] + a[..., 1::2]).astype(np.int32)


def _whole_count(L: int, a: Any, count: Any) -> Any:
    by = count.astype(np.int64)
    return np.where(by >= 0, a << by.astype(a.dtype), a >> (-by).astype(a.dtype))


def _modulo(L: int, a: Any, count: Any) -> Any:
    by = count.view(np.int8)[..., ::4].astype(np.int32)
    return np.where(by >= 0, a << (by & 31).astype(a.dtype), a >> (-by & 31).astype(a.dtype))


def _anywhere(L: int, table: Any, index: Any) -> Any:
    return np.take_along_axis(table, (index % table.shape[-1]).astype(np.int64), axis=-1)


def _interleaved(L: int, a: Any, b: Any) -> Any:
    sums = [each[..., ::2] + each[..., 1::2] for each in (a, b)]
    return np.stack(sums, axis=-1).reshape(a.shape)


def _unsigned_dot(L: int, total: Any, a: Any, b: Any) -> Any:
    products = a.view(np.uint8).astype(np.int32) * b.astype(np.int32)
    return total + products.reshape(*total.shape, 4).sum(-1).astype(np.int32)


def _saturating_dot(L: int, total: Any, a: Any, b: Any) -> Any:
    sums = (a.astype(np.int64) * b).reshape(*total.shape, 4).sum(-1) + total
    return np.clip(sums, -(2**31), 2**31 - 1).astype(np.int32)


def _saturating_product(L: int, a: Any, b: Any) -> Any:
    return np.clip(a.astype(np.int32) * b, -(2**15), 2**15 - 1).astype(np.int16)


INTRINSICS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("vqmovn_s32", _wrapped),
    ("vpaddlq_s16", _long_wrapped),
    ("vshlq_u32", _whole_count),
    ("vshlq_u32", _modulo),
    ("vshlq_s32", lambda L, a, count: NEON_MEANINGS["vshlq_u32"].meaning(L, a.view(np.uint32), count).view(np.int32)),
    ("vqtbl1q_u8", _anywhere),
    ("vqtbl2q_u8", _anywhere),
    ("vpaddq_f32", _interleaved),
    ("vpaddq_s32", _interleaved),
    ("vdotq_s32", _unsigned_dot),
    ("vdotq_s32", _saturating_dot),
    ("vmulq_s16", _saturating_product),
    ("vmull_high_s16", lambda L, a, b: NEON_MEANINGS["vmull_s16"].meaning(L, a[..., :4], b[..., :4])),
    ("vfmaq_f32", lambda L, c, a, b: a * b + c),
    ("vfmaq_f32", lambda L, c, a, b: NEON_MEANINGS["vfmaq_f32"].meaning(L, b, a, c)),
    ("vcgtq_f32", lambda L, a, b: np.where(a >= b, np.uint32(2**32 - 1), np.uint32(0))),
    ("vcgtq_f32", lambda L, a, b: np.where(a > b, np.uint32(1), np.uint32(0))),
    ("vbslq_f32", lambda L, mask, a, b: np.where(mask != 0, a, b)),
    ("vcvtq_f32_s32", lambda L, a: a.view(np.uint32).astype(np.float32)),
    ("vmovl_s8", lambda L, a: a.view(np.uint8).astype(np.int16)),
    ("vcvt_f32_f16", lambda L, a: np.where(np.abs(x := a.astype(np.float32)) < 2**-14, 0 * x, x)),
)


@pytest.mark.parametrize(("name", "meaning"), INTRINSICS, ids=[f"{n}-{name}" for n, (name, _) in enumerate(INTRINSICS)])
def test_a_usual_mistake_about_an_intrinsic_of_arm_is_noticed(name: str, meaning: Callable[..., Any]) -> None:
    (probe,) = (each for each in processors.probes() if each.name == name)
    if not probe.possible:
        pytest.skip("neither this processor nor an emulator has the instruction")
    found = probes.decide(probe, meaning)
    assert isinstance(found, Refutation) and "a_0" in found.numbers


# What an emulator does is no statement about a processor.


def test_what_ran_on_an_emulator_says_so() -> None:
    listed = {each.name: each for each in instructions.theorems()}
    emulated = {name for names in processors.emulated().values() for name in names}
    for probe in processors.probes():
        if probe.name in emulated:
            assert "QEMU" in listed[probe.name].statement and "this processor" not in listed[probe.name].statement
            assert "QEMU" in listed[probe.name].subject()
        elif probe.possible:
            assert "this processor" in listed[probe.name].statement


def test_without_an_emulator_arm_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "emulator", lambda: "")
    native = [each.native for each in processors.probes() if each.name == "vfmaq_f32"]
    assert ("vfmaq_f32" in processors.unchecked()) is not native[0] and not processors.emulated()
    assert "fmadd_neon" in {each.name for each in instructions.theorems()}


def test_an_emulated_process_that_ends_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    (probe,) = (each for each in processors.probes() if each.name == "vaddq_f32")
    if probe.native or not probe.possible:
        pytest.skip("there is no emulator, or no need of one")
    assert isinstance(probes.decide(probe), Proof)
    monkeypatch.setattr(guest, "command", lambda program, table: [sys.executable, "-c", ""])
    found = probes.decide(probe)
    assert isinstance(found, Undecided) and "ended" in found.reason
