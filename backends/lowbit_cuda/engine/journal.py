"""Journal: where every expert is known to lie, also when something has gone wrong.

Under swap most experts lie in one place only, and a promotion exchanges two: the newcomer is copied from its place on
the host into a block, and then the victim from its own block into that place. Whatever fails, and wherever, each of
the two must lie somewhere afterwards, and the engine must know where.

It holds at every moment because of the order of the two copies: the place is overwritten when the newcomer has arrived,
and the victim's block is not overwritten until the victim has arrived too. To know *which* moment it was, each copy is
written down before it is asked for (`Move`), together with the copy that it must come after. When everything has come
to rest, the journal is read from its beginning:

- a copy whose event is reached has been done: its target holds the expert;
- a copy that waits for one that was not done has not begun: its target holds what it held;
- of any other nobody knows how far it came: its target holds nothing.

An event is trusted: it is reached only when all that its stream was given before was done, and behind a copy that has
failed nothing begins. That is what a device promises (`lowbit_cuda.port`), however late it tells.

Source: lowbit's own; the exchange is that of MoE offloading §3.3.
"""

from collections import deque
from dataclasses import dataclass

from lowbit_cuda.engine.blobs import Expert, Home
from lowbit_cuda.port import DevicePort, Event


@dataclass(eq=False)
class Move:
    """A copy that was asked for.

    Attributes:
        expert: which.
        target: where to.
        after: the last copy out of the target before, which this one waits for; those before it are done when it is,
            because copies out of a home are in one stream.
        done: reached when it is done; None where it may not have been asked for.
        known: whether it is known to be done.
    """

    expert: Expert
    target: Home
    after: "Move | None"
    done: Event | None = None
    known: bool = False


class Journal:
    """The copies that are not known to be done, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._moves: deque[Move] = deque()

    def begin(self, expert: Expert, target: Home, source: Home) -> Move:
        """A copy is about to be asked for."""
        move = Move(expert, target, target.left)
        self._moves.append(move)
        source.left = move
        return move

    def settle(self, port: DevicePort) -> None:
        """Strike out what is done by now, without waiting for anything."""
        while self._moves and self._moves[0].done is not None and port.reached(self._moves[0].done):
            self._note(self._moves[0])
            self._moves.popleft()

    def resolve(self, port: DevicePort) -> None:
        """Everything has come to rest: settle where each copy ended."""
        for move in self._moves:
            if move.done is not None and port.reached(move.done):
                self._note(move)
            elif move.after is None or move.after.known:
                move.target.holds = None
        self._moves.clear()

    def _note(self, move: Move) -> None:
        move.known, move.target.holds = True, move.expert
        move.after = None  # or each copy would keep all before it
