"""Ranks that compute a recovery group's stages together, and what they must do alike.

Nothing that passes inside a group is logged: whoever computes a microbatch of one stage gets it from somebody who
computes the same microbatch of the stage before, and would wait for ever for one who leaves it to others. So the owners
of a group agree who computes what before they share anything, and in every step that they share it at all; the helpers
of a copy compare what they were given.
"""

from collections.abc import Sequence
from typing import Any

from swift.errors import ReplayRefused
from swift.recovery import Help
from swift.runtime.backends.base import Wire
from swift.runtime.shared_replay.gradient_chain import Post


def copy_of(helper: int, planned: Sequence[Help]) -> tuple[int, ...]:
    """The ranks of the copy of a recovery group that `helper` is one of, by stage; itself alone for a single stage."""
    mine = next((help for help in planned if helper in help.helpers), None)
    if mine is None or not mine.together:
        return (helper,)
    number = list(mine.helpers).index(helper)
    helpers = {help.owner: help.helpers for help in planned}
    return tuple(helpers[owner][number] for owner in mine.together)


class Together:
    """One of `ranks`, which speak in turns: each says something, and knows what all have said."""

    def __init__(self, rank: int, ranks: Sequence[int], wire: Wire):
        self._rank = rank
        self.ranks = tuple(ranks)
        self._post = Post(wire)

    @property
    def behind(self) -> int:
        """How many stages of the group come behind this rank's."""
        return len(self.ranks) - self.ranks.index(self._rank) - 1

    def agree(self, mine: Any) -> list[Any]:
        """What each says (JSON), by the order of the ranks. All must call it equally often; it waits for all."""
        others = [rank for rank in self.ranks if rank != self._rank]
        for other in others:
            self._post.note(other, mine)
        told = {other: self._post.read(other)[0] for other in others}
        self._post.settle()
        return [told.get(rank, mine) for rank in self.ranks]

    def choose(self, able: Sequence[int], declined: dict[str, str]) -> tuple[list[int], dict[str, str]]:
        """(owners, before anything is shared) The copies of which no helper has declined, and who has declined why."""
        answers = self.agree({"able": list(able), "declined": declined})
        reasons = {rank: why for answer in answers for rank, why in answer["declined"].items()}
        return [copy for copy in able if all(copy in answer["able"] for answer in answers)], reasons

    def first_reason(self, why: str) -> dict[str, str]:
        """(owners) Who of them cannot share, the first of them; empty: all can."""
        reasons = zip(self.ranks, self.agree(why), strict=True)
        return next(({str(rank): words} for rank, words in reasons if words), {})

    def at(self, step: int, own: range, why: str) -> str:
        """(owners, in every step) Why no owner shares this one, be it this rank's `why`; empty: all do, alike."""
        if len(self.ranks) == 1:
            return why
        answers = self.agree([step, own.start, own.stop, why])
        self._compare([answer[:3] for answer in answers], "shares of a step")
        refusing = next(
            ((rank, answer[3]) for rank, answer in zip(self.ranks, answers, strict=True) if answer[3]), None
        )
        return "" if refusing is None else f"rank {refusing[0]}: {refusing[1]}"

    def compare(self, given: Sequence[int]) -> None:
        """(helpers of a copy) Raises ReplayRefused unless all were given the same."""
        self._compare(self.agree(list(given)), "microbatches of one copy")

    def _compare(self, answers: list[list[int]], what: str) -> None:
        if any(answer != answers[0] for answer in answers):
            shown = ", ".join(
                f"rank {rank}: {answer}" for rank, answer in zip(self.ranks, answers, strict=True)
            )
            raise ReplayRefused(f"ranks that replay a recovery group together disagree on {what}: {shown}")


def decline(wire: Wire, rank: int, help: Help, why: str) -> dict[str, str]:
    """(an owner that cannot share its replay) To the other owners of its group. Who has declined, and why."""
    return Together(rank, help.together or (rank,), wire).choose([], {str(rank): why})[1]
