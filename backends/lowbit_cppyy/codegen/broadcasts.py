"""Numbers of x as operands in memory, where a multiply-add can broadcast one.

A register of activations is broadcast once and read by several multiply-adds, and a compiler keeps it so. On a Zen 4 a
broadcast to 512 bits takes a port of the multiply-adds, but as an operand in memory it is free: unpacking, converting
and multiplying sixteen codes takes 1.5 cycles with or without it, and 1.67 if every four of them share one that stands
alone (*measured*). There tokens of SmolLM2 are 1.04 to 1.06 times as fast in float32.

So each use gets a broadcast of its own, which the compiler makes part of the multiply-add. It would join broadcasts of
one address; therefore each reads through another copy of the pointer, and the compiler does not know that they are
equal. The bits of a result are the same. An Ice Lake is slower that way; there the compiler is allowed to join them
(`lowbit_cppyy.runtime.vendor`).

Each operand in memory is one more load, and each copy of the pointer has to be moved. Units of 8-bit codes, which load
words for every four codes anyway, take 1.2 times as long with it (*measured*). They have four broadcasts between two
moves of x; `FEWEST` leaves them out.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from lowbit.kernels.program import Address, Advance, Instruction, Loop, Program, Step

POINTER = "x"
MOST = 4
"""The most uses of a broadcast; more copies of the pointer would not fit the registers of addresses."""
FEWEST = 8
"""The fewest broadcasts between two moves of the pointer."""

Steps = tuple[Step, ...]


@dataclass(frozen=True)
class Broadcast:
    """A register that is broadcast from x.

    Attributes:
        name: of the register.
        uses: multiply-adds that read it, in the same run of steps.
        together: broadcasts of the run, this one included.
    """

    name: str
    uses: int
    together: int


def separated(program: Program) -> tuple[Steps, list[str]]:
    """The steps of a program with a broadcast for each use, and the names of the copies of the pointer.

    A register is treated so if it holds nothing but floats broadcast from x, and if its readers are multiply-adds that
    follow in the same run of steps, which ends where x moves and where a loop begins.

    >>> sums = [f"y_{n}" for n in range(2)]
    >>> program = Program(4, (
    ...     *(Instruction("broadcast_float", sum, (0.0,)) for sum in sums),
    ...     *(step for code in range(FEWEST) for step in (
    ...         Instruction("broadcast_float", "x_0", (Address("x", code),)),
    ...         *(Instruction("fmadd", sum, ("x_0", "x_0", sum)) for sum in sums),
    ...     )),
    ... ))
    >>> steps, copies = separated(program)
    >>> for step in steps[2:6]:
    ...     print(step.target, "=", step.word, *step.arguments)
    x_0 = broadcast_float x + 0
    y_0 = fmadd x_0 x_0 y_0
    x_0_1 = broadcast_float x1 + 0
    y_1 = fmadd x_0_1 x_0_1 y_1
    >>> copies
    ['x1']
    """
    found = list(_broadcasts(program.body))
    reads, writes, uses = Counter[str](), Counter(each.name for each in found), Counter[str]()
    for step in program.instructions():
        reads.update(set(step.reads()))
        writes[step.target] -= 1
    for each in found:
        uses[each.name] += each.uses
    refused = {each.name for each in found if each.uses > MOST or each.together < FEWEST}
    names = {name for name, count in uses.items() if count == reads[name] and not writes[name]} - refused
    copies = [f"{POINTER}{n}" for n in range(1, max((each.uses for each in found if each.name in names), default=1))]
    return tuple(_rewritten(program.body, names, copies)), copies


def _broadcasts(steps: Steps) -> Iterator[Broadcast]:
    """The broadcasts from x, with their uses."""
    run: list[tuple[str, int]] = []
    last: dict[str, int] = {}  # the place in the run of a register's last broadcast
    for step in (*steps, Advance(POINTER, 0)):
        if isinstance(step, Loop) or (isinstance(step, Advance) and step.pointer == POINTER):
            yield from (Broadcast(name, uses, len(run)) for name, uses in run)
            run, last = [], {}
        if isinstance(step, Loop):
            yield from _broadcasts(step.body)
        elif isinstance(step, Instruction):
            for name in set(step.reads()) & last.keys():
                place = last[name]
                run[place] = name, run[place][1] + (step.word == "fmadd")
            last.pop(step.target, None)
            if _from_x(step):
                last[step.target] = len(run)
                run.append((step.target, 0))


def _from_x(step: Instruction) -> bool:
    source = step.arguments[0] if step.word == "broadcast_float" else None
    return isinstance(source, Address) and source.pointer == POINTER


def _rewritten(steps: Steps, names: set[str], copies: list[str]) -> Iterator[Step]:
    """The steps with a broadcast of one of these registers before each instruction that reads it."""
    offsets, used = dict[str, int](), Counter[str]()
    for step in steps:
        if isinstance(step, Loop):
            yield Loop(step.index, step.count, tuple(_rewritten(step.body, names, copies)))
        elif isinstance(step, Instruction) and step.target in names:
            source = step.arguments[0]
            assert isinstance(source, Address)
            offsets[step.target], used[step.target] = source.offset, 0
        elif isinstance(step, Instruction):
            own: dict[str, str] = {}
            for name in sorted(names.intersection(step.reads())):
                number, used[name] = used[name], used[name] + 1
                own[name] = f"{name}_{number}" if number else name
                pointer = copies[number - 1] if number else POINTER
                yield Instruction("broadcast_float", own[name], (Address(pointer, offsets[name]),))
            yield Instruction(step.word, step.target, tuple(own.get(str(each), each) for each in step.arguments))
        else:
            yield step
            if isinstance(step, Advance) and step.pointer == POINTER:
                yield from (Advance(pointer, step.step) for pointer in copies)
