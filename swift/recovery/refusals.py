"""What ranks refused, so that it is not planned again."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from swift.recovery.strategies import TABLE, replaying
from swift.recovery.types import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusals:
    """What ranks refused to do in this recovery: it is not planned again before the job runs."""

    strategies: tuple[Strategy, ...] = ()
    """In the order of Strategy. KEEP among them: nothing will do but to go back, to a snapshot or a checkpoint."""
    reason: str = ""
    """Of the latest one, for people."""
    help: bool = False
    """Something went wrong in a replay that others helped with: each owner replays alone."""

    @property
    def replays(self) -> bool:
        """Some replay."""
        return not replaying().isdisjoint(self.strategies)

    @property
    def everything(self) -> bool:
        return Strategy.KEEP in self.strategies

    def and_of(self, strategies: Iterable[Strategy], reason: str) -> "Refusals":
        """These as well, for `reason`. CHECKPOINT is not counted: which one cannot be loaded matters there."""
        union = {*self.strategies, *strategies} - {Strategy.CHECKPOINT}
        ordered = tuple(s for s in Strategy if s in union)
        return Refusals(strategies=ordered, reason=reason, help=self.help)

    def and_everything(self, reason: str) -> "Refusals":
        return self.and_of((s for s in Strategy if not TABLE[s].goes_back), reason)

    def and_help(self, reason: str) -> "Refusals":
        return replace(self, help=True, reason=reason)
