"""Late binding of parts (`Hook`), and differences that make a job inexact (`Differences`)."""

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from swift_ft.rpc.client import CoordinatorClient

# Something that a recovery does not know of has been found: the job is not exact from there on.


class Differences:
    """Told by whoever compares (`swift_ft.train.step_digests`, `swift_ft.train.batch_redistribution`). Trainer's
    thread only."""

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client

    def say(self, step: int, words: str) -> None:
        """Durable when this returns."""
        self._client.differs(step, words)


P = ParamSpec("P")
R = TypeVar("R")


class Hook(Generic[P, R]):
    """A call that is bound once, by whoever puts the parts together, and never missing in silence.

    ::

        (a part)    self.vote: Hook[[], None] = Hook("Updates.vote")
        (session)   updates.vote.bind(engine.vote)
        (the part)  self.vote()

    An `AssertionError` names the hook that is called unbound, or bound twice: a session that is put together wrongly
    must not train.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._function: Callable[P, R] | None = None

    def bind(self, function: Callable[P, R]) -> None:
        if self._function is not None:
            raise AssertionError(f"{self._name} is bound already")
        self._function = function

    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        if self._function is None:
            raise AssertionError(f"{self._name} is bound to nothing")
        return self._function(*args, **named)
