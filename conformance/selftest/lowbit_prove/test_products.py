"""The theorem of products: it holds for the generated kernels, and every planted mistake is refuted with numbers."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from mutants import CHANGES, Change, mutants

from lowbit.kernels import interpreter
from lowbit.kernels.vector import VOCABULARY
from lowbit.kernels.vector_integer import dot4
from lowbit_cppyy.codegen.microkernel import micro_kernel
from lowbit_cppyy.names import kernel_of
from lowbit_cppyy.recipe import Recipe
from lowbit_prove import machine, products
from lowbit_prove.machine import exact
from lowbit_prove.prepared_setting import PreparedSetting, smallest
from lowbit_prove.theorem import Proof, Refutation

KERNELS = (
    *("gemv_f32_u4_s16z_fold_1x1c2t1_p64a0_avx2", "gemv_f32_u3_s32m_shift_1x1c1t1_p64a0_plain"),
    *("gemm_f32_u2_s16m_fold_2x1c1t1_p64a1024_neon", "gemv_f32_u8_s32z_fold_1x1c1t2_p64a0_avx2"),
    *("gemv_f32_u4_s16m_table_1x1c1t1_p64a0_avx512", "gemv_f32_u2_s32z_sums_1x1c2t1_p64a0_avx512"),
    *("gemm_bfp16_u4_s16z_pairs_2x1c1t1_p64a0_avx2", "gemv_bfp16_u8_s16m_dot4_1x1c1t8_p64a0_avxvnni"),
)
MUTATED = (
    *("gemv_f32_u4_s16z_fold_1x1c1t1_p64a0_avx2", "gemv_f32_u3_s32m_shift_1x1c1t1_p64a0_avx2"),
    "gemv_bfp16_u4_s16z_dot4_1x1c1t1_p64a0_avx2",
)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_proved(name: str) -> None:
    found = products.of_kernel(kernel_of(name)).decide()
    assert isinstance(found, Proof) and found.steps > 8


@pytest.mark.parametrize("name", MUTATED)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_mistake_is_refuted(name: str, change: Change) -> None:
    """At two places of each kind where the program can have it; what the program gives is not what it should give."""
    kernel = kernel_of(name)
    found = list(mutants(kernel.program, change))
    for program in {found[0], found[len(found) // 2]} if found else ():
        outcome = products.of_kernel(kernel, program).decide()
        assert isinstance(outcome, Refutation), outcome
        leaves = outcome.reason.startswith("the program leaves its memory")
        assert leaves or outcome.numbers["given"] != outcome.numbers["wanted"]


def test_every_kind_of_mistake_is_planted_somewhere() -> None:
    programs = [kernel_of(name).program for name in MUTATED]
    for change in CHANGES:
        assert any(next(mutants(program, change), None) for program in programs), change.__name__


def test_the_factor_of_another_method_is_refuted() -> None:
    """A kernel that shifts, with activations laid out for one that does not."""
    kernel = kernel_of("gemv_f32_u4_s16z_fold_1x1c1t1_p64a0_avx2")
    program = micro_kernel(replace(kernel.recipe, method="shift"), 8)
    assert isinstance(products.of_kernel(kernel, program).decide(), Refutation)


def test_products_of_bytes_in_16_bits_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic: two products of 8-bit codes and mantissas are added with saturation. No recipe allows it."""
    recipe = replace(kernel_of("gemv_bfp16_u8_s16z_dot4_1x1c1t1_p64a0_avx2").recipe, method="pairs")
    assert "saturate" in recipe.fits(8)
    monkeypatch.setattr(Recipe, "fits", lambda self, lanes: "")
    outcome = products.decide(PreparedSetting(recipe, micro_kernel(recipe, 8), smallest(recipe)))
    assert isinstance(outcome, Refutation) and "saturates" in outcome.reason
    assert outcome.numbers["given"] != outcome.numbers["wanted"]


def test_the_bounds_of_instructions_are_sharp() -> None:
    """The obligation of an instruction holds up to the last number for which it should."""
    mantissa = (-127, 127)
    assert exact("dot4_pairs", (), (((0, 129), mantissa),) * 4)
    assert not exact("dot4_pairs", (), (((0, 130), mantissa),) * 4)
    most = 2**31 - 1 - 4 * 15 * 127
    assert exact("dot4", ((0, most),), (((0, 15), mantissa),) * 4)
    assert not exact("dot4", ((0, most + 1),), (((0, 15), mantissa),) * 4)
    assert exact("add_pairs", ((-(2**14), 2**14 - 1),) * 4, ())
    assert not exact("add_pairs", ((-(2**14), 2**14),) * 4, ())
    assert exact("dot2", ((0, 0),), (((-(2**15), 2**15 - 1), (1, 1)),) * 2)


# Meanings: a word that means another thing is noticed by the kernels that use it.

MEANINGS: dict[str, tuple[str, Callable[..., Any]]] = {
    "srli": (MUTATED[1], lambda a, i: a >> np.uint32(i + 1)),
    "and": (MUTATED[0], np.bitwise_xor),
    "and_or": (MUTATED[1], lambda a, m, o: a & m & o),
    "cvt_int_float": (MUTATED[0], lambda a: (a + np.uint32(1)).astype(np.float32)),
    "fmadd": (MUTATED[0], lambda a, b, c: a * b),
    "multiply": (MUTATED[0], np.add),
    "load_half": (MUTATED[0], lambda address: address.view(np.float16)[::-1].astype(np.float32)),
    "load_byte": (MUTATED[0], lambda address: address.view(np.uint8)[::-1].astype(np.uint32)),
    "broadcast_int": (MUTATED[0], lambda a, lanes: np.repeat(a, lanes) >> np.uint32(1)),
    "dot4": (MUTATED[2], lambda c, a, b: dot4(c, a, b) + np.uint32(1)),
    "cvt_signed_float": (MUTATED[2], lambda a: a.astype(np.float32)),
}


@pytest.mark.parametrize("word", MEANINGS)
def test_another_meaning_of_a_word_is_refuted(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, function = MEANINGS[word]
    vocabulary = {**VOCABULARY, word: replace(VOCABULARY[word], function=function)}
    for module in (interpreter, machine):
        monkeypatch.setattr(module, "VOCABULARY", vocabulary)
    monkeypatch.setattr(
        machine, "exact", cache(machine.exact.__wrapped__)
    )  # without what was found for the usual meaning
    outcome = products.of_kernel(kernel_of(name)).decide()
    assert isinstance(outcome, Refutation), outcome
    assert outcome.numbers["given"] != outcome.numbers["wanted"]
