"""Something that a recovery does not know of has been found: the job is refused, or not exact from there on."""

from swift.control.client import CoordinatorClient
from swift.errors import UsageError


class Differences:
    """Told by whoever compares (`swift.runtime.witness`, `swift.runtime.script`). Trainer's thread only."""

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client
        self.refusing = False
        """(rehearsal) The job has done no step yet, so that it can still be refused."""

    def say(self, step: int, words: str) -> None:
        """Durable when this returns. Raises UsageError if the job is refused for it."""
        if self.refusing:
            raise UsageError(f"step {step} was computed twice from one state (paranoid), and {words}")
        self._client.differs(step, words)
