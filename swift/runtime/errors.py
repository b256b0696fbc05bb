"""Errors that reach the trainer's thread: which of them a lost peer may be behind, and what is said of them."""

import re
import traceback
from collections.abc import Callable

# What our own communication errors say, also when torch has wrapped them.
_OURS = "process group"

# Where the source of a C++ library was when it was built.
_SOURCE = re.compile(r"\[/[^\]\s]*:\d+\]\s*")


def is_communication(error: BaseException, is_lost_peer: Callable[[RuntimeError], bool]) -> bool:
    """Whether a lost peer may be behind it, or behind what it was raised from: torch wraps what happens inside a
    backward. Any other error of a step is the trainer's own. `is_lost_peer`: the backend's."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RuntimeError) and (_OURS in str(seen).lower() or is_lost_peer(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def let_go(error: BaseException) -> None:
    """Clears the frames that the error's tracebacks hold: they keep the old group and its buffers alive."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def advice_on(error: BaseException) -> str:
    """What the author of an exception may want that tells of no mistake: one of the script's own, or one by which
    something else ends."""
    means_an_end = type(error).__module__ == "__main__" or "stop" in type(error).__name__.lower()
    return " (to end a run before its last step, call session.stop() in it)" if means_an_end else ""


def words_of(error: BaseException) -> str:
    """One line: the kind of an error that says nothing of itself, and the first line of what it says; and what it was
    raised from (torch: "[Stage 1] failed to run forward:")."""
    lines = _SOURCE.sub("", str(error)).strip().splitlines()
    first = " ".join(lines[0].split()) if lines else ""
    words = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return f"{words.removesuffix(':')}: {words_of(error.__cause__)}" if error.__cause__ is not None else words


class Rehearsed(Exception):
    """The step is as far as it is to go (`swift.runtime.rehearsal`, `swift.runtime.warming`)."""


class Misspeculated(Exception):
    """A step has gone on as if nothing had to be clipped. All ranks take it back (`swift.runtime.staggering`)."""
