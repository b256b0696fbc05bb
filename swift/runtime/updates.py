"""From gradients to an update that is applied everywhere or nowhere.

after_backward  reduce all buckets → vote → apply bucket by bucket
wait_free       while backward runs: reduce a bucket, apply it, the next → … → the rest → vote

The vote is a barrier of all ranks, inside the first `optimizer.step()`: a rank that is through it knows that every
rank has all its gradients reduced. So a rank that fails to get through can still finish the
step (roll forward), and one that is past it never has to go back. Before the vote, `wait_free` may have applied
some buckets; the journal knows which, and takes them back (undo).
"""

import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from swift import events
from swift.errors import UsageError
from swift.optim.journal import Journal, UndoResult
from swift.runtime.config import SessionConfig
from swift.runtime.faults import FaultInjector
from swift.runtime.reducer import Reducer, Reduction

# Buckets that are reduced at once: more hide no more latency, and each holds its buffers.
_IN_FLIGHT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What a rank can say of itself to the planner."""

    version: int | None
    undo_to: int | None = None
    undo_exact: bool = False
    forward_to: int | None = None


class _Bucket:
    """A bucket of one journal, on its way to being applied."""

    def __init__(self, journal: Journal, index: int):
        self.journal = journal
        self.index = index
        self.parameters = journal.buckets[index]
        self.reduction: Reduction | None = None
        self.awaited: set[torch.nn.Parameter] = set()


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
        check: Callable[[], None],
    ):
        self._config = config
        self._reducer = reducer
        self._faults = faults
        self._check = check  # raises Interrupted once a newer generation is published
        self.vote: Callable[[], None] = lambda: None  # given by the engine
        self.before_update: Callable[[], None] = lambda: None  # given by the engine
        self.settle: Callable[[], None] = lambda: None  # given by the session
        self.replaying: Callable[[], bool] = lambda: False  # given by the session
        self.wait_free = config.updates == "wait_free" and reducer is not None
        self.journals: list[Journal] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.nn.Parameter, _Bucket] = {}
        self._elsewhere: set[torch.nn.Parameter] = set()  # reduced by DDP or FSDP
        self._hooked: set[torch.nn.Parameter] = set()  # wait-free: a hook tells when its gradient is complete
        self._launched = 0
        self._finished = 0
        self._version = 0
        self._reduced = False
        self.voting = False
        self.committed = False
        self.begun = False  # buckets are being applied for good: the step is not dropped any more

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
        for index in range(len(journal.buckets)):
            bucket = _Bucket(journal, index)
            self._buckets.append(bucket)
            self._bucket_of.update(dict.fromkeys(bucket.parameters, bucket))

    def reduced_elsewhere(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """DDP or FSDP averages the gradients of these."""
        self._elsewhere.update(parameters)

    # --- one step ---

    def begin_step(self, version: int) -> None:
        self._version = version
        self._launched = self._finished = 0
        self._reduced = self.voting = self.committed = self.begun = False
        for journal in self.journals:
            journal.begin(version)
        for bucket in self._buckets:
            bucket.reduction = None
            bucket.awaited = {p for p in bucket.parameters if p in self._hooked}

    def reduce(self) -> None:
        """All gradients are averages over the columns from here on. Once a step; every collective after it."""
        if self._reduced:
            return
        if self._reducer is not None:
            while self._finished < len(self._buckets):
                self._check()
                while self._launched < min(len(self._buckets), self._finished + _IN_FLIGHT):
                    self._launch_next()
                self._finish_next()
        self._reduced = True

    def _launch_next(self) -> None:
        """The next bucket in the one order that all columns keep."""
        assert self._reducer is not None
        half = (len(self._buckets) + 1) // 2
        if self.wait_free and self._launched == half and self._faults.due("update", self._version):
            # Who dies half-way through its updates must not have given the rest to the others already.
            while self._finished < half:
                self._finish_next()
        bucket = self._buckets[self._launched]
        self._launched += 1
        if self._elsewhere.issuperset(bucket.parameters):
            return
        bucket.reduction = self._reducer.launch([p for p in bucket.parameters if p not in self._elsewhere])
        if self._launched == half:
            self._fault("reduce")

    def _finish_next(self) -> None:
        assert self._reducer is not None
        bucket = self._buckets[self._finished]
        if bucket.reduction is not None:
            self._reducer.finish(bucket.reduction)
            bucket.reduction = None
        self._finished += 1
        if self.wait_free:
            self.settle()
            bucket.journal.apply(bucket.index)
            if self._finished == (len(self._buckets) + 1) // 2:
                self._fault("update")

    def _step(self, journal: Journal, closure: Any) -> Any:
        """`optimizer.step()` as the trainer calls it."""
        loss = None
        if closure is not None and not journal.whole:
            with torch.enable_grad():
                loss = closure()
        if not self.committed:
            self.reduce()
            self.commit()
        self.settle()
        self.begun = True
        if len(journal.buckets) == 1 and not journal.applied:
            self._fault("optimizer")
        if journal.whole:
            return journal.apply_whole(closure)
        journal.apply_rest(self._between(journal))
        return loss

    def commit(self) -> None:
        """Returns once every rank has all its gradients reduced; see `Engine.vote` for what it does else."""
        self.before_update()
        if self._reducer is not None and not self.replaying():
            if self.wait_free:
                self._fault("optimizer")
            self.vote()
            self.voting = False
        self.committed = True

    def _between(self, journal: Journal) -> Callable[[int], None]:
        half = max(1, len(journal.buckets) // 2)

        def between(applied: int) -> None:
            if applied == half:
                self._fault("optimizer")

        return between

    def reducing(self) -> None:
        """A reduction that DDP or FSDP has asked for is under way."""
        self._fault("reduce")

    def _fault(self, phase: str) -> None:
        if not self.replaying():
            self._faults.at(phase, self._version)

    # --- wait-free ---

    def ready_in_backward(self, stage: Any) -> None:
        """Buckets of this stage are reduced and applied while its last backward runs."""
        for parameter in stage.submod.parameters():
            if parameter in self._hooked:
                continue  # of two modules
            if parameter.requires_grad and parameter not in self._elsewhere:
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(
                    lambda p, stage=stage: self._accumulated(stage, p)
                )

    def _accumulated(self, stage: Any, parameter: torch.nn.Parameter) -> None:
        if not stage.last_backward:
            return
        bucket = self._bucket_of.get(parameter)
        if bucket is not None and parameter not in bucket.awaited:
            raise UsageError(
                "a second backward pass in a step with updates='wait_free', whose first one was applied; put all but "
                "the last one in `with session.accumulating():`, or use updates='after_backward'"
            )
        if bucket is not None:
            self._ready([parameter], stage.grad_scale)

    def stage_ready(self, stage: Any) -> None:
        """All gradients of the stage are complete (whatever the hooks have seen of them)."""
        self._ready([p for p in stage.submod.parameters() if p in self._hooked], stage.grad_scale)

    def _ready(self, parameters: Iterable[torch.nn.Parameter], scale: int) -> None:
        for parameter in parameters:
            bucket = self._bucket_of.get(parameter)
            if bucket is None or parameter not in bucket.awaited:
                continue
            if scale != 1 and parameter.grad is not None:
                parameter.grad.div_(scale)
            bucket.awaited.discard(parameter)
        while self._launched < len(self._buckets) and not self._buckets[self._launched].awaited:
            self._launch_next()
        while self._finished < self._launched - 1:  # the one just launched goes on beside backward
            reduction = self._buckets[self._finished].reduction
            if reduction is not None and not reduction.done:
                break
            self._finish_next()

    # --- start and end ---

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
        if self.begun:
            return Standing(version=None)
        if not self.partial:
            return Standing(version=version, forward_to=version + 1 if self.voting else None)
        exact = all(journal.mode in ("exact", "preimage") for journal in self.journals)
        can = all(journal.mode != "none" for journal in self.journals)
        return Standing(
            version=None,
            undo_to=version if can else None,
            undo_exact=exact,
            forward_to=version + 1 if self.voting else None,
        )

    def undo(self) -> list[UndoResult]:
        """Takes every applied bucket back. Raises ServiceError if the step cannot be undone."""
        return [journal.undo() for journal in self.journals if journal.applied]

    def check_complete(self, objects: dict[str, Any]) -> None:
        """Raises UsageError for what cannot go together with wait-free updates."""
        if not self.wait_free:
            return
        if self._elsewhere:
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
            raise UsageError(
                "updates='wait_free' with a gradient scaler: gradients are applied before they could be "
                "unscaled; use updates='after_backward'"
            )
