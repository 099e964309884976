"""The theorem of products: it holds for the generated kernels, and every planted mistake is refuted with numbers."""

from dataclasses import replace

import pytest
from mutants import CHANGES, Change, mutants

from lowbit_cppyy.codegen.microkernel import micro_kernel
from lowbit_cppyy.names import kernel_of
from lowbit_cppyy.recipe import Recipe
from lowbit_prove import places, products
from lowbit_prove.machine import exact
from lowbit_prove.setting import Setting, smallest
from lowbit_prove.theorem import Proof, Refutation, Theorem

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
        outcome = products.of_program(kernel, program).decide()
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
    assert isinstance(products.of_program(kernel, program).decide(), Refutation)


def test_products_of_bytes_in_16_bits_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic: two products of 8-bit codes and mantissas are added with saturation. No recipe allows it."""
    recipe = replace(kernel_of("gemv_bfp16_u8_s16z_dot4_1x1c1t1_p64a0_avx2").recipe, method="pairs")
    assert "saturate" in recipe.fits(8)
    monkeypatch.setattr(Recipe, "fits", lambda self, lanes: "")
    outcome = products.decide(Setting(recipe, micro_kernel(recipe, 8), smallest(recipe)))
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


@pytest.mark.parametrize("theorem", list(places.theorems()), ids=lambda each: each.id)
def test_places_are_proved(theorem: Theorem) -> None:
    assert isinstance(theorem.decide(), Proof)
