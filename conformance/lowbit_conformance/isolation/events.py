"""What the process that judges tells the command while it runs: one line for an event, each of them authenticated.

The command reads events from a pipe, so that it can show progress and, should the judge end early, name the case that
was running. A backend that reached this pipe could write a verdict of its own. So each line begins with an HMAC-SHA256
over the rest, which holds the number of the event and then the event as a JSON object. The command makes the key and
sends it to the judge before there is a host. A line that somebody else wrote has no valid code, and a line that is
missing, repeated or out of order has the wrong number.
"""

import hashlib
import hmac
import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from lowbit.text import quoted

BEAT = 1.0  # seconds between two signs of life
MOST_LINE = 1 << 27  # bytes

Event = dict[str, Any]


class EventPipe:
    """The writing end: one line for each event, written at once; several threads may use it."""

    def __init__(self, descriptor: int, key: bytes) -> None:
        self._descriptor, self._key, self._number = descriptor, key, 0
        self._lock, self._ended = threading.Lock(), threading.Event()

    def send(self, kind: str, **content: object) -> None:
        text = json.dumps({"event": kind} | content)
        with self._lock:
            line = signed(self._key, self._number, text)
            self._number += 1
            while line:
                line = line[os.write(self._descriptor, line) :]

    def start_beating(self) -> None:
        """Send a sign of life each second, which distinguishes a long computation from a stopped process."""
        threading.Thread(target=self._beat, daemon=True).start()

    def stop_beating(self) -> None:
        self._ended.set()

    def _beat(self) -> None:
        with suppress(OSError):  # the command has gone, and ends this process
            while not self._ended.wait(BEAT):
                self.send("beat")


def signed(key: bytes, number: int, text: str) -> bytes:
    """A line of the pipe."""
    content = f"{number} {text}".encode()
    return hmac.new(key, content, hashlib.sha256).hexdigest().encode() + b" " + content + b"\n"


class EventReader:
    """The reading end.

    Attributes:
        forged: what was wrong with the first line that the judge cannot have written; empty if there was none.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._next, self._rest = key, 0, bytearray()
        self.forged = ""

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that are complete after these bytes; lines that are not events of the judge are noted and left
        out."""
        self._rest += data
        if len(self._rest) > MOST_LINE:
            self._refuse(f"a line of more than {MOST_LINE} bytes")
            self._rest.clear()
        if b"\n" not in data:
            return
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            if (event := self._event(line)) is not None:
                yield event

    def _event(self, line: bytes) -> Event | None:
        code, _, content = line.partition(b" ")
        if not hmac.compare_digest(code, hmac.new(self._key, content, hashlib.sha256).hexdigest().encode()):
            self._refuse(f"{quoted(line.decode(errors='replace'))}, which the process that judges did not write")
            return None
        number, _, text = content.partition(b" ")
        if int(number) != self._next:
            self._refuse(f"event {int(number)} where event {self._next} was due")
        self._next = max(self._next, int(number) + 1)
        event: Event = json.loads(text)
        return event

    def _refuse(self, what: str) -> None:
        self.forged = self.forged or f"the pipe of events held {what}"
