"""Fault injection at exact coordinates: the part that runs inside a rank.

The environment variable ``SWIFT_FAULTS`` holds a JSON list of ``{"id", "rank", "step", "microbatch", "phase", "layer",
"bucket", "kind", "for_s", "hold", "beside"}`` (`swift_ft.fault_grammar`). At its coordinates a rank acts by kind:

    "kill" (default)  sends SIGKILL to itself, so that it ends in the middle of its work, like a lost machine
    "stop"            sends SIGSTOP to itself
    "device"          queues a kernel that fails on its device, on which no later call works
    "hang"            its thread waits for ``for_s`` seconds, or forever
    "pause"           only does what "hold" requires

A fault fires once per job: ``<id>.fired`` in ``SWIFT_FAULTS_DIR`` is created first. In the phase "flip" the rank lives,
and a bit of the replica's state that it receives is flipped on arrival. With ``hold`` the rank creates ``<id>.reached``
and waits for ``<id>.go``, so that its parent can prepare the log or act from outside at this point. With ``beside`` it
fires once these ranks have also got as far, each of which creates ``<id>.rank<n>``: a failure that is to hit replicas
halfway through a phase must not come before they are there.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from swift_ft import events
from swift_ft.device import break_device
from swift_ft.errors import ServiceError
from swift_ft.fault_grammar import ENV_FAULTS, ENV_FAULTS_DIR, LAYER_PHASES

_WHOLE_STEP = ("optimizer", "idle", "reduce", "update", "finish", "save", "settle", "take_back")
"""Phases without a microbatch."""
_HOLD_TIMEOUT_S = 30.0
_OTHERS_TIMEOUT_S = 2.0
_BESIDE_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
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
    beside: Collection[int] = ()


class FaultInjector:
    """Faults of one rank. Without any (every real run) a check only looks at an empty list."""

    def __init__(self, rank: int):
        self._rank = rank
        self._directory = Path(os.environ.get(ENV_FAULTS_DIR, "."))
        items = json.loads(os.environ.get(ENV_FAULTS) or "[]")
        self._faults = [
            Fault(**{name: value for name, value in item.items() if value is not None}) for item in items
        ]
        self._mine = [fault for fault in self._faults if fault.rank == rank]
        self._beside = [fault for fault in self._faults if rank in fault.beside]
        self._waited_for: set[str] = set()
        self._any_in_replay = any(fault.phase == "replay" for fault in self._faults)
        self.layers = sorted({fault.layer for fault in self._mine if fault.phase in LAYER_PHASES})
        """Names of the modules at which this rank has faults; empty: the whole module."""

    def at(
        self, phase: str, step: int, microbatch: int = 0, *, layer: str = "", bucket: int | None = None
    ) -> None:
        """Fires the faults at these coordinates that have not fired yet; does not return if the rank is killed.
        `layer`: at that module inside the phase. `bucket`: at that bucket inside the phase. Without either: at the
        phase itself."""
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
        """Does as `at` after a bucket, in a phase that iterates over buckets. `is_middle`: it is the middle bucket,
        where faults without a bucket fire."""
        self.at(phase, step, bucket=bucket)
        if is_middle:
            self.at(phase, step)

    def due(self, phase: str, step: int) -> bool:
        """Returns whether this rank has an unfired fault in this phase of the step, halfway through its buckets."""
        return any(
            fault.phase == phase
            and fault.step in (None, step)
            and fault.bucket is None
            and not (self._directory / f"{fault.id}.fired").exists()
            for fault in self._mine
        )

    def replaying(self, step: int, microbatch: int) -> None:
        """(a rank that replays) Signals the others that a replay is running, and fires a fault of phase "replay"."""
        if not self._any_in_replay:
            return
        (self._directory / "replaying").touch(0o600)
        self.at("replay", step, microbatch)
        self._hold_for_others(step, microbatch)

    def copying(self, done: int, total: int) -> None:
        """(a rank that sends or receives a replica's state) Fires a fault of phase "copy" once half of the chunks are
        transferred."""
        for fault in self._mine:
            if fault.phase == "copy" and 2 * done >= total:
                self._fire(fault, fault.step or 0)

    def flip_in_copy(self, data: torch.Tensor) -> None:
        """(a rank that receives a replica's state) Flips a bit of the received chunk `data` for a fault of phase
        "flip"."""
        for fault in self._mine:
            if fault.phase == "flip" and data.numel() and self._is_first(fault):
                data.view(torch.uint8)[data.nbytes // 2] ^= 1
                events.emit("corrupted", rank=self._rank, id=fault.id, byte=data.nbytes // 2, bit=0)

    def while_others_replay(self, step: int) -> None:
        """(a rank that waits) Fires a fault of phase "replay" if a replay is running."""
        if any(fault.phase == "replay" for fault in self._mine) and (self._directory / "replaying").exists():
            for fault in self._mine:
                if fault.phase == "replay":
                    self._fire(fault, step)

    def _hold_for_others(self, step: int, microbatch: int) -> None:
        """Pauses a replay, which takes milliseconds, until the ranks that are to fail during it have noticed it.

        They poll every half second. The wait is bounded, because such a rank may be dead (just being replaced).
        """
        deadline = time.monotonic() + _OTHERS_TIMEOUT_S
        for fault in self._faults:
            meant = fault.phase == "replay" and fault.rank != self._rank and fault.step in (None, step)
            if not meant or fault.microbatch != microbatch or fault.id in self._waited_for:
                continue
            self._waited_for.add(fault.id)
            self._appears(f"{fault.id}.fired", deadline)

    def _wait_beside(self, fault: Fault) -> None:
        """Waits until the ranks of ``beside`` have got as far. Bounded, since one may wait for this rank's message."""
        deadline = time.monotonic() + _BESIDE_TIMEOUT_S
        for rank in fault.beside:
            self._appears(f"{fault.id}.rank{rank}", deadline)

    def _is_first(self, fault: Fault) -> bool:
        """Marks the fault as fired. Returns False if it has fired in this job before."""
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
            case "device":
                break_device()
            case _:
                os.kill(os.getpid(), signal.SIGKILL)

    def _wait_for_word(self, fault: Fault) -> None:
        (self._directory / f"{fault.id}.reached").touch(0o600)
        if not self._appears(f"{fault.id}.go", time.monotonic() + _HOLD_TIMEOUT_S):
            raise ServiceError(f"fault {fault.id}: nobody made {fault.id}.go")

    def _appears(self, name: str, deadline: float) -> bool:
        """Waits for a file. Returns False if it is not there by the deadline."""
        while not (self._directory / name).exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True
