"""SIGTERM of a launcher whose job runs: a checkpoint first, so that no step is lost when the job is started again.

::

    (somebody)    SIGTERM
    (launcher)    asks the coordinator for a checkpoint, and goes on looking after its ranks
    (all ranks)   save the version that the View names then (`checkpoint_at`)
    (launcher)    it is complete, or the time is up, or another signal has come: the ranks are ended

A job that does not run has nothing newer than its newest checkpoint: then it is left at once.
"""

import signal

from swift import events
from swift._pb import coordinator_pb2 as pb
from swift.launch.link import CoordinatorLink
from swift.launch.signals import SignalGate
from swift.launch.torch_names import SignalException


class Leaving:
    """(main loop) ``check`` whenever something has happened."""

    def __init__(self, gate: SignalGate, link: CoordinatorLink, patience_s: float) -> None:
        """`patience_s`: for the checkpoint; 0: none is made."""
        self._gate = gate
        self._link = link
        self._patience_s = patience_s
        self._until: float | None = None
        """When it leaves whatever there is; None: nobody has sent SIGTERM."""
        self._newest = -1
        self._wanted: int | None = None

    def begins(self, view: pb.View | None) -> bool:
        """True: SIGTERM has come just now, and a checkpoint is made before it is followed. Raises SignalException: a
        signal is followed at once."""
        runs = view is not None and view.state == pb.RUNNING
        if self._until is not None or not self._patience_s or not runs or not self._gate.take(signal.SIGTERM):
            self._gate.check()
            return False
        assert view is not None
        self._until = events.now() + self._patience_s
        self._newest = max(view.checkpoints, default=-1)
        self._link.ask_checkpoint("a launcher was told to stop")
        return True

    def patience_s(self, longest_s: float) -> float:
        """How long the loop may wait for something to happen."""
        return longest_s if self._until is None else min(longest_s, max(0.0, self._until - events.now()))

    def check(self, view: pb.View | None) -> None:
        """Raises SignalException once nothing is worth waiting for any more."""
        if self._until is None:
            return
        newest = -1 if view is None else max(view.checkpoints, default=-1)
        if view is not None and view.HasField("checkpoint_at"):
            self._wanted = view.checkpoint_at
        saved = newest > self._newest if self._wanted is None else newest >= self._wanted
        runs = view is not None and view.state == pb.RUNNING
        if saved or not runs or self._link.not_asked or events.now() >= self._until:
            events.emit("leaves", saved=saved, version=newest)
            raise SignalException("got SIGTERM", sigval=signal.SIGTERM)
