"""The codes of a model as a whole, for the configuration of a directory."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from lowbit.errors import ArgumentError
from lowbit.formats.fetch import Report
from lowbit.model.matrices import Matrix
from lowbit.quantization.coded import CodedMatrix
from lowbit.rewriting.layouts import Description, Layout, pattern_of
from lowbit.rewriting.packers import coded_of
from lowbit.rewriting.source import Source
from lowbit.rewriting.writing import Target


@dataclass
class Codes:
    """The description of the matrices of a model, collected one by one.

    Attributes:
        bits: of each tensor of codes, by the name of its module.
        sizes: the lengths of their groups.
        whole: whether every group is a whole column.
        floats: the modules that are floats.
        symmetric: whether every zero is the middle of the codes.
        act_order: whether the groups of some are not runs of rows.
        nbytes: the approximate bytes of all codes, scales and zeros.
        weights: the number of codes.
    """

    bits: dict[str, int] = field(default_factory=dict)
    sizes: set[int] = field(default_factory=set)
    whole: bool = True
    floats: list[str] = field(default_factory=list)
    symmetric: bool = True
    act_order: bool = False
    nbytes: int = 0
    weights: int = 0

    def add(self, module: str, coded: CodedMatrix | None) -> None:
        """Count a tensor; None stands for one of floats."""
        if coded is None:
            self.floats.append(module)
            return
        self.bits[module] = coded.bits
        self.sizes.add(coded.group_size)
        self.whole &= coded.group_size >= len(coded.codes)
        self.symmetric &= not coded.has_minima and bool((coded.offsets == 2 ** (coded.bits - 1)).all())
        self.act_order |= not coded.in_order
        self.nbytes += (coded.codes.size * coded.bits + 32 * coded.scales.size) // 8
        self.weights += coded.codes.size

    def description(self, layout: Layout, floats: Sequence[str]) -> Description:
        """The description for the configuration.

        Args:
            layout: of the directory.
            floats: the modules that stay floats in any case.

        Raises:
            ArgumentError: no codes; several group lengths or numbers of bits, if the layout has only one.
        """
        if not self.bits:
            sentence = f"the model has no codes for the layout {layout.name}; lowbit quantize makes them"
            raise ArgumentError("matrices", "floats", "codes", sentence)
        counted = Counter(self.bits.values())
        most = max(counted, key=lambda bits: (counted[bits], bits))
        others = {name: bits for name, bits in self.bits.items() if bits != most}
        if others and not layout.mixes_bits:
            name, bits = next(iter(others.items()))
            sentence = f"the layout {layout.name} has one number of bits: {name} has {bits}, others have {most}"
            raise ArgumentError("bits", spoken_set(counted), "the same for all matrices", sentence)
        if len(self.sizes) > 1 and not (self.whole and layout.has_order):
            sentence = f"the layout {layout.name} has one length of groups; the model has {spoken_set(self.sizes)}"
            raise ArgumentError("group_size", spoken_set(self.sizes), "the same for all matrices", sentence)
        return Description(
            bits=most,
            group_size=-1 if len(self.sizes) > 1 else next(iter(self.sizes)),
            symmetric=self.symmetric,
            act_order=self.act_order,
            floats=(*floats, *self.floats),
            other_bits={pattern_of(name): bits for name, bits in others.items()},
        )


def spoken_set(numbers: Counter[int] | set[int]) -> str:
    """A set of numbers as a phrase."""
    return " and ".join(map(str, sorted(numbers)))


def codes_of(source: Source, target: Target, report: Report) -> Codes:
    """Read all codes of a model.

    Raises:
        ArgumentError: a matrix in a format other than codes with scales and zeros.
    """
    found, layers = Codes(), source.config.layers
    for number in range(layers):
        report("", number, layers)
        linears = source.layer(number).linears()
        for module, names in target.holders(source, number):
            with about(module):
                found.add(module, together([linears[name] for name in names]))
    return found


@contextmanager
def about(module: str) -> Iterator[None]:
    """Add the name of the matrix to an error.

    Raises:
        ArgumentError: the error of the block, with the name before it.
    """
    try:
        yield
    except ArgumentError as error:
        sentence = f"{module} cannot be converted without a loss: {error}"
        raise ArgumentError(error.argument, error.given, error.allowed, sentence) from error


def together(matrices: Sequence[Matrix]) -> CodedMatrix | None:
    """Matrices with the same rows as one; None if all are floats.

    Raises:
        ArgumentError: matrices that are not codes in groups, or that differ in bits, groups or types.
    """
    floats = [isinstance(each, np.ndarray) for each in matrices]
    if all(floats):
        return None
    if any(floats):
        raise ArgumentError("matrices of one tensor", "codes and floats", "all of them codes")
    parts = [coded_of(each) for each in matrices]
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        if _kind(part) != _kind(first) or not np.array_equal(part.g_idx, first.g_idx):
            raise ArgumentError("matrices of one tensor", "of different codes", "the same bits, groups and types")
    codes, scales, offsets = (
        np.concatenate([getattr(part, name) for part in parts], axis=1) for name in ("codes", "scales", "offsets")
    )
    return CodedMatrix(codes, scales, offsets, first.g_idx, first.bits, first.group_size, first.has_minima)


def _kind(coded: CodedMatrix) -> tuple[int, int, bool, str]:
    return coded.bits, coded.group_size, coded.has_minima, coded.scales.dtype.name
