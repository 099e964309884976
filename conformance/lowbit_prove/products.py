r"""The theorem of products: a generated kernel multiplies every activation by the weight that belongs to it.

For a kernel that computes :math:`y = xW` over :math:`K` rows in groups, with codes :math:`q`, scales :math:`s` and
zeros :math:`z` where the layout puts them,

.. math:: y_{rj} = y_{rj}^{(0)} + \sum_{k < K} x_{rk}\, s_{g(k)j}\, (q_{kj} - z_{g(k)j})
   \qquad\text{or}\qquad y_{rj}^{(0)} + \sum_{k < K} x_{rk}\, (s_{g(k)j}\, q_{kj} + m_{g(k)j})

for *all* words, scales, zeros and activations, in exact arithmetic: each product occurs once, each code reaches it as
the layout says, and the power of two by which a method makes it too large is the one by which its activation was made
too small. With integers, the sums of products are also exact on the machine: no instruction saturates or wraps, for all
codes and all mantissas from -127 to 127.

**Columns.** Every column is examined. One is proved; for each other it is shown that its result is the same expression
over its own variables, and that its codes lie at the same bits. Where that does not hold, it is proved separately.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from random import Random
from typing import Any

import z3

from lowbit.errors import ArgumentError
from lowbit.kernels.program import Program
from lowbit_cppyy.codegen.kernels import Kernel
from lowbit_cppyy.stored.kernel import StoredKernel
from lowbit_prove import prepared_setting, stored_setting
from lowbit_prove.demonstration import Demonstration, coefficient, read
from lowbit_prove.machine import InexactError, Prover
from lowbit_prove.prepared_setting import PreparedSetting
from lowbit_prove.reals import sum_of
from lowbit_prove.setting import BYTES, Setting, variable
from lowbit_prove.solver import satisfied
from lowbit_prove.stored_setting import StoredSetting
from lowbit_prove.symbols import Symbols
from lowbit_prove.terms import UndecidedError
from lowbit_prove.theorem import Numbers, Outcome, Proof, Refutation, Theorem, Undecided

STATEMENT = "y_rj = y_rj + Σ_k x_rk · w_kj in exact arithmetic, for all words, scales, zeros and activations"
RANDOM = 4
"""The number of runs on random numbers, if the solver gives none."""
INTEGERS = "; no sum of integers saturates or wraps"


def of_kernel(kernel: Kernel | StoredKernel, program: Program | None = None) -> Theorem:
    """The theorem about a generated kernel, or about a program in place of the kernel's own."""
    setting = partial(setting_of, kernel, program)
    statement = STATEMENT + (INTEGERS if kernel.recipe.integer else "")
    run = partial(_ran, setting)
    return Theorem("products", kernel.name, statement, lambda: repr(setting()), lambda: decide(setting()), run)


def setting_of(kernel: Kernel | StoredKernel, program: Program | None = None) -> Setting:
    """A small matrix for a kernel, or for a program in place of the kernel's own."""
    own = program or kernel.program
    if isinstance(kernel, StoredKernel):
        return StoredSetting(kernel.recipe, own, stored_setting.smallest(kernel.recipe))
    return PreparedSetting(kernel.recipe, own, prepared_setting.smallest(kernel.recipe))


def _ran(setting: Callable[[], Setting], numbers: Numbers) -> Refutation | None:
    return ran(setting(), numbers)


def decide(setting: Setting) -> Outcome:
    """Prove or refute the theorem for one program.

    Properties that the solver cannot express, such as the rounding of a number, are tried on numbers. If these show no
    error, the theorem is undecided.
    """
    try:
        prover, y = setting.ready()
        prover.block(setting.program.body)
        refuted = _rows(setting, prover, y)
    except ArgumentError as error:
        return Refutation(f"the program leaves its memory: {error}")
    except InexactError as error:
        return _tried(setting, str(error), error.numbers)
    except UndecidedError as error:
        return _tried(setting, str(error))
    return refuted if not isinstance(refuted, int) else Proof(refuted)


def ran(setting: Setting, numbers: Numbers) -> Refutation | None:
    """Run a program on the numbers of a refutation; returns the first wrong result, if any."""
    columns = range(setting.first_column, setting.recipe.panel)
    places = [r * setting.recipe.panel + column for r, column in product(range(setting.recipe.rows), columns)]
    try:
        wrong = Demonstration(setting, *read(numbers)).wrong(places)
    except ArgumentError as error:
        return Refutation(f"the program leaves its memory: {error}")
    if wrong is None:
        return None
    return Refutation("element {place} of y is {given:g}, and should be {wanted:g}".format(**wrong), wrong)


def _tried(setting: Setting, why: str, numbers: Mapping[str, int] | None = None) -> Outcome:
    """A run with a wrong result: on the solver's numbers, on the largest codes and mantissas, or on random ones."""
    places = [r * setting.recipe.panel + setting.first_column for r in range(setting.recipe.rows)]
    ones = [leaf for each in setting.x_elements() for leaf in each.leaves]
    for chosen in [*([numbers] if numbers else []), *_trials(setting)]:
        if (found := Demonstration(setting, chosen, [] if setting.recipe.integer else ones).wrong(places)) is not None:
            return Refutation(why, {**chosen, **found})
    return Undecided(why)


def _trials(setting: Setting) -> Iterator[dict[str, int]]:
    """The largest codes with the greatest and the least mantissas, and some random ones."""
    codes = {str(each): int(each.size()) for each in setting.integers(setting.first_column)}
    bytes_ = [each for each in setting.x_elements() if each.dtype == BYTES]
    names = [str(number) for each in bytes_ for number, meaning in each.numbers if meaning.parts]
    for value in setting.mantissas:
        yield {**{code: 2**bits - 1 for code, bits in codes.items()}, **dict.fromkeys(names, value & 255)}
    random = Random(1)
    for _ in range(RANDOM):
        words = {code: random.getrandbits(bits) for code, bits in codes.items()}
        yield words | {name: random.randint(*setting.mantissas) & 255 for name in names}


def _rows(setting: Setting, prover: Prover, y: Symbols) -> Refutation | int:
    """Compare all rows of x and all columns of the tile; returns a refutation or the number of coefficients
    compared."""
    shapes, steps = dict[Any, Any](), 0
    for r, column in product(range(setting.recipe.rows), range(setting.first_column, setting.recipe.panel)):
        place = r * setting.recipe.panel + column
        key, shape = _shape(setting, prover.origin(y.data[place]), column, place)
        if (r, key) in shapes:
            steps += 1
            continue
        shapes[r, key] = shape  # kept, so that its number is not reused
        given = prover.reader.read(y.data[place])
        wanted = sum_of((variable(f"y_{place}"), setting.expected(prover, r, column)))
        for leaves, different in given.differences(wanted):
            if (numbers := satisfied(different)) is not None:
                sides = [coefficient(each.parts.get(leaves, 0.0), numbers) for each in (given, wanted)]
                what = (
                    f"in column {column} the factor of {' · '.join(leaves)} is {sides[0]:g}, and should be {sides[1]:g}"
                )
                found = Demonstration(setting, numbers, leaves).wrong([place])
                return Refutation(what, {**numbers, **dict.fromkeys(leaves, 1), **(found or {})})
        steps += len(wanted.parts)
    return steps


def _shape(setting: Setting, result: Any, column: int, place: int) -> tuple[Any, Any]:
    """A result without the names of its column's variables; equal keys mean equal results."""
    own, places = setting.variables(column)
    names = [*own, z3.FP(f"y_{place}", z3.Float32())]
    plain = [z3.Const(f"own_{number}", each.sort()) for number, each in enumerate(names)]
    shape = z3.substitute(result, *zip(names, plain, strict=True))
    return (shape.get_id(), places), shape
