"""From gradients to an update that is applied on all ranks or on none.

after_backward  reduce all buckets → vote → apply bucket by bucket
wait_free       while backward runs: reduce a bucket, apply it, the next → … → the rest → vote
held            each optimizer's step: reduce its buckets → apply them; … at the end of the step: vote

The vote is a barrier of all ranks, inside the first `optimizer.step()`: a rank that has passed it knows that every
rank has all its gradients reduced. So a rank that fails to pass it can still finish the step (roll forward), and a
rank that has passed it never has to go back. Before the vote, `wait_free` may have applied some buckets; the journal
records them and takes them back (undo).

Voting before the first update is too early for a step that communicates after it: several optimizers (a GAN's), one
that steps twice, validation after the update. Such a step is *held*: copies of everything that its updates change are
kept until it ends, and the vote comes there, so the step can be taken back wherever it is cut short. The first step of
every generation is held. In its vote each rank says whether it needs holding; if one does, all ranks hold every step
from the next one on.
"""

import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from swift_ft import events
from swift_ft.comm.backend import Rehearsed
from swift_ft.device import wait_for_copies
from swift_ft.errors import NonFiniteLoss, UsageError
from swift_ft.state import fsdp
from swift_ft.state.carried_gradients import LeftGradients
from swift_ft.state.journal import Journal, UndoResult
from swift_ft.text import tell_if_possible
from swift_ft.train.boundary_log import Channel
from swift_ft.train.config import SessionConfig
from swift_ft.train.lossy import CutStep
from swift_ft.train.pipeline_collectives import Ties, no_scaler
from swift_ft.train.reducer import Reducer, UpdateBucket

# A rank's offer when a recovery is planned.


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    version: int | None
    undo_to: int | None = None
    undo_exact: bool = False
    forward_to: int | None = None
    forward_by_all: bool = False
    finish_to: int | None = None


# A loss that is not finite is reported once where it begins, or ends the job (`SessionConfig.non_finite_loss`).
#
# Checked are the results of a schedule's loss function, single numbers that a whole module's forward returns, and the
# arguments of `Session.check_loss`. A check costs some microseconds.

_ELEMENTS_MAX = 1 << 16
"""Elements up to which a loss is checked; a loss with one element per token may be larger."""


class Losses:
    def __init__(self, choice: str, channel: Channel) -> None:
        self._choice = choice
        self._channel = channel
        self._bad_in = -2
        """Last step with a loss that was not finite."""

    def check(self, step: int, what: str, loss: torch.Tensor) -> None:
        """Reports a loss that is not finite. Raises NonFiniteLoss if the trainer chose "fail"."""
        if self._choice == "ignore" or self._channel.replaying or not _has_numbers(loss):
            return
        self._channel.readings.later(loss.detach(), lambda read: self._judge(step, what, read))

    def _judge(self, step: int, what: str, loss: torch.Tensor) -> None:
        worst = _worst(loss)
        if math.isfinite(worst):
            return
        # A loss usually stays so; it is reported at the first step only.
        begins, self._bad_in = step > self._bad_in + 1, max(step, self._bad_in)
        words = f"{what} of step {step} is {worst}"
        if begins:
            events.emit("non_finite_loss", rank=self._channel.rank, step=step, what=what, value=str(worst))
        if self._choice == "fail":
            raise NonFiniteLoss(f"{words}: checkpoints up to version {step} are of before it")
        if begins:
            tell_if_possible(
                f"rank {self._channel.rank}: {words}; training goes on (non_finite_loss='fail' ends the job)"
            )


def _has_numbers(loss: torch.Tensor) -> bool:
    ordinary = type(loss) is torch.Tensor and loss.device.type != "meta"
    return ordinary and loss.is_floating_point() and 0 < loss.numel() <= _ELEMENTS_MAX


def _worst(loss: torch.Tensor) -> float:
    """Returns the first element that is not finite, else any element."""
    if loss.numel() == 1:
        return float(loss)
    flat = loss.reshape(-1)
    return float(flat[torch.isfinite(flat).to(torch.uint8).argmin()])


# A ballot is one float64 tensor. The vote over a step takes the maximum over all ranks at each index.
#
# [0]  1 if the next step is to be held
# [1]  1 if a line is written for each step (`session.log`)
# [2]  1 if the next step waits for its vote (`swift_ft.train.staggering`)
# then for each pipeline rank its number of optimizer steps in this step, and the negative; -inf for the others


class Outcome(NamedTuple):
    hold_next: bool
    lines: bool
    waits_next: bool


def ballot(*, holds: bool, lines: bool, waits: bool, steps: float, group: int, groups: int) -> torch.Tensor:
    """Returns the ballot of a rank of pipeline rank `group`. Shape [3 + 2 * groups], float64."""
    votes = torch.full((3 + 2 * groups,), -torch.inf, dtype=torch.float64)
    votes[0], votes[1], votes[2] = float(holds), float(lines), float(waits)
    votes[3 + 2 * group], votes[4 + 2 * group] = steps, -steps
    return votes


def outcome(votes: torch.Tensor, step: int) -> Outcome:
    """Decodes the reduced ballot. Raises UsageError if replicas have stepped a different number of times."""
    most, fewest = votes[3::2], -votes[4::2]
    for stage, (high, low) in enumerate(zip(most.tolist(), fewest.tolist(), strict=True)):
        if high != low:
            raise UsageError(
                f"in step {step} optimizers have stepped {high:g} times on one replica of pipeline rank "
                f"{stage} and {low:g} times on another; let all replicas decide alike whether they step, for "
                "instance by dist.all_reduce of what they decide by"
            )
    return Outcome(hold_next=bool(votes[0]), lines=bool(votes[1]), waits_next=bool(votes[2]))


# updates='wait_free': gradients are applied while backward runs. Here: detection of complete gradients.


class Awaited:
    """(adoption) ``add(stage)`` … (each step, at its first complete gradient) ``begin(buckets)``"""

    def __init__(self, accumulated: Callable[[Any, torch.nn.Parameter], None]) -> None:
        """`accumulated` is called in backward, when a parameter of that stage has its gradient."""
        self._accumulated = accumulated
        self._hooked: set[torch.nn.Parameter] = set()

    def add(self, stage: Any) -> None:
        """Hooks the stage's parameters, also those that are frozen now."""
        for parameter in stage.submod.parameters():
            if parameter in self._hooked or not (parameter.is_floating_point() or parameter.is_complex()):
                continue  # shared by two modules, or never trained
            self._hooked.add(parameter)
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # torch hooks only these, and a step may train what is frozen now
            parameter.register_post_accumulate_grad_hook(lambda p, stage=stage: self._accumulated(stage, p))
            parameter.requires_grad_(trained)

    def begin(self, buckets: Iterable[UpdateBucket]) -> None:
        """Sets the gradients that each bucket awaits. Raises UsageError if a trained parameter has no hook."""
        for bucket in buckets:
            bucket.awaited = {p for p in bucket.parameters if p.requires_grad}
            if not bucket.awaited <= self._hooked:
                raise no_late_parameters()


def no_late_parameters() -> UsageError:
    return UsageError(
        "train_step has given an optimizer other parameters, after a gradient was complete or ones that no module had "
        "before session.run: with updates='wait_free' change them before the backward pass, or use "
        "updates='after_backward'"
    )


# Reductions of buckets in flight at once: more would hide no more latency, and each holds its buffers.
_IN_FLIGHT = 4


class Updates:
    """The optimizers of one rank.

    (session) ``add(optimizer)``; ``awaited.add(stage)`` for wait-free updates
    (engine) ``begin_step(version)`` for every step; after a failure ``standing``, ``undo``
    (trainer, through its optimizer) ``reduce`` → ``vote`` → apply
    """

    def __init__(
        self,
        config: SessionConfig,
        reducer: Reducer | None,
        *,
        ties: Ties,
        cut_step: CutStep,
        channel: Channel,
        votes: bool,
    ):
        """`reducer` is None without other data-parallel ranks. `votes`: several ranks of one stage must update
        alike."""
        self._votes = votes
        self._config = config
        self._reducer = reducer
        self._channel = channel
        # Set by the engine and the session, once, because what they call is made from these updates.
        self.vote: Callable[[], None]
        """(engine) Returns if the update is to be applied, or stays applied."""
        self.before_reduction: Callable[[], None]
        """(adoption) Called while gradients are still this rank's own."""
        self.reduced: Callable[[], None]
        """(engine) Called once some gradients are averages that no update has used yet."""
        self.unreduced: Callable[[Iterable[torch.nn.Parameter]], None]
        """(recording) Called with parameters whose gradients are complete, before their reduction if they have one."""
        self.before_update: Callable[[], None]
        """(engine) Called once gradients are reduced, before any update."""
        self.wait_free = config.updates == "wait_free" and reducer is not None
        self.shrinks_by = config.strategy if config.shrinks else ""
        """Strategy by which the other ranks go on without a lost rank; empty if they do not."""
        self.ties, self.left, self.cut_step = ties, LeftGradients(), cut_step
        cut_step.given_up = self._given_up
        self.journals: list[Journal] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._buckets: list[UpdateBucket] = []
        self.bucket_of: dict[torch.nn.Parameter, UpdateBucket] = {}
        self.elsewhere: set[torch.nn.Parameter] = set()
        """Parameters whose gradients DDP or FSDP averages."""
        self.awaited = Awaited(self._accumulated)
        self._launched = 0
        self._finished = 0
        self._in_backward = False  # wait-free: True once a gradient of this step is complete
        self._version = 0
        self._reduced = False
        self.voting = False
        self.committed = False
        self.begun = False  # True once buckets are applied for good: the step can no longer be dropped
        self.hold_next = False
        """True if the next step is held. (engine) sets it for the first step of a generation; then the votes decide."""
        self.held = False
        """True if the step under way is held."""
        self.ahead = False  # True if the step does not wait for its vote (`swift_ft.train.staggering`)
        self.lines = True  # True if some rank writes a line for each step, as far as is known before a vote
        self._needs_hold = False  # True once a step has needed its peers after its first update
        self.rehearses = False
        """(a rehearsal) True if averages are available although the step is replayed."""
        self.stops_at_last = False
        """(a warm-up) True if each step ends once all gradients are complete, before the last optimizer would step."""
        self.stepped = 0
        """Number of optimizer steps in the step under way."""
        self._ending = False  # True once the trainer's step has returned
        self.spoiled: Exception | None = None
        """Error that broke the step under way. The step is over, even if the trainer has caught the error."""

    # --- registration ---

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        undo = self._config.undo if self.wait_free else "none"
        journal = Journal(optimizer, undo=undo, bucket_bytes=self._config.bucket_bytes)
        if self.wait_free:
            events.emit("undo_mode", mode=journal.mode, reason=journal.why)
            if journal.why:
                tell_if_possible(f"undo: {journal.why}")
        self.journals.append(journal)
        self.optimizers.append(optimizer)
        updates = self

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
            return updates._step(journal, closure)

        # A bound method, like the one that it replaces: LR schedulers read its `__func__`.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        self._cut(journal)

    def _cut(self, journal: Journal) -> None:
        others = [bucket for bucket in self._buckets if bucket.journal is not journal]
        averaged = {p for bucket in self._buckets for p in bucket.averaged if bucket.journal is journal}
        self._buckets = [
            *others,
            *(UpdateBucket(journal, index, averaged) for index in range(len(journal.buckets))),
        ]
        self._buckets.sort(key=lambda bucket: self.journals.index(bucket.journal))
        self.bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self.cut_step.buckets = self._buckets

    def _recut(self) -> None:
        """(before an update) Recuts buckets if the optimizers have other parameters than at the step's start."""
        for journal in self.journals:
            if journal.stale:
                if self._in_backward:
                    raise no_late_parameters()
                self.cut_step.check_recut()
                journal.recut()
                self._cut(journal)

    def tie(self, parameter: torch.nn.Parameter, pipeline_ranks: Sequence[int]) -> None:
        if self.wait_free:
            raise UsageError(
                "session.tie with updates='wait_free': gradients are applied before those of other stages are there; "
                "use updates='after_backward'"
            )
        self.ties.add(parameter, pipeline_ranks)

    # --- one step ---

    def begin_step(self, version: int) -> None:
        """Begins the step from `version`: no bucket is reduced or applied, and journals are empty."""
        self._version = version
        self._launched = self._finished = self.stepped = 0
        self._reduced = self.voting = self.committed = self.begun = self._ending = self._in_backward = False
        self.spoiled = None
        self.ties.begin_step()
        # A replay has no peers to vote with; there, what this process has learned decides.
        alone = self._channel.replaying and not self.rehearses
        self._begin_journals(held=self._needs_hold if alone else self.hold_next)
        self.cut_step.begin()

    def _begin_journals(self, *, held: bool) -> None:
        self.held = held  # the step can be taken back until the vote at its end
        for journal in self.journals:
            before = journal.buckets
            journal.begin(self._version, held=self.held)
            if journal.buckets is not before:
                self._cut(journal)

    def reduce(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Averages the gradients of this optimizer, or of all, over the data-parallel ranks, and sums those of weights
        that stages share over these. They stay so until the optimizer has stepped."""
        self._average(optimizer)
        with self.spoiling():
            self.ties.sum(p for bucket in self._buckets_of(optimizer) for p in bucket.parameters)

    def _average(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.before_reduction()
        self._recut()
        with self.spoiling():
            fsdp.lay_out(p for bucket in self._buckets_of(optimizer) for p in bucket.parameters)
        if not self.wait_free:
            buckets = self._buckets_of(optimizer)
            self.unreduced(p for bucket in buckets for p in bucket.parameters if p not in bucket.averaged)
        if self._reducer is None:
            return
        if self.wait_free:
            reduced = self.cut_step.through(self._reduce_in_order)
        else:
            reduced = self.cut_step.through(lambda: self._reduce(optimizer))
        assert reduced, "nobody has all averages while this rank lacks some"
        self.reduced()

    def _buckets_of(self, optimizer: torch.optim.Optimizer | None) -> list[UpdateBucket]:
        return [bucket for bucket in self._buckets if optimizer is None or bucket.journal.of(optimizer)]

    def reduce_of(self, parameters: Iterable[torch.Tensor]) -> None:
        given = set(parameters)
        for optimizer in self.optimizers:
            if any(not given.isdisjoint(group["params"]) for group in optimizer.param_groups):
                self.reduce(optimizer)

    def _reduce(self, optimizer: torch.optim.Optimizer | None) -> None:
        buckets = [b for b in self._buckets_of(optimizer) if len(b.averaged) < len(b.parameters)]
        half = (len(buckets) + 1) // 2
        for number in range(len(buckets) + _IN_FLIGHT):
            if number < len(buckets):
                self._channel.check()
                self._launch(buckets[number])
                if buckets[number].reduction is not None:
                    self.fault("reduce", number, half - 1)
            if (oldest := number - _IN_FLIGHT) >= 0 and oldest < len(buckets):
                self.cut_step.finish(buckets[oldest])

    def _launch(self, bucket: UpdateBucket) -> None:
        done = self.elsewhere | bucket.averaged
        self.cut_step.launch(bucket, [p for p in bucket.parameters if p not in done])

    def _reduce_in_order(self) -> None:
        """(wait-free) Reduces and applies the buckets that backward has left, in all data-parallel ranks' order."""
        if self._reduced:
            return
        self._backward_begins()
        while self._finished < len(self._buckets):
            self._channel.check()
            while self._launched < min(len(self._buckets), self._finished + _IN_FLIGHT):
                self._launch_next()
            self._finish_next()
        self._reduced = True

    def _given_up(self) -> None:
        """(a cut step is finished by the remaining ranks) Resets launches: all have agreed on the averaged buckets."""
        self._launched = self._finished
        self.fault("finish")

    def _launch_next(self) -> None:
        """Launches the next bucket in the order common to all data-parallel ranks."""
        half = (len(self._buckets) + 1) // 2
        if self.wait_free and self._launched == half and self._channel.faults.due("update", self._version):
            # A rank that dies half-way through its updates must not have sent the rest to the others already.
            while self._finished < half:
                self._finish_next()
        bucket = self._buckets[self._launched]
        self._launched += 1
        self.unreduced(bucket.parameters)
        self._launch(bucket)
        if bucket.reduction is not None:
            self.fault("reduce", self._launched - 1, half - 1)

    def _finish_next(self) -> None:
        bucket = self._buckets[self._finished]
        self.cut_step.finish(bucket)
        self._finished += 1
        self._channel.readings.read_arrivals()
        self._channel.wait_copied()
        wait_for_copies()
        with self.cut_step.own():
            bucket.journal.apply(bucket.index)
        self.fault("update", self._finished - 1, (len(self._buckets) + 1) // 2 - 1)

    def _step(self, journal: Journal, closure: Any) -> Any:
        with self.spoiling():
            return self._update(journal, closure)

    def _update(self, journal: Journal, closure: Any) -> Any:
        loss, optimizer = None, self.optimizers[self.journals.index(journal)]
        if closure is not None and not journal.whole:
            with torch.enable_grad():
                loss = closure()
        self._recut()
        if journal.whole and closure is not None:
            self.ties.check_closure(p for group in optimizer.param_groups for p in group["params"])
            closure = self._averaged(closure, optimizer)
            self._needs_hold = True  # the closure is called repeatedly, and communicates each time
            if not (self.stepped or self.held):  # no update is applied yet
                self._begin_journals(held=True)
        else:
            self.left.update_begins(p for group in optimizer.param_groups for p in group["params"])
            self.reduce(optimizer)
        if self.stops_at_last and all(other is journal or other.applied for other in self.journals):
            if journal.whole and closure is not None:
                with torch.enable_grad():
                    closure()
            raise Rehearsed
        if not self.stepped:
            self._channel.readings.read()
            self.before_update()
            if not (self.held or self.ahead):
                self.commit()
        self.stepped += 1
        self._needs_hold = self._needs_hold or self.stepped > 1
        self._channel.wait_copied()
        wait_for_copies()
        self.begun = not self.held
        journal.again()
        if len(journal.buckets) == 1 and not journal.complete:
            self.fault("optimizer")
        if journal.whole:
            loss = journal.apply_whole(closure)
        else:
            middle = max(1, len(journal.buckets) // 2) - 1
            journal.apply_rest(lambda applied: self.fault("optimizer", applied - 1, middle))
        for bucket in self._buckets_of(optimizer):
            bucket.averaged.clear()
            self.ties.stepped(bucket.parameters)
        return loss

    def _averaged(self, closure: Any, optimizer: torch.optim.Optimizer) -> Any:
        """Wraps a closure so that an optimizer that computes gradients in its step sees averaged gradients and loss."""
        reducer = self._reducer
        if reducer is None or (self._channel.replaying and not self.rehearses):
            return closure

        def averaged() -> Any:
            loss = closure()
            self.reduce(optimizer)
            for bucket in self._buckets_of(optimizer):
                bucket.averaged.clear()
            return reducer.mean(loss)

        return averaged

    def end_step(self) -> None:
        """(engine) Ends the trainer's step, which has returned, and takes the pending decisions on its update.

        A step may end without an update (a loss that is not finite, a scaler that has skipped it). Then all replicas of
        a stage must end it so. Raises UsageError if they do not, and the errors of the vote.
        """
        self._channel.readings.read()
        self.check_whole()
        self.cut_step.check_step(self.stepped)
        if self.committed:
            return
        if self.rehearses or not self._channel.replaying:
            for optimizer, journal in zip(self.optimizers, self.journals, strict=True):
                if not journal.applied:
                    self._average(optimizer)  # a replica that has updated waits for it
        if not self.stepped and not self._version and not self._channel.replaying:
            tell_if_possible(
                "step 0 has ended without optimizer.step(); that is well if it was skipped on purpose, or if "
                "gradients are accumulated over several steps"
            )
        self._ending = True
        self.commit()

    def commit(self) -> None:
        """Returns once every rank has all its gradients reduced. Raises the errors of `Engine.vote`."""
        if self._votes and not self._channel.replaying:
            if self.wait_free:
                self.fault("optimizer")
            self.cut_step.through(self.vote)
            self.voting = False
            self.cut_step.emit_step(self._version, self.optimizers)
        self.committed = True

    # --- ballots ---

    def ballot(self, stage_group: int, stage_groups: int, *, lines: bool, waits: bool) -> torch.Tensor:
        """Returns this rank's ballot. `waits`: the rank wants the next step to wait for its vote."""
        # Inside of the first optimizer's step it is not known yet whether more will step.
        steps = float(self.stepped if self.held or self.ahead else not self._ending)
        self.lines, holds = self.lines or lines, self._needs_hold
        return ballot(
            holds=holds, lines=lines, waits=waits, steps=steps, group=stage_group, groups=stage_groups
        )

    def apply_outcome(self, ballot: torch.Tensor, step: int) -> Outcome:
        """Applies and returns the result of a step's vote. Raises UsageError if replicas do not step alike."""
        said = outcome(ballot, step)
        self.hold_next, self.lines = said.hold_next, said.lines
        return said

    def wait_for_vote(self) -> None:
        """(no update is applied yet) Makes the step under way wait for its vote after all."""
        self.ahead = False
        self._begin_journals(held=self.hold_next)

    # --- what breaks a step ---

    def spoil(self, error: Exception) -> None:
        """Ends the step with this error, even if the trainer catches it. The first error is kept."""
        if self.spoiled is None:
            self.spoiled = error

    def check_whole(self) -> None:
        """Raises the error that has broken the step under way, if any."""
        if self.spoiled is not None:
            raise self.spoiled
        self._channel.check_whole()

    @contextmanager
    def spoiling(self) -> Iterator[None]:
        """Wraps operations that a step cannot do without: records an error in them, in case the trainer catches it."""
        self.check_whole()
        try:
            yield
        except Exception as error:
            self.spoil(error)
            raise

    def communicates(self) -> None:
        """Records that the step needs its peers. After an update, that asks for the next steps to be held."""
        if self.stepped:
            self._needs_hold = True

    def fault(self, phase: str, bucket: int = 0, middle: int = 0) -> None:
        """Marks the fault point after that bucket. The phase is half done after bucket `middle`."""
        if not self._channel.replaying:
            self._channel.faults.behind_bucket(phase, self._version, bucket, is_middle=bucket == middle)

    # --- wait-free ---

    def _backward_begins(self) -> None:
        """(a gradient is complete) Fixes the parameters that this step trains, once per step."""
        if not self._in_backward:
            self._recut()
            self._in_backward = True
            self.awaited.begin(self._buckets)

    def _accumulated(self, stage: Any, parameter: torch.nn.Parameter) -> None:
        if not stage.last_backward:
            return
        self._backward_begins()
        bucket = self.bucket_of.get(parameter)
        if bucket is not None and parameter not in bucket.awaited:
            raise UsageError(
                "a second backward pass in a step with updates='wait_free', whose first one was applied; put all but "
                "the last one in `with session.accumulating():`, or use updates='after_backward'"
            )
        if bucket is not None:
            self._ready([parameter], stage.grad_scale)

    def stage_ready(self, stage: Any) -> None:
        """Marks all gradients of the stage as complete (whatever the hooks have seen of them)."""
        self._backward_begins()
        self._ready(list(stage.submod.parameters()), stage.grad_scale)

    def _ready(self, parameters: Iterable[torch.nn.Parameter], scale: int) -> None:
        for parameter in parameters:
            bucket = self.bucket_of.get(parameter)
            if bucket is None or parameter not in bucket.awaited:
                continue
            if scale != 1 and parameter.grad is not None:
                parameter.grad.div_(scale)
            bucket.awaited.discard(parameter)
        self.cut_step.through(self._go_on)

    def _go_on(self) -> None:
        """(wait-free) Launches reductions of complete buckets and applies reduced ones, as far as possible in order."""
        while self._launched < len(self._buckets) and not self._buckets[self._launched].awaited:
            self._launch_next()
        while self._finished < self._launched - 1:  # the newest reduction overlaps with backward
            reduction = self._buckets[self._finished].reduction
            if reduction is not None and not reduction.task.done:
                break
            self._finish_next()

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        if self._reducer is not None:
            self._reducer.broadcast(tensors)

    def totals(self) -> dict[str, float]:
        seconds = self._reducer.seconds if self._reducer is not None else 0.0
        return {"reduce_seconds": seconds, "buckets": len(self._buckets)}

    # --- after a failure ---

    @property
    def partial(self) -> bool:
        """Returns whether buckets of the step under way are applied, and no vote has passed."""
        return not self.begun and any(journal.applied for journal in self.journals)

    def standing(self, version: int) -> Standing:
        """Returns this rank's recovery offer if the step from `version` is cut short now."""
        if self.begun:
            return Standing(version=None)
        whole = Standing(
            version=version,
            forward_to=version + 1 if self.voting else None,
            forward_by_all=self.voting and self.lines,
            finish_to=version + 1 if self.cut_step.waits else None,
        )
        if not self.partial:
            return whole
        exact = all(journal.undone_by in ("exact", "preimage") for journal in self.journals)
        can = all(journal.undone_by != "none" for journal in self.journals)
        return replace(whole, version=None, undo_to=version if can else None, undo_exact=exact)

    def undo(self) -> list[UndoResult]:
        """Takes every applied bucket back. Raises ServiceError if the step cannot be undone."""
        return [journal.undo() for journal in self.journals if journal.applied]

    def check_complete(self, objects: dict[str, Any]) -> None:
        """(before the run) Raises UsageError for what does not go with wait-free updates, or with finishing cut steps.
        `objects`: the registered objects."""
        self.cut_step.check(self.journals)
        if not self.wait_free:
            return
        if self.elsewhere:
            raise UsageError(
                "updates='wait_free' with DistributedDataParallel or FSDP: they reduce by themselves; use "
                "session.pipeline_stage(module) without them, or updates='after_backward'"
            )
        if not all(journal.early for journal in self.journals):
            raise UsageError(
                "updates='wait_free' with a step pre-hook on the optimizer, which must see all gradients before any "
                "update; use updates='after_backward'"
            )
        if any(isinstance(value, torch.amp.GradScaler) for value in objects.values()):
            raise no_scaler()
