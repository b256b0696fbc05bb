"""From gradients to an update that is applied everywhere or nowhere.

after_backward  reduce all buckets → vote → apply bucket by bucket
wait_free       while backward runs: reduce a bucket, apply it, the next → … → the rest → vote
held            each optimizer's step: reduce its buckets → apply them; … at the end of the step: vote

The vote is a barrier of all ranks, inside the first `optimizer.step()`: a rank that is through it knows that every
rank has all its gradients reduced. So a rank that fails to get through can still finish the
step (roll forward), and one that is past it never has to go back. Before the vote, `wait_free` may have applied
some buckets; the journal knows which, and takes them back (undo).

That is too early where a step still needs its peers behind its first update: several optimizers (a GAN's), one that
steps twice, validation behind the update. Such a step is *held*: copies of what its updates change are kept until it
ends, and it is voted on there, so that wherever it is cut short it is taken back. The first step of every
generation is held; in its vote each rank says whether it needs that, and what one needs all do from the next step on.
"""

import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from swift import events
from swift.optim.journal import Journal, UndoResult
from swift.runtime import wait_free
from swift.runtime.ballot import Outcome, ballot, outcome
from swift.runtime.bucket import Bucket
from swift.runtime.config import SessionConfig
from swift.runtime.cut_step import CutStep
from swift.runtime.errors import Rehearsed
from swift.runtime.faults import FaultInjector
from swift.runtime.gradients import LeftGradients
from swift.runtime.hook import Hook
from swift.runtime.losses import Replays
from swift.runtime.reducer import Reducer
from swift.runtime.standing import Standing
from swift.runtime.ties import Ties

# Buckets that are reduced at once: more hide no more latency, and each holds its buffers.
_IN_FLIGHT = 4


class Lends(Replays, Protocol):
    """What updates need of the channel."""

    def settle(self) -> None:
        """After this the memory of all that was sent may be used again."""


class Updates:
    """The optimizers of one rank.

    (session) ``add(optimizer)``; ``ready_in_backward(stage)`` for wait-free updates
    (engine) ``begin_step(version)`` for every step; after a failure ``standing``, ``undo``
    (trainer, through its optimizer) ``reduce`` → ``vote`` → apply
    """

    def __init__(
        self,
        config: SessionConfig,
        reducer: Reducer | None,
        faults: FaultInjector,
        *,
        ties: Ties,
        cut_step: CutStep,
        channel: Lends,
        check: Callable[[], None],
        groups_whole: Callable[[], None],
    ):
        """`reducer`: None without other data-parallel ranks. `check` raises Interrupted once a newer generation is
        published, `groups_whole` RuntimeError once a connection is broken."""
        self._config = config
        self._reducer = reducer
        self._faults = faults
        self._channel = channel
        self._check = check
        self._groups_whole = groups_whole
        self.vote: Hook[[], None] = Hook("Updates.vote")
        """(engine) Returns if the update is to be applied, or stays applied."""
        self.before_reduction: Hook[[], None] = Hook("Updates.before_reduction")
        """(adoption) Gradients are this rank's own."""
        self.reduced: Hook[[], None] = Hook("Updates.reduced")
        """(staggering) Some are averages, of which nothing has come yet."""
        self.before_update: Hook[[], None] = Hook("Updates.before_update")
        """(rehearsal) Gradients are reduced, nothing is applied."""
        self.wait_free = config.updates == "wait_free" and reducer is not None
        self.shrinks_by = config.strategy if config.shrinks else ""
        """The strategy by which the others go on without a rank that is lost; empty: they do not."""
        self.ties, self.left, self.cut_step = ties, LeftGradients(), cut_step
        cut_step.given_up.bind(self._given_up)
        self.journals: list[Journal] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._buckets: list[Bucket] = []
        self.bucket_of: dict[torch.nn.Parameter, Bucket] = {}
        self.elsewhere: set[torch.nn.Parameter] = set()  # reduced by DDP or FSDP
        self._hooked: set[torch.nn.Parameter] = set()  # wait-free: a hook tells when its gradient is complete
        self._stages: list[Any] = []  # whose gradients are reduced in backward
        self._launched = 0
        self._finished = 0
        self._version = 0
        self._reduced = False
        self.voting = False
        self.committed = False
        self.begun = False  # buckets are being applied for good: the step is not dropped any more
        self.hold_next = False
        """The next step is held. (engine) in the first step of a generation; then as the ranks have voted."""
        self.held = False
        """The step under way is."""
        self.ahead = False  # it does not wait for its vote (`swift.runtime.staggering`)
        self.lines = True  # some rank writes a line for each step, as far as is known before a vote
        self._needs_hold = False  # a step of this process has needed its peers behind its first update
        self.stops_at_last = False
        """(a warm-up) Each step ends where all gradients are there, and the last optimizer would step."""
        self.stepped = 0
        """How often optimizers have stepped in the step under way."""
        self._ending = False  # the trainer's step has returned
        self.spoiled: Exception | None = None
        """What broke the step under way. It is over, even if the trainer has caught this."""

    # --- what there is ---

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes over `optimizer.step`. Raises UsageError for one that cannot be taken back and would have to."""
        undo = self._config.undo if self.wait_free else "none"
        journal = Journal(optimizer, undo=undo, bucket_bytes=self._config.bucket_bytes)
        journal.measure = self._config.measure_undo
        if self.wait_free:
            events.emit("undo_mode", mode=journal.mode, reason=journal.why)
            if journal.why:
                print(f"swift: undo: {journal.why}", file=sys.stderr)
        self.journals.append(journal)
        self.optimizers.append(optimizer)
        updates = self

        def step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
            return updates._step(journal, closure)

        # A bound method, as the one that it hides: LR schedulers take it apart.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        self._cut(journal)

    def _cut(self, journal: Journal) -> None:
        """The journal's buckets, as they are now, in the place of those that it had."""
        others = [bucket for bucket in self._buckets if bucket.journal is not journal]
        self._buckets = [*others, *(Bucket(journal, index) for index in range(len(journal.buckets)))]
        self._buckets.sort(key=lambda bucket: self.journals.index(bucket.journal))
        self.bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}

    def tie(self, parameter: torch.nn.Parameter, pipeline_ranks: Sequence[int]) -> None:
        """As `Session.tie`."""
        if self.wait_free:
            raise wait_free.no_tie()
        self.ties.add(parameter, pipeline_ranks)

    def reduced_elsewhere(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """DDP or FSDP averages the gradients of these."""
        self.elsewhere.update(parameters)

    # --- one step ---

    def begin_step(self, version: int) -> None:
        """The step from `version` begins: no bucket is reduced or applied, and journals are empty."""
        self._version = version
        self._launched = self._finished = self.stepped = 0
        self._reduced = self.voting = self.committed = self.begun = self._ending = False
        self.spoiled = None
        for stage in self._stages:
            self.ready_in_backward(stage)  # what was frozen until now may be trained from here on
        self.ties.begin_step()
        # A replay has nobody to vote with; what this process has learned counts there.
        self._begin_journals(held=self._needs_hold if self._channel.replaying else self.hold_next)
        self.cut_step.begin(self._buckets)
        for bucket in self._buckets:
            bucket.awaited = {p for p in bucket.parameters if p in self._hooked and p.requires_grad}

    def _begin_journals(self, *, held: bool) -> None:
        self.held = held  # it can be taken back until the vote, which comes at its end
        for journal in self.journals:
            before = journal.buckets
            journal.begin(self._version, held=self.held)
            if journal.buckets is not before:
                self._cut(journal)

    def reduce(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """The gradients of this optimizer, or all, are averages over the data-parallel ranks from here on, until it has
        stepped; of weights that stages share, sums over these."""
        self._average(optimizer)
        with self.spoiling():
            self.ties.sum(
                p for b in self._buckets if optimizer is None or b.journal.of(optimizer) for p in b.parameters
            )

    def _average(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.before_reduction()
        if self._reducer is None:
            return
        if self.wait_free:
            reduced = self.cut_step.through(self._reduce_in_order)
        else:
            reduced = self.cut_step.through(lambda: self._reduce(self._unreduced(optimizer)))
        assert reduced, "nobody has all averages while this rank lacks some"
        self.reduced()

    def _unreduced(self, optimizer: torch.optim.Optimizer | None) -> list[Bucket]:
        return [
            bucket
            for bucket in self._buckets
            if not bucket.reduced and (optimizer is None or bucket.journal.of(optimizer))
        ]

    def reduce_of(self, parameters: Iterable[torch.Tensor]) -> None:
        """As `reduce`, of the optimizers that hold any of these."""
        given = set(parameters)
        journals = {id(b.journal) for b in self._buckets if not given.isdisjoint(b.parameters)}
        for optimizer, journal in zip(self.optimizers, self.journals, strict=True):
            if id(journal) in journals:
                self.reduce(optimizer)

    def _reduce(self, buckets: list[Bucket]) -> None:
        half = (len(buckets) + 1) // 2
        for number in range(len(buckets) + _IN_FLIGHT):
            if number < len(buckets):
                self._check()
                self._launch(buckets[number])
                if buckets[number].reduction is not None:
                    self._fault("reduce", number, half - 1)
            if (oldest := number - _IN_FLIGHT) >= 0 and oldest < len(buckets):
                self.cut_step.finish(buckets[oldest])

    def _launch(self, bucket: Bucket) -> None:
        self.cut_step.launch(bucket, [p for p in bucket.parameters if p not in self.elsewhere])

    def _reduce_in_order(self) -> None:
        """(wait-free) What backward has left of all buckets, in the one order that all data-parallel ranks keep."""
        if self._reduced:
            return
        while self._finished < len(self._buckets):
            self._check()
            while self._launched < min(len(self._buckets), self._finished + _IN_FLIGHT):
                self._launch_next()
            self._finish_next()
        self._reduced = True

    def _given_up(self) -> None:
        """(a step is finished with those that are left) All have agreed on what is averaged."""
        self._launched = self._finished
        self._fault("finish")

    def _launch_next(self) -> None:
        """The next bucket in the one order that all data-parallel ranks keep."""
        half = (len(self._buckets) + 1) // 2
        if self.wait_free and self._launched == half and self._faults.due("update", self._version):
            # Who dies half-way through its updates must not have given the rest to the others already.
            while self._finished < half:
                self._finish_next()
        bucket = self._buckets[self._launched]
        self._launched += 1
        self._launch(bucket)
        if bucket.reduction is not None:
            self._fault("reduce", self._launched - 1, half - 1)

    def _finish_next(self) -> None:
        bucket = self._buckets[self._finished]
        self.cut_step.finish(bucket)
        self._finished += 1
        self._channel.settle()
        with self.cut_step.own():
            bucket.journal.apply(bucket.index)
        self._fault("update", self._finished - 1, (len(self._buckets) + 1) // 2 - 1)

    def _step(self, journal: Journal, closure: Any) -> Any:
        """`optimizer.step()` as the trainer calls it."""
        with self.spoiling():
            return self._update(journal, closure)

    def _update(self, journal: Journal, closure: Any) -> Any:
        loss, optimizer = None, self.optimizers[self.journals.index(journal)]
        if closure is not None and not journal.whole:
            with torch.enable_grad():
                loss = closure()
        if journal.whole and closure is not None:
            self.ties.check_closure(p for group in optimizer.param_groups for p in group["params"])
            closure = self._averaged(closure, optimizer)
            self._needs_hold = True  # it is called again and again, with the others
            if not (self.stepped or self.held):  # nothing is applied yet
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
            self.before_update()
            if not (self.held or self.ahead):
                self.commit()
        self.stepped += 1
        self._needs_hold = self._needs_hold or self.stepped > 1
        self._channel.settle()
        self.begun = not self.held
        journal.again()
        if len(journal.buckets) == 1 and not journal.complete:
            self._fault("optimizer")
        if journal.whole:
            loss = journal.apply_whole(closure)
        else:
            middle = max(1, len(journal.buckets) // 2) - 1
            journal.apply_rest(lambda applied: self._fault("optimizer", applied - 1, middle))
        for bucket in self._buckets:
            if bucket.journal is journal:
                bucket.reduced = False
                self.ties.stepped(bucket.parameters)
        return loss

    def _averaged(self, closure: Any, optimizer: torch.optim.Optimizer) -> Any:
        """An optimizer that computes gradients in its step, and looks at the loss, sees the averages."""
        reducer = self._reducer
        if reducer is None or self._channel.replaying:
            return closure

        def averaged() -> Any:
            loss = closure()
            self.reduce(optimizer)
            for bucket in self._buckets:
                bucket.reduced = bucket.reduced and not bucket.journal.of(optimizer)
            return reducer.mean(loss)

        return averaged

    def end_step(self) -> None:
        """(engine) The trainer's step has returned. What is still to be decided of its update is decided here.

        A step may end without an update (a loss that is not finite, a scaler that has skipped it): then all replicas
        of a stage end it so. Raises UsageError if they do not; what the vote raises.
        """
        self.check_whole()
        self.cut_step.check_step(self.stepped)
        if self.committed:
            return
        if not self._channel.replaying:
            for optimizer, journal in zip(self.optimizers, self.journals, strict=True):
                if not journal.applied:
                    self._average(optimizer)  # a replica that has updated waits for it
        if not self.stepped and not self._version and not self._channel.replaying:
            print(
                "swift: step 0 has ended without optimizer.step(); that is well if it was skipped on purpose, or if "
                "gradients are accumulated over several steps",
                file=sys.stderr,
            )
        self._ending = True
        self.commit()

    def commit(self) -> None:
        """Returns once every rank has all its gradients reduced; see `Engine.vote` for what it does else."""
        if self._reducer is not None and not self._channel.replaying:
            if self.wait_free:
                self._fault("optimizer")
            self.cut_step.through(self.vote)
            self.voting = False
            self.cut_step.tell(self._version, self.optimizers)
        self.committed = True

    # --- what ranks tell each other in the vote ---

    def ballot(self, stage_group: int, stage_groups: int, *, lines: bool, waits: bool) -> torch.Tensor:
        """What this rank says in its vote. `waits`: it wants the next step to wait for its own."""
        # Inside of the first optimizer's step it is not known yet whether there will be more.
        steps = float(self.stepped if self.held or self.ahead else not self._ending)
        self.lines, holds = self.lines or lines, self._needs_hold
        return ballot(
            holds=holds, lines=lines, waits=waits, steps=steps, group=stage_group, groups=stage_groups
        )

    def heard(self, ballot: torch.Tensor, step: int) -> Outcome:
        """What came of the vote over that step. Raises UsageError if replicas do not step alike."""
        said = outcome(ballot, step)
        self.hold_next, self.lines = said.hold_next, said.lines
        return said

    def wait_for_vote(self) -> None:
        """(nothing is applied yet) The step under way waits for its vote after all."""
        self.ahead = False
        self._begin_journals(held=self.hold_next)

    # --- what breaks a step ---

    def spoil(self, error: Exception) -> None:
        """The step is over with this error, whatever the trainer makes of it."""
        if self.spoiled is None:
            self.spoiled = error

    def check_whole(self) -> None:
        """Raises what has broken the step under way, if anything has."""
        if self.spoiled is not None:
            raise self.spoiled
        self._groups_whole()

    @contextmanager
    def spoiling(self) -> Iterator[None]:
        """Around what a step cannot do without: an error in it is remembered, should the trainer catch it."""
        self.check_whole()
        try:
            yield
        except Exception as error:
            self.spoil(error)
            raise

    def communicates(self) -> None:
        """Something in the step needs its peers. Behind an update that asks for the next steps to be held."""
        if self.stepped:
            self._needs_hold = True

    def reducing(self) -> None:
        """A reduction that DDP or FSDP has asked for is under way."""
        self._fault("reduce")

    def _fault(self, phase: str, bucket: int = 0, middle: int = 0) -> None:
        """Behind that bucket; half-way through the phase is behind bucket `middle`."""
        if not self._channel.replaying:
            self._faults.behind_bucket(phase, self._version, bucket, is_middle=bucket == middle)

    # --- wait-free ---

    def ready_in_backward(self, stage: Any) -> None:
        """Buckets of this stage are reduced and applied while its last backward runs."""
        if not any(known is stage for known in self._stages):
            self._stages.append(stage)
        for parameter in stage.submod.parameters():
            if parameter in self._hooked:
                continue  # of two modules
            if parameter.requires_grad and parameter not in self.elsewhere:
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(
                    lambda p, stage=stage: self._accumulated(stage, p)
                )

    def _accumulated(self, stage: Any, parameter: torch.nn.Parameter) -> None:
        if not stage.last_backward:
            return
        bucket = self.bucket_of.get(parameter)
        if bucket is not None and parameter not in bucket.awaited:
            raise wait_free.no_second_backward()
        if bucket is not None:
            self._ready([parameter], stage.grad_scale)

    def stage_ready(self, stage: Any) -> None:
        """All gradients of the stage are complete (whatever the hooks have seen of them)."""
        self._ready([p for p in stage.submod.parameters() if p in self._hooked], stage.grad_scale)

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
        """(wait-free) Buckets that are complete are reduced, and those that are reduced applied, as far as they are."""
        while self._launched < len(self._buckets) and not self._buckets[self._launched].awaited:
            self._launch_next()
        while self._finished < self._launched - 1:  # the one just launched goes on beside backward
            reduction = self._buckets[self._finished].reduction
            if reduction is not None and not reduction.done:
                break
            self._finish_next()

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        if self._reducer is not None:
            self._reducer.broadcast(tensors)

    def totals(self) -> dict[str, float]:
        """What reductions cost this rank, for the trace."""
        seconds = self._reducer.seconds if self._reducer is not None else 0.0
        return {"reduce_seconds": seconds, "buckets": len(self._buckets)}

    # --- after a failure ---

    @property
    def partial(self) -> bool:
        """Some buckets of the step under way are applied, and no vote has passed."""
        return not self.begun and any(journal.applied for journal in self.journals)

    def standing(self, version: int) -> Standing:
        """What this rank holds if the step from `version` is cut short now, and where it can go."""
        if self.begun:
            return Standing(version=None)
        forward_to, by_all = (version + 1, self.lines) if self.voting else (None, False)
        finish_to = version + 1 if self.cut_step.waits else None
        if not self.partial:
            return Standing(
                version=version, forward_to=forward_to, forward_by_all=by_all, finish_to=finish_to
            )
        exact = all(journal.takes_back in ("exact", "preimage") for journal in self.journals)
        can = all(journal.takes_back != "none" for journal in self.journals)
        return Standing(
            version=None,
            undo_to=version if can else None,
            undo_exact=exact,
            forward_to=forward_to,
            forward_by_all=by_all,
            finish_to=finish_to,
        )

    def undo(self) -> list[UndoResult]:
        """Takes every applied bucket back. Raises ServiceError if the step cannot be undone."""
        return [journal.undo() for journal in self.journals if journal.applied]

    def check_complete(self, objects: dict[str, Any]) -> None:
        """Raises UsageError for what cannot go together with wait-free updates, or with how steps are finished."""
        self.cut_step.check(self.journals)
        if self.wait_free:
            wait_free.check(self.journals, objects, elsewhere=bool(self.elsewhere))
