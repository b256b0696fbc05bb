"""Digests of a rank's state: compared between replicas, and written to files for the comparison of two runs.

Replicas are compared during normal training, so that a copy of one can be trusted when it is needed.

After the first step and at every checkpoint, ranks with the same state exchange digests of its parts. Different
parameters or optimizer state mean a fault of memory, hardware or a kernel on one of them: all ranks go back to the
checkpoint. If they differ at that version again, the trainer is the cause. Different buffers or registered objects are
always caused by the trainer (running statistics of each replica's own batches, a loader that knows its shard): a joiner
would receive another replica's. That is bad input.
"""

import json
import os
from pathlib import Path
from typing import Protocol

import torch
import xxhash

from swift_ft import events
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.errors import ReplicaDiffers, UsageError
from swift_ft.files import write_whole
from swift_ft.state.carried_gradients import LEFT
from swift_ft.state.digests import DIGEST_BYTES, digests_of
from swift_ft.text import listed
from swift_ft.train.participants import Participant, Step
from swift_ft.train.recording import told_digests
from swift_ft.train.training_state import HYPERPARAMETERS, TrainerState

# For the comparison of two runs: files with digests of a rank's state, one per version, if the environment asks for
# them; and observers of each step (`swift-ft verify-determinism`).

ENV_DIGESTS = "SWIFT_DIGESTS"
ENV_DIGESTS_EVERY = "SWIFT_DIGESTS_EVERY"


class Watcher(Protocol):
    """Read-only observer of steps. Called by the trainer's thread."""

    def step_begins(self, state: TrainerState, rank: int, *, replay: bool) -> None:
        """Called before the trainer's function."""

    def before_update(self, state: TrainerState) -> None:
        """Called when gradients are reduced. With wait-free updates they are applied already."""

    def step_ended(self, state: TrainerState) -> None:
        """Called after a step that was not dropped."""


_watchers: list[Watcher] = []


def watch(watcher: Watcher) -> None:
    _watchers.append(watcher)


def before_update(state: TrainerState) -> None:
    for watcher in _watchers:
        watcher.before_update(state)


class Observers(Participant):
    """Calls the observers of this process, and writes digests of every version if the environment asks for them."""

    def __init__(self, state: TrainerState, rank: int) -> None:
        self._state = state
        self._rank = rank

    def step_begun(self, step: Step) -> None:
        for watcher in _watchers:
            watcher.step_begins(self._state, self._rank, replay=step.replaying)

    def after_step(self, step: Step) -> None:
        for watcher in _watchers:
            watcher.step_ended(self._state)
        write_every_version(self._state, self._rank)


def write_digests(state: TrainerState, rank: int, recovered_in: int | None = None) -> None:
    """Writes digests of the rank's current version if `ENV_DIGESTS` names a directory. `recovered_in`: generation whose
    recovery led to this version."""
    directory = os.environ.get(ENV_DIGESTS)
    if directory:
        recovered = "" if recovered_in is None else f"-g{recovered_in}"
        path = Path(directory) / f"rank{rank}-v{state.version}{recovered}.json"
        write_whole(path, json.dumps(state.digests()))


def write_every_version(state: TrainerState, rank: int) -> None:
    if os.environ.get(ENV_DIGESTS_EVERY):
        write_digests(state, rank)


class Audit(Participant):
    def __init__(self, group: ReconfigurableGroup, state: TrainerState):
        self._group = group
        self._state = state
        self._differed_at = -1
        """Version at which parameters or optimizer state last differed."""

    def after_step(self, step: Step) -> None:
        """Compares after the first step, at checkpoints, and when gradients stay over the end of a step.

        Not after a step that was finished in a recovery: ranks that were past the vote have compared already or will
        not.
        """
        news = self._state.gradients.news()
        if step.by_all and (step.due or step.version == 1 or news):
            step.wait_vote()
            self.compare()

    def compare(self) -> None:
        """(all replicas, at the same version) Raises ReplicaDiffers or UsageError if a part of the state is not the
        same on all of them."""
        parts, modules = self._state.parts(), self._state.modules
        values = modules.values()
        found = digests_of([*parts.values(), *values.values()])
        modules.between_steps = dict(zip(values, found[len(parts) :], strict=True))
        own = _tensor(b"".join(found[: len(parts)]))
        gathered = self._group.gathered(own)
        for index, name in enumerate(parts):
            place = slice(index * DIGEST_BYTES, (index + 1) * DIGEST_BYTES)
            others = [
                rank
                for rank, digests in zip(self._group.present, gathered, strict=True)
                if not torch.equal(digests[place], own[place])
            ]
            if others:
                # All ranks get here, since each of them differs from another one.
                self._differs(name, others)
        changed = modules.changed(modules.between_steps)
        self._compare_attributes({path: modules.between_steps[path].hex() for path in changed})

    def _compare_attributes(self, own: dict[str, str]) -> None:
        """Finds plain attributes of modules that differ between replicas. These are legitimate (the last loss, an
        attention map): they are excluded from copies and rehearsals. `own`: digests of those that have changed."""
        apart = self._apart(own)
        if new := sorted(set(apart) - set(self._state.apart)):
            events.emit("attributes_apart", version=self._state.version, names=new)
        self._state.apart = apart

    def _apart(self, own: dict[str, str]) -> list[str]:
        """(all replicas) Returns the names whose digests are not the same on all replicas."""
        text = json.dumps(own, sort_keys=True)
        digests = self._group.gathered(_tensor(xxhash.xxh3_128_digest(text.encode())))
        if all(torch.equal(each, digests[0]) for each in digests):
            return []
        all_of = [json.loads(each) for each in self._group.gathered_texts(text)]
        names = {path for each in all_of for path in each}
        return sorted(path for path in names if len({each.get(path) for each in all_of}) > 1)

    def _differs(self, name: str, others: list[int]) -> None:
        ranks = ", ".join(map(str, others))
        if name in ("parameters", "optimizer"):
            if not self._state.updated:
                raise UsageError(
                    f"{name} of this rank are not the same as on rank {ranks}, a replica: train_step changes weights, "
                    "but no optimizer of the session has stepped, and gradients are averaged before one does; pass the "
                    "optimizer that steps to session.optimizer(...)"
                )
            again, self._differed_at = self._differed_at == self._state.version, self._state.version
            differ = f"{name} at version {self._state.version} differ from those of rank {ranks}, a replica"
            if again:
                raise UsageError(
                    f"{differ}, again: train_step changes weights or averaged gradients by values of each replica's "
                    "own; draw noise from a torch.Generator that is seeded by the step, call "
                    "session.reduce_gradients() before gradients are read, or set replicas=1"
                )
            raise ReplicaDiffers(differ)
        if name == HYPERPARAMETERS:
            raise UsageError(
                f"{name} of this rank (its learning rate, say) are not the same as on rank {ranks}, a replica: is what "
                "sets them registered (session.register(scheduler=...))?"
            )
        if name == LEFT:
            raise UsageError(
                f"{name} of this rank are not the same as on rank {ranks}, a replica: what DistributedDataParallel is "
                "to average later, or what is computed behind the update, is each replica's own, and lost with it; "
                "make one step of the session of all that leads to an update"
            )
        told = {path: value.hex() for path, value in told_digests({name: self._state.parts()[name]})}
        where = listed(path.removeprefix(f"{name}.") for path in self._apart(told) if path != name)
        raise UsageError(
            f"{name} of this rank is not the same as on rank {ranks}{where and f' ({where})'}, so these ranks are no "
            "replicas: keep it the same on all (one position for all loaders; no running statistics of each one's own "
            "batches: GroupNorm, or track_running_stats=False), or use strategy='replay'"
        )


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
