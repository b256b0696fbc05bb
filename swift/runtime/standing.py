"""What a rank has to offer when a recovery is planned."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What a rank can say of itself to the planner."""

    version: int | None
    undo_to: int | None = None
    undo_exact: bool = False
    forward_to: int | None = None
    forward_by_all: bool = False
    finish_to: int | None = None

    def words(self) -> dict[str, int | None]:
        words = {"version": self.version, "undo_to": self.undo_to, "forward_to": self.forward_to}
        return words if self.finish_to is None else {**words, "finish_to": self.finish_to}
