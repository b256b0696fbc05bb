"""What `swift-ft verify-determinism` was asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swift.errors import UsageError
from swift.failures.grammar import RankFault
from swift.recovery.strategies import may_finish
from swift.recovery.types import shrinks

RUN = "{run}"
"""In an argument of the script: the directory of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All of it is checked, but for what the script's own run must show: how many steps there are."""

    script: Path
    arguments: Sequence[str]
    ranks: int
    own_checkpoints: bool
    strategy: str | None
    lost_shard: str | None
    snapshot_every: int | None
    allow_inexact: bool
    kill: RankFault | None
    """None: `seed` chooses it."""
    seed: int
    patience_s: float
    """A run of which nothing is heard for so long is given up."""
    json_path: Path | None
    directory: Path | None
    keep: bool

    def __post_init__(self) -> None:
        if not self.script.is_file():
            raise UsageError(f"{self.script}: there is no such script")
        if self.ranks < 1:
            raise UsageError(f"--nproc-per-node {self.ranks}: 1 or more")
        if self.patience_s <= 0:
            raise UsageError(f"--patience-s {self.patience_s:g}: seconds, more than 0")
        if self.kill is not None and self.kill.rank >= self.ranks:
            raise UsageError(f"--kill {self.kill}: there are ranks 0 to {self.ranks - 1}")
        if self.own_checkpoints:
            for flag, value in (
                ("--strategy", self.strategy),
                ("--lost-shard", self.lost_shard),
                ("--snapshot-every", self.snapshot_every),
            ):
                if value is not None:
                    raise UsageError(
                        f"{flag} is for scripts with a session; leave it or --own-checkpoints out"
                    )

    @property
    def inexact(self) -> str:
        """The flags that ask for what promises no bits; empty: none does."""
        given = [f"--lost-shard {self.lost_shard}"] if self.lost_shard == "drop" else []
        if self.strategy is not None and may_finish(self.strategy):
            given.append(f"--strategy {self.strategy}")
        return " ".join(given)

    @property
    def replaces(self) -> bool:
        """A process is started for a lost rank."""
        return self.lost_shard is None and (self.strategy is None or not shrinks(self.strategy))
