"""A sidecar that kills itself at a named point: ``DIE_AT=assigned:3 DIE_ONCE=FILE``, the third time it comes there.

Started in the place of `swift_ft.log.sidecar`. FILE grows by a byte before it dies. With ``SENDS=1`` servers do not get
its memory.
``DIE_AT=assigned:3,after-learn:1``: its successor dies as well, at the second point. There is nothing to die of once
all points are used up.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swift_ft.log import ring, sender, sender_core, sidecar
from swift_ft.log import sidecar as ring_writer
from swift_ft.log.ring import Word

deaths = Path(os.environ["DIE_ONCE"])
points = os.environ["DIE_AT"].split(",")
before = deaths.stat().st_size if deaths.exists() else 0
point, _, at = points[before].partition(":") if before < len(points) else ("", "", "0")
left = int(at)


def die(here: str) -> None:
    global left
    if here != point:
        return
    left -= 1
    if left == 0:
        with deaths.open("ab") as file:
            file.write(b".")
        os.kill(os.getpid(), signal.SIGKILL)


def around(owner: Any, name: str, before: str, after: str) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        die(before)
        result = original(*args, **kwargs)
        die(after)
        return result

    setattr(owner, name, wrapped)


def assign(entry: ring.RingEntry, copy: int, value: int) -> None:
    original_assign(entry, copy, value)
    if value >= 0:
        die("assigned")


def store(memory: ring.Memory, word: int, value: int) -> None:
    if word == Word.TAIL:
        die("before-tail")
    original_store(memory, word, value)
    if word == Word.TAIL:
        die("after-tail")
    if word in Word.SERVERS and not value and memory.load(Word.TAIL):
        die("cleared")


def move(memory: ring.Memory, *args: Any) -> dict[int, int]:
    """Of a sidecar that is not the first one."""
    if memory.load(Word.TAIL):
        die("before-move")
    found = original_move(memory, *args)
    if memory.load(Word.TAIL):
        die("after-move")
    return found


if os.environ.get("SENDS"):
    sender.hand_over = lambda *_: False
original_move = ring.Memory.assign
ring.Memory.assign = move  # type: ignore[method-assign]
original_assign = ring.RingEntry.set_sequence
ring.RingEntry.set_sequence = assign  # type: ignore[method-assign]
original_store = ring.Memory.store
ring.Memory.store = store  # type: ignore[method-assign]
around(ring.Memory, "set_acked", "before-acked", "after-acked")
around(ring_writer.RingWriter, "_send", "before-take", "after-take")
around(sender_core, "_message", "before-message", "after-message")
around(sender, "hand_over", "before-hand-over", "after-hand-over")
around(sender.Link, "_on_reply", "before-reply", "after-reply")
around(ring_writer.RingWriter, "_learn", "before-learn", "after-learn")
around(ring_writer.RingWriter, "discard", "before-discard", "after-discard")

if __name__ == "__main__":
    sidecar.main(sys.argv[1:])
