"""Failures with coordinates: the part that a rank makes happen itself.

The environment variable ``SWIFT_FAULTS`` holds a JSON list of ``{"id", "rank", "step", "microbatch", "phase", "layer",
"bucket", "kind", "for_s", "hold", "beside"}`` (`swift_ft.fault_grammar`). At its coordinates a rank does what the kind
says. "kill", which is the default: it sends SIGKILL to itself, and the kernel ends it in the middle of what it does,
as a lost machine would. "stop": SIGSTOP. "hang": its thread waits for ``for_s`` seconds, or for ever. "pause": nothing,
but for what "hold" says. A failure fires once per job: ``<id>.fired`` in ``SWIFT_FAULTS_DIR`` is made first.
With the phase "flip" it lives, and a bit of the replica's state that it receives is flipped on arrival.
With ``hold`` the rank makes ``<id>.reached`` and waits for ``<id>.go``, so that whoever has started it can prepare the
log, or do at this place what a rank cannot. With ``beside`` it dies once these ranks have come as far as well, of which
each makes ``<id>.rank<n>``: a loss that is to find replicas half-way must not come before they are.
"""

import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from swift_ft import events
from swift_ft.errors import ServiceError
from swift_ft.fault_grammar import ENV_FAULTS, ENV_FAULTS_DIR

_WHOLE_STEP = ("optimizer", "idle", "reduce", "update", "finish", "save", "settle", "take_back")
"""Phases that belong to no microbatch."""
_HOLD_TIMEOUT_S = 30.0
_OTHERS_TIMEOUT_S = 2.0
_BESIDE_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One item of the list, as the module's docstring has it."""

    id: str
    rank: int
    phase: str
    step: int | None = None
    microbatch: int = 0
    layer: str = ""
    bucket: int | None = None
    kind: str = "kill"
    for_s: float | None = None
    hold: bool = False
    beside: frozenset[int] = frozenset()


class FaultInjector:
    """The faults of one rank. Without any (every real run) a check is one look at an empty list."""

    def __init__(self, rank: int):
        self._rank = rank
        self._directory = Path(os.environ.get(ENV_FAULTS_DIR, "."))
        items = json.loads(os.environ.get(ENV_FAULTS) or "[]")
        self._faults = [
            Fault(
                id=str(item["id"]),
                rank=int(item["rank"]),
                phase=str(item["phase"]),
                step=item.get("step"),
                microbatch=int(item.get("microbatch") or 0),
                layer=str(item.get("layer") or ""),
                bucket=item.get("bucket"),
                kind=str(item.get("kind") or "kill"),
                for_s=item.get("for_s"),
                hold=bool(item.get("hold", False)),
                beside=frozenset(item.get("beside") or ()),
            )
            for item in items
        ]
        self._mine = [fault for fault in self._faults if fault.rank == rank]
        self._beside = [fault for fault in self._faults if rank in fault.beside]
        self._waited_for: set[str] = set()
        self._any_in_replay = any(fault.phase == "replay" for fault in self._faults)
        self.layers = sorted({fault.layer for fault in self._mine if fault.layer})
        """Names of modules at which this rank is to fail."""

    def at(
        self, phase: str, step: int, microbatch: int = 0, *, layer: str = "", bucket: int | None = None
    ) -> None:
        """Does not return if this rank is to die at these coordinates and has not yet. `layer`: inside of a phase, at
        that module. `bucket`: inside of a phase, at that bucket; without either, at the place of the phase itself."""
        for fault in self._beside:
            if fault.phase == phase and fault.step in (None, step) and not layer and bucket is None:
                (self._directory / f"{fault.id}.rank{self._rank}").touch(0o600)
        for fault in self._mine:
            if (
                fault.phase == phase
                and fault.step in (None, step)
                and (fault.microbatch == microbatch or phase in _WHOLE_STEP)
                and (fault.layer, fault.bucket) == (layer, bucket)
            ):
                self._fire(fault, step)

    def behind_bucket(self, phase: str, step: int, bucket: int, *, is_middle: bool) -> None:
        """`at`, for a phase that goes from bucket to bucket: behind this one, which `is_middle` of them or not."""
        self.at(phase, step, bucket=bucket)
        if is_middle:
            self.at(phase, step)

    def due(self, phase: str, step: int) -> bool:
        """Whether this rank is to fail in this phase of the step, half-way through its buckets."""
        return any(
            fault.phase == phase
            and fault.step in (None, step)
            and fault.bucket is None
            and not (self._directory / f"{fault.id}.fired").exists()
            for fault in self._mine
        )

    def replaying(self, step: int, microbatch: int) -> None:
        """(a rank that replays) Tells the others that a replay runs, and dies in it if it is told to."""
        if not self._any_in_replay:
            return
        (self._directory / "replaying").touch(0o600)
        self.at("replay", step, microbatch)
        self._hold_for_others(step, microbatch)

    def copying(self, done: int, total: int) -> None:
        """(a rank that sends or receives a replica's state) `done` of `total` chunks are through."""
        for fault in self._mine:
            if fault.phase == "copy" and 2 * done >= total:
                self._fire(fault, fault.step or 0)

    def flip_in_copy(self, data: torch.Tensor) -> None:
        """(a rank that receives a replica's state) Flips a bit of `data`, a chunk that has arrived, if told to."""
        for fault in self._mine:
            if fault.phase == "flip" and data.numel() and self._is_first(fault):
                data.view(torch.uint8)[data.nbytes // 2] ^= 1
                events.emit("corrupted", rank=self._rank, id=fault.id, byte=data.nbytes // 2, bit=0)

    def while_others_replay(self, step: int) -> None:
        """(a rank that waits) Dies if it is told to die in a replay and one is running."""
        if any(fault.phase == "replay" for fault in self._mine) and (self._directory / "replaying").exists():
            for fault in self._mine:
                if fault.phase == "replay":
                    self._fire(fault, step)

    def _hold_for_others(self, step: int, microbatch: int) -> None:
        """A replay takes milliseconds: it stands still until those that are to die in it have seen it.

        They look every half second. One that does not live (it is replaced just now) is not waited for longer.
        """
        deadline = time.monotonic() + _OTHERS_TIMEOUT_S
        for fault in self._faults:
            meant = fault.phase == "replay" and fault.rank != self._rank and fault.step in (None, step)
            if not meant or fault.microbatch != microbatch or fault.id in self._waited_for:
                continue
            self._waited_for.add(fault.id)
            while not (self._directory / f"{fault.id}.fired").exists() and time.monotonic() < deadline:
                time.sleep(0.005)

    def _wait_beside(self, fault: Fault) -> None:
        """Not for ever: one may wait for what we have not sent."""
        deadline = time.monotonic() + _BESIDE_TIMEOUT_S
        for rank in fault.beside:
            while not (self._directory / f"{fault.id}.rank{rank}").exists() and time.monotonic() < deadline:
                time.sleep(0.005)

    def _is_first(self, fault: Fault) -> bool:
        """Whether it has not fired in this job; from now on it has."""
        try:
            descriptor = os.open(
                self._directory / f"{fault.id}.fired", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600
            )
        except FileExistsError:
            return False
        os.close(descriptor)
        return True

    def _fire(self, fault: Fault, step: int) -> None:
        if not self._is_first(fault):
            return
        self._wait_beside(fault)
        if fault.hold:
            self._wait_for_word(fault)
        if fault.kind == "pause":
            return
        events.emit(
            "fault",
            rank=self._rank,
            id=fault.id,
            kind=fault.kind,
            phase=fault.phase,
            step=step,
            microbatch=fault.microbatch,
        )
        match fault.kind:
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                threading.Event().wait(fault.for_s)
                events.emit("fault_over", rank=self._rank, id=fault.id)
            case _:
                os.kill(os.getpid(), signal.SIGKILL)

    def _wait_for_word(self, fault: Fault) -> None:
        (self._directory / f"{fault.id}.reached").touch(0o600)
        deadline = time.monotonic() + _HOLD_TIMEOUT_S
        while not (self._directory / f"{fault.id}.go").exists():
            if time.monotonic() > deadline:
                raise ServiceError(f"fault {fault.id}: nobody made {fault.id}.go")
            time.sleep(0.005)
