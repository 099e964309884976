"""Kernels in the styles of the field: right ones pass, and the diagnosis names the mistakes of wrong ones.

All mistakes take minutes, and those in torch, Triton and numba need these libraries: ``python -m field.trying`` in
conformance/selftest/support. A fixed sample is tried here, and what came of each list is in the docs.
"""

import pytest
from building import compiler
from field.held_out_seventh import SEVENTH_KERNELS
from field.judging import judge
from field.legal import judged
from field.mended import MENDED
from field.mistakes import KERNELS, MISTAKES, Mistake
from field.trying import LISTS, changed, claim_of, kernels, outcome, tried

from lowbit.backend.function import Claim

RIGHT = [
    *(("numpy_kernels", name) for name in ("gptq_factored", "awq", "q4_k_q8_k", "fp8_channel")),
    *(("cpp_kernels", name) for name in ("gptq", "mxfp4", "fp8_block")),
]
MORE = ("gptq_v2", "awq_factored", "q4_0", "q6_k", "nf4", "nvfp4", "hqq", "fp8_int8", "q6_k_q8_k")
ONCE_HELD_OUT = [
    next(each for each in LISTS[name] if each.what == what)
    for name, what in (
        ("second", "late scales read as bytes"),
        ("third", "scales of the first row of blocks"),
        ("fourth", "sum of x to the end"),
        ("fifth", "one added to the shift and not to the zero"),
        ("sixth", "words as 16 bits"),
        ("seventh", "groups of 128 where no index is needed"),
        ("seventh", "range over all codes"),
        ("seventh", "values by the scales of keys"),
        ("seventh", "exponent of b forgotten"),
        ("eighth", "codes of activations are truncated"),
        ("eighth", "tokens after the last whole tile of four are not computed"),
        ("eighth", "weights pass through float16"),
        ("ninth", "the difference of code and zero is kept in 8 bits"),
        ("ninth", "the sums of the parts of K are kept from call to call"),
        ("ninth", "the last two of four tokens read the x of the first two"),
        ("ninth", "zeros follow the order of rows, scales follow g_idx"),
        ("tenth", "the length of a part of K is rounded down"),
        ("eleventh", "the scale of Q8_K is read as float16"),
        ("twelfth", "bytes are signed, so that the upper code of each is shifted down with its sign"),
        ("twelfth", "the tree of sums begins with 16 of 32 lanes"),
    )
]
SAMPLE = (*MISTAKES[::9], *ONCE_HELD_OUT)


def named(mistake: Mistake) -> str:
    """The id of a test about a mistake."""
    return f"{mistake.kernel}-{mistake.what}".replace(" ", "-")


@pytest.mark.parametrize("name", RIGHT, ids="-".join)
def test_right_kernels_pass(name: tuple[str, str]) -> None:
    """In numpy and in C++, without padding or wrapping."""
    compiler("g++")
    with kernels():
        operation, limits = KERNELS[name[1]]
        found = judge(":".join(name), Claim(operation, limits))
        assert found.executed > 5 and not found.failures, found.failures


@pytest.mark.parametrize("name", MORE)
def test_right_kernels_of_more_formats_pass(name: str) -> None:
    """Those of which `LISTS` has mistakes, in numpy."""
    with kernels(compiled=()):
        found = judge(f"more_numpy:{name}", claim_of("more_numpy.py", name))
        assert found.executed >= 5 and not found.failures, found.failures


STEPS = [each for each in SEVENTH_KERNELS if each[1] != "attend"]


@pytest.mark.parametrize("kernel", STEPS, ids="-".join)
def test_right_casts_and_steps_pass(kernel: tuple[str, str]) -> None:
    """Casts, and what a model computes besides products; attention takes half a minute, and is left to the lists."""
    file, name = kernel
    with kernels(compiled=()):
        found = judge(f"{file.removesuffix('.py')}:{name}", claim_of(file, name))
        assert found.executed >= 5 and not found.failures, found.failures


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("pool", Claim("pooling.pool", {"method": "mean"})),
        ("rope", Claim("rope.rotate", {"head_dim": 64})),
        ("attend", Claim("attention.attend", {"head_dim": 64})),
    ],
)
def test_what_is_not_declared_is_not_asked_for(name: str, claim: Claim) -> None:
    """Neither by cases of special contents, nor by those that stand for several calls."""
    with kernels(compiled=()):
        found = judge(f"step_kernels:{name}", claim)
        assert found.executed > 30 and not found.failures, found.failures


@pytest.mark.parametrize("mistake", SAMPLE, ids=named)
def test_a_mistake_is_killed_and_named(mistake: Mistake) -> None:
    """By a name that says what it is."""
    if mistake.file.endswith(".cpp"):
        compiler("g++")
    assert outcome(mistake, tried(mistake)) == "named"


# To name one mistake of gptq_factored, the diagnosis compares with some 17,000 results of others: a dozen seconds.
@pytest.mark.parametrize(
    "mistake",
    [pytest.param(each, marks=pytest.mark.whole) if each.kernel == "gptq_factored" else each for each in MENDED],
    ids=lambda each: f"{each.kernel}-{each.what}".replace(" ", "-"),
)
def test_what_was_mended_is_named(mistake: Mistake) -> None:
    """Mistakes that had no name, or a wrong one."""
    assert outcome(mistake, tried(mistake)) == "named"


def test_right_attention_over_stored_and_new_tokens_passes() -> None:
    """The kernel in which mistakes are planted."""
    with kernels(compiled=()):
        found = judge("step_kernels:attend_residual", claim_of("step_kernels.py", "attend_residual"))
        assert found.executed >= 4 and not found.failures, found.failures


@pytest.mark.parametrize("way", ["sums_of_32", "kahan", "weights_in_three_steps"])
def test_a_legal_way_is_not_refused(way: str) -> None:
    """Three of those that ``python -m field.legal 200`` tries with many seeds."""
    found = judged(way, seeds=1)
    assert found.executed > 5 and not found.failures


def test_every_mistake_changes_its_kernel() -> None:
    """The source holds its text, the change gives another source, and nearly every mistake has a name by now."""
    every = [mistake for listed in LISTS.values() for mistake in listed]
    assert len({(mistake.file, changed(mistake)) for mistake in every}) >= 0.98 * len(every) >= 190
    for name, listed in LISTS.items():
        assert sum(bool(mistake.names) for mistake in listed) >= 0.9 * len(listed), name
