r"""The exponential of a number of at most 0 in float32, and a bound of its error.

Softmax and gated units need exponentials of negative numbers only, so nothing can overflow. With :math:`k` the integer
nearest to :math:`x / \ln 2` and :math:`f = x - k \ln 2`,

.. math:: e^x = 2^k e^f, \qquad |f| \le \tfrac12 \ln 2 < 0.347,

and on such a short interval a polynomial is accurate enough.

- **k**: :math:`x \log_2 e` is added to :math:`1.5 \cdot 2^{23}`, where floats are integers; the addition rounds, and
  its low bits are k. Where x lies halfway between two integers either will do, since f follows from the one chosen.
- **f**: :math:`\ln 2` is split into :math:`355/512` and a small rest. The nine bits of :math:`355/512` make
  :math:`k \cdot 355/512` and its difference from x exact.
- **2^k**: :math:`k + 127` in the bits of the exponent. x is clamped to at least −88, so k is at least −127, where the
  exponent and the number are 0: results below :math:`2^{-126.5}` become 0.

**The error**, in units of :math:`u = 2^{-24}`, where `fmadd` rounds twice; it is smaller where it rounds once.

- Of f: the rest of :math:`\ln 2` is rounded and multiplied by k, 0.05; the sum is at most 0.35, which rounds by 0.25.
  Together 0.3, and as much relative to :math:`e^f`.
- Of the polynomial :math:`1 + f + f^2 q(f)`: 0.07 relative to :math:`e^f`, found by evaluating it.
- Of its evaluation, :math:`q`: its last sum is about a half and rounds by 1/2, and the earlier steps add as much at
  most. It is multiplied by :math:`f^2 < 0.121`, 0.12.
- :math:`r = 1 + f q`: the product is at most 0.21 and rounded by 1/8, the sum by 1 where :math:`f > 0` and by 1/2 where
  :math:`f < 0`; both are multiplied by :math:`f`: 0.4, or 0.22.
- :math:`1 + f r`: the product is at most 0.42 and rounded by 1/4; the sum by 1 where :math:`f > 0`, by 1/2 where
  :math:`f < 0`.

For :math:`f > 0` the result is above 1 and the error at most :math:`0.3 + 0.07 + 0.12 + 0.4 + 0.25 + 1 = 2.14`. For
:math:`f < 0` the result is above 0.707, and relative to it the error is at most :math:`0.3 + 0.07 + (0.12 + 0.22 + 0.25
+ 0.5) / 0.707 = 1.91`. The product with :math:`2^k` is exact where it is normal. So the error is at most 2.2 u, or 1.1
units in the last place. The bounds of the specification allow a library 8 u (`lowbit.linear.propagation`). A test
measures it.

**Less 1**: :math:`e^x - 1 = 2^k f r + (2^k - 1)` with the same :math:`r`. Near 0, where :math:`k = 0`, it is
:math:`f r` and keeps the relative error of that product. Below, :math:`2^k - 1` is exact and at least a half in
magnitude, which :math:`2^k f r`, at most 0.21, does not cancel.
"""

from collections.abc import Iterator

from lowbit.kernels.program import Instruction, Step

LEAST = -88.0
COEFFICIENTS = (
    0.0013814602280035615,
    0.008368715643882751,
    0.04166838899254799,
    0.1666652113199234,
    0.4999999403953552,
)
"""The coefficients of f^6 down to f^2 in the polynomial 1 + f + … with the least relative error."""


def constant(register: str, value: float) -> Instruction:
    """Broadcast a float."""
    return Instruction("broadcast_float", register, (value,))


CONSTANTS: tuple[Step, ...] = (
    constant("least", LEAST),
    constant("log2_e", 1.44269502162933349609375),
    constant("integers", 12582912.0),
    constant("minus_integers", -12582912.0),
    constant("minus_high", -0.693359375),
    constant("minus_low", 2.12194440e-4),
    constant("one", 1.0),
    *(constant(f"c_{6 - n}", value) for n, value in enumerate(COEFFICIENTS)),
    Instruction("broadcast_int", "bias", (127,)),
)
"""Steps that must precede `exponential`; ``one`` is 1."""


def exponential(x: str, to: str) -> Iterator[Step]:
    """Write e^x to a register, for x ≤ 0; the result is 0 for −∞ and NaN. Overwrites ``e``, ``k``, ``n``, ``p``,
    ``v``."""
    yield Instruction("maximum", "e", (x, "least"))
    yield from _reduced()
    yield Instruction("fmadd", "p", ("p", "e", "one"))
    yield from _power_of_2()
    yield Instruction("multiply", to, ("p", "k"))


def exponential_less_1(x: str, to: str) -> Iterator[Step]:
    """Write e^x − 1 to a register, for x ≤ 0; the result is −1 for −∞, and NaN for NaN. Also requires −1 in the
    register ``minus_one``. Overwrites the same registers as `exponential`."""
    yield Instruction("maximum", "e", ("least", x))
    yield from _reduced()
    yield Instruction("multiply", "p", ("p", "e"))
    yield from _power_of_2()
    yield Instruction("add", "e", ("k", "minus_one"))
    yield Instruction("fmadd", to, ("p", "k", "e"))


def _reduced() -> Iterator[Step]:
    """Reduce x in ``e`` to f in ``e``, r in ``p``, and k in the low bits of ``v``."""
    yield Instruction("fmadd", "v", ("e", "log2_e", "integers"))
    yield Instruction("add", "k", ("v", "minus_integers"))
    yield Instruction("fmadd", "e", ("k", "minus_high", "e"))
    yield Instruction("fmadd", "e", ("k", "minus_low", "e"))
    yield Instruction("fmadd", "p", ("c_6", "e", "c_5"))
    for coefficient in ("c_4", "c_3", "c_2", "one"):
        yield Instruction("fmadd", "p", ("p", "e", coefficient))


def _power_of_2() -> Iterator[Step]:
    """Compute 2^k in ``k`` from ``v``."""
    yield Instruction("as_int", "n", ("v",))
    yield Instruction("add_int", "n", ("n", "bias"))
    yield Instruction("slli", "n", ("n", 23))
    yield Instruction("as_float", "k", ("n",))
