"""One step of the trainer: completed, with everything a recovery needs of it kept, or dropped as if it had not begun.

``run``   begins the step → the trainer's function → ends the step; at each of these the participants
          (`swift_ft.train.participants`) do their part
``drop``  (a failure cut it short) restores the state of the step's start
"""

import json
import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.device import Pulse
from swift_ft.errors import JobFailed, UsageError
from swift_ft.files import make_directory, open_regular
from swift_ft.log.sidecar_client import SidecarWriter
from swift_ft.text import tell_if_possible
from swift_ft.train.checkpointing import Saving, flush_at_end
from swift_ft.train.failures import Retries
from swift_ft.train.log_session import FLUSH_TIMEOUT_S, log_totals
from swift_ft.train.participants import Participant, Site, Step, TrainStep
from swift_ft.train.strategies import load_checkpoint
from swift_ft.train.training_state import Stopped

# Metrics lines: one for each step, exactly once, through failures.
#
# A file of JSON lines for each rank, in the order of the steps. Values that are logged before the update are written
# before this rank votes for it, and no rank begins the next step without that vote. So a rank that dies leaves either
# no line, and does the step again, or the line. A repeated step finds its line and leaves it unchanged. If the line
# differs (the job is not exact), it and all later lines are void, and are written anew.
#
#     (trainer) ``add`` … (vote) ``write`` → (the step is done) ``end_step``; (it is dropped) ``drop_step``

Value = float | int | str | bool | None


class Lines(Participant):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._are_there = path.exists()
        # Step and file offset of each line, in arrays because a job has many steps. A repeated step bisects them.
        self._steps, self._places = array("q"), array("q")
        self._end = 0
        self._values: dict[str, Value] = {}
        self._said = False

    @property
    def in_use(self) -> bool:
        return bool(self._values) or self._file is not None or self._are_there

    def add(self, values: dict[str, object]) -> None:
        """Adds values to this step's line. Raises UsageError for a value that is no number, string or None."""
        self._values |= {name: _plain(name, value) for name, value in values.items()}

    def drop_step(self) -> None:
        self._values = {}

    def write(self, step: int) -> None:
        """Writes this step's values. If that fails, prints it once and goes on: the job matters more."""
        if not self._values:
            return
        try:
            self._put(self._opened(), step)
        except OSError as error:
            if not self._said:
                self._said = True
                tell_if_possible(
                    f"{self._path} cannot be written ({error.strerror}): it lacks lines from step {step} on"
                )

    def end_step(self, step: Step) -> None:
        self.write(step.number)
        self._values = {}
        if step.due and self._file is not None:
            os.fdatasync(self._file.fileno())  # the lines so far survive a crash of the machine

    def cut(self, step: int) -> None:
        """Drops the lines from this step on: the run has ended before it, and it may have been begun."""
        if self._file is not None or self._path.exists():
            with suppress(OSError):
                self._drop_from(self._opened(), bisect_left(self._steps, step))

    def close(self) -> None:
        if self._file is not None:
            os.fdatasync(self._file.fileno())
            self._file.close()
            self._file = None

    def _put(self, file: BinaryIO, step: int) -> None:
        number = bisect_left(self._steps, step)
        if number < len(self._steps):
            if self._steps[number] == step and self._values.items() <= self._line(file, number).items():
                return  # the line may also hold values that are logged after the update
            self._drop_from(file, number)
        line = json.dumps({"step": step, **self._values}).encode() + b"\n"
        os.pwrite(file.fileno(), line, self._end)
        self._note(step, len(line))

    def _drop_from(self, file: BinaryIO, number: int) -> None:
        if number < len(self._steps):
            self._end = self._places[number]
            del self._steps[number:], self._places[number:]
            file.truncate(self._end)

    def _line(self, file: BinaryIO, number: int) -> dict[str, Value]:
        at = self._places[number]
        end = self._places[number + 1] if number + 1 < len(self._places) else self._end
        values: dict[str, Value] = json.loads(os.pread(file.fileno(), end - at, at))
        return values

    def _note(self, step: int, size: int) -> None:
        self._steps.append(step)
        self._places.append(self._end)
        self._end += size

    def _opened(self) -> BinaryIO:
        if self._file is None:
            make_directory(self._path.parent)
            self._file = os.fdopen(open_regular(self._path, os.O_RDWR | os.O_CREAT), "rb+", buffering=0)
            for line in self._file.read().splitlines(keepends=True):
                if line.endswith(b"\n"):  # else its writer died while writing it
                    self._note(json.loads(line)["step"], len(line))
            self._file.truncate(self._end)
        return self._file


def _plain(name: str, value: object) -> Value:
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:  # a tensor or an array of one number
        value = item()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # JSON cannot express it
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(f"session.log({name}=...) was given a {type(value).__name__}; give a number or a string")


# End of a run: the last version is saved, and no rank returns before all have finished.
#
# ::
#
#     (every rank)  all steps are done: saves the last version, unless it is a checkpoint already; Finish
#     (coordinator) all ranks have sent Finish: FINISHED, in which `Session.run` returns. Until then a death is handled
#                   like any other, and all ranks take part in the recovery
#     (a rank)      is lost after that, while its script saves files: its replacement loads the last version,
#                   `Session.run` returns at once, and the code after it runs again
#
# A failed save delays no rank. Then a rank that is lost after the end stays lost.
#
# A trainer may end a run before its last step::
#
#     (trainer)     ``call`` in step s, on all replicas of a stage
#     (its rank)    does that step to its end, none after it, and sends Finish(s + 1)
#     (coordinator) tells all ranks by the View; a rank that has begun step s + 1, and waits for this rank there, drops
#                   it in a new generation
#
# The call to stop is a part of the state of version s + 1: a rank that loads or copies that state has it too.


class Ending(Participant):
    """(trainer's thread) ``begin`` … ``finish``; or ``come_back`` in place of a whole run"""

    def __init__(self, site: Site, saving: Saving) -> None:
        self._site = site
        self._saving = saving
        self._reason: str | None = None
        """Reason why the trainer ends the run with the step under way; None if it does not."""
        self._done_to = -1
        """Version after the last step that this process has done."""
        self._num_steps = 0

    def begin(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def begin_step(self, step: Step) -> None:
        self._reason = None

    def call(self, reason: str) -> None:
        self._reason = reason

    def after_step(self, step: Step) -> None:
        self._done_to = step.version
        self._site.state.stopped = None if self._reason is None else Stopped(self._reason, self._num_steps)

    def last(self) -> int:
        """Returns the version with which the run ends, as far as this rank knows."""
        view = self._site.member.watcher.latest
        ends = [self._num_steps]
        stopped = self._site.state.stopped
        if stopped is not None and self._num_steps <= stopped.num_steps:
            ends.append(self._site.state.version)
        if view is not None and view.HasField("ends_at") and self._num_steps <= view.ends_of:
            ends.append(view.ends_at)
        return min(ends)

    def finish(self, writer: SidecarWriter, vote_seconds: float) -> None:
        """Ends the run on this rank. Returns once all ranks have finished: until then a recovery may need this rank."""
        version = self._site.state.version
        stopped = self._site.state.stopped
        called = None
        if version < self._num_steps and (stopped is not None or version == self._done_to):
            called = stopped is not None
        if self._site.config.last_checkpoint:
            self._saving.save_last()
        self._site.store.wait_saved()
        self._saving.tell_untold()
        flush_at_end(writer, self._site.rank, FLUSH_TIMEOUT_S)
        self._site.member.say_measured()
        reason = stopped.reason if stopped and called else ""
        finish = pb.FinishRequest(version=version, num_steps=self._num_steps, called=called, reason=reason)
        while True:
            self._site.member.check()
            self._site.member.say(lambda: self._site.member.client.call(finish))
            view = self._site.member.watcher.wait_for(lambda _view: True, None)
            if view.state == pb.FINISHED:
                events.emit(
                    "finished",
                    rank=self._site.rank,
                    version=version,
                    **log_totals(writer),
                    **self._site.state.updates.totals(),
                    vote_seconds=vote_seconds,
                )
                return
            self._site.member.await_change(view)

    def come_back(self, view: pb.View) -> None:
        """(the job has finished without this process) Loads its last version. Raises JobFailed, UsageError, and
        SystemExit in a spare if that version is in no checkpoint."""
        if self._site.rank in view.vacant and not view.HasField("final_version"):
            raise SystemExit
        version = view.final_version
        if self.last() > version:
            raise UsageError(
                f"job {view.job} has finished at version {version}, and session.run is to do {self._num_steps} steps: "
                "start the job again with swift-ft run"
            )
        try:
            load_checkpoint(self._site.state, self._site.store, version)
        except Exception as error:
            raise JobFailed(f"rank {self._site.rank} cannot come back after the end: {error}") from error
        self._site.state.present = True
        self._site.member.version = version
        events.emit("came_back", rank=self._site.rank, version=version)


class StepRunner:
    """Runs or drops one step of the trainer. Used by the trainer's thread only."""

    def __init__(self, site: Site, participants: Sequence[Participant], retries: Retries) -> None:
        self._site = site
        self._participants = participants
        self._retries = retries
        self.pulse = Pulse()
        self.rolled_forward = False
        """True if the plan had the current or last step rolled forward, and its recovery is not over."""

    def run(self, train_step: TrainStep) -> None:
        """Runs one step. Raises any error that cuts it short; the caller then drops the step or handles the error."""
        channel, state = self._site.channel, self._site.state
        number = state.version
        step = Step(
            number=number,
            replaying=channel.replaying,
            due=(number + 1) % self._site.config.checkpoint_every == 0,
            train=train_step,
            drop=self.drop,
            wait_vote=self.wait_vote,
        )
        for participant in self._participants:
            participant.before_step(step)
        events.emit("step_begin", rank=self._site.rank, step=number, replay=step.replaying)
        channel.begin_step(number)
        self._site.witness.begin(number)
        for participant in self._participants:
            participant.begin_step(step)
        state.begin_step()
        for participant in self._participants:
            participant.step_begun(step)
        with self.pulse.step():
            with self._retries.step(number):
                train_step(number)
            channel.wait_copied()
            state.updates.end_step()
        for participant in self._participants:
            participant.end_step(step)
        state.end_step()
        self._site.member.version = self.committed()
        events.emit("step_end", rank=self._site.rank, step=number, replay=step.replaying)
        channel.profile.end(number, replay=step.replaying)
        step.by_all = not (step.replaying or self.rolled_forward)
        for participant in self._participants:
            participant.after_step(step)
        latest = self._site.member.watcher.latest
        self._site.witness.forget_below(min(latest.checkpoints, default=0) if latest is not None else 0)

    def committed(self) -> int:
        version = self._site.state.version
        for participant in self._participants:
            version = participant.committed(version)
        return version

    def wait_vote(self) -> None:
        for participant in self._participants:
            participant.wait_vote()

    def drop(self) -> None:
        for participant in self._participants:
            participant.drop_step()
        self._site.channel.end_replay()
        self._site.channel.drop_step()
        if self._site.state.present and self._site.state.updates.begun:
            # The update has begun, so the parameters belong to no version; this rank restores.
            self._site.state.present = False
        self._site.state.drop_step()
