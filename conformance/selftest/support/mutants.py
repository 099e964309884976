"""Mutants of programs: one mistake each, of the kinds that generators of kernels make."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from lowbit.kernels.program import Address, Advance, Instruction, Loop, Program, Step

Change = Callable[[Step], Step | None]
"""A step with a mistake, or None where there is none of this kind."""


def shifted(step: Step) -> Step | None:
    """A code is shifted by a bit too few."""
    if isinstance(step, Instruction) and step.word == "srli":
        word, by = step.arguments
        assert isinstance(by, int)
        return replace(step, arguments=(word, by - 1))
    return None


def unmasked(step: Step) -> Step | None:
    """A mask is left out."""
    if isinstance(step, Instruction) and step.word == "and":
        return replace(step, word="or", arguments=(step.arguments[0], step.arguments[0]))
    return None


def another_word(step: Step) -> Step | None:
    """Words are loaded from the next row."""
    if isinstance(step, Instruction) and step.word == "load_int":
        (address,) = step.arguments
        assert isinstance(address, Address)
        return replace(step, arguments=(replace(address, offset=address.offset + 1),))
    return None


def another_activation(step: Step) -> Step | None:
    """An activation is that of the next code."""
    if isinstance(step, Instruction) and step.word.startswith("broadcast") and isinstance(step.arguments[0], Address):
        address = step.arguments[0]
        return replace(step, arguments=(replace(address, offset=address.offset + 1),))
    return None


def forgotten(step: Step) -> Step | None:
    """A product is added to itself, and not to the sum before it."""
    if isinstance(step, Instruction) and step.word == "fmadd":
        return replace(step, arguments=(*step.arguments[:2], step.arguments[0]))
    if isinstance(step, Instruction) and step.word in ("dot4", "add_pairs"):
        return replace(step, arguments=(step.arguments[1], *step.arguments[1:]))
    return None


def too_far(step: Step) -> Step | None:
    """A pointer moves too far."""
    if isinstance(step, Advance) and step.pointer in ("w", "s", "z") and step.step > 0:
        return replace(step, step=step.step - 1)
    return None


def wrong_scale(step: Step) -> Step | None:
    """A scale, or a zero, is that of other columns."""
    if isinstance(step, Instruction) and step.word in ("load_half", "load_byte"):
        (address,) = step.arguments
        assert isinstance(address, Address)
        return replace(step, arguments=(replace(address, offset=address.offset - 1),))
    return None


CHANGES: tuple[Change, ...] = (*(shifted, unmasked, another_word, another_activation, forgotten, too_far, wrong_scale),)


def mutants(program: Program, change: Change) -> Iterator[Program]:
    """The program with a mistake at each of its steps that can have it, one at a time."""
    for place in range(sum(1 for _ in _steps(program.body))):
        count = iter(range(place + 1))

        def changed(steps: tuple[Step, ...], count: Iterator[int] = count, place: int = place) -> tuple[Step, ...]:
            found = list[Step]()
            for step in steps:
                here = next(count, None) == place
                if isinstance(step, Loop):
                    found.append(replace(step, body=changed(step.body)))
                else:
                    found.append((change(step) if here else None) or step)
            return tuple(found)

        body = changed(program.body)
        if body != program.body:
            yield replace(program, body=body)


def _steps(steps: tuple[Step, ...]) -> Iterator[Step]:
    for step in steps:
        yield step
        if isinstance(step, Loop):
            yield from _steps(step.body)
