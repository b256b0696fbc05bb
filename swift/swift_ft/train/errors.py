"""Late binding of parts (`Hook`), and differences that make a job inexact (`Differences`)."""

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from swift_ft.rpc.client import CoordinatorClient

# A difference shows state that a recovery does not restore: the job is not exact from there on.


class Differences:
    """Reports differences to the coordinator, for the parts that compare (`swift_ft.train.step_digests`,
    `swift_ft.train.batch_redistribution`). Used by the trainer's thread only."""

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client

    def say(self, step: int, words: str) -> None:
        """Reports a difference. It is durable at the coordinator when this returns."""
        self._client.differs(step, words)


P = ParamSpec("P")
R = TypeVar("R")


class Hook(Generic[P, R]):
    """A callback that is bound once, by the code that assembles the parts. A missing binding is an error.

    ::

        (a part)    self.vote: Hook[[], None] = Hook("Updates.vote")
        (session)   updates.vote.bind(engine.vote)
        (the part)  self.vote()

    Raises `AssertionError` with the hook's name if it is called unbound or bound twice, since a wrongly assembled
    session must not train.
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
