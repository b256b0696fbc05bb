"""Late binding of a session's parts."""

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

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
