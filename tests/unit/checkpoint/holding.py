"""What a `CheckpointStore` asks of the process that it belongs to."""

from swift_ft.state.checkpoint_store import Unsaved


class Holding:
    """It holds its rank, in some generation."""

    def __init__(self, *, fenced: bool = False, entered: int = 0) -> None:
        self.fenced = fenced
        self.entered = entered


def unexpected(unsaved: Unsaved) -> None:
    """(of a save that is expected to work)"""
    raise AssertionError(unsaved.reason)
