"""Records exactly which buckets of the current step have been applied to a stock torch optimizer, and undoes them.

A bucket is applied by the optimizer's own `step`, which temporarily sees only the bucket's parameters. So the step
through the journal has the same bits as the plain one, with any implementation (for-loop, foreach, fused). The journal
is the only record of which buckets are done: `state["step"]` and `_version` cannot serve (the fused kernels increment
neither).
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import is_
from typing import Any, Protocol

import torch

from swift_ft.errors import ServiceError, UsageError
from swift_ft.optimizers import Lamb, Lion
from swift_ft.state import kernels
from swift_ft.state.exact_undo import CodedCopies, Exact, PreImage
from swift_ft.state.inverse_step import RULES, Applied, Arithmetic, Bucket, numbers, snapshot, unfit
from swift_ft.state.kernels import Pool
from swift_ft.torch_private import bare_step, own_post_hooks, post_hooks, pre_hooks

# Optimizer classes whose step treats each parameter independently, so that it can be cut into buckets.

PER_PARAMETER: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.Rprop,
    torch.optim.Adafactor,
    torch.optim.SparseAdam,
    Lamb,
    Lion,
)
"""Classes whose step equals their steps over any parts of the parameters. Other classes are not assumed to: a counter
in a group, or a norm over all parameters, would depend on the buckets."""


def stock_step(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer] | None:
    """Returns the class of `PER_PARAMETER` whose step `cls` runs unchanged; None if it has one of its own."""
    step = _function(cls)
    return next((known for known in PER_PARAMETER if _function(known) is step), None)


def _function(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    function: Callable[..., Any] = inspect.unwrap(cls.step)
    return function


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether its step requires a function that computes the loss again (LBFGS)."""
    parameters = list(inspect.signature(bare_step(type(optimizer))).parameters.values())
    required = [p for p in parameters[1:] if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    return any(p.kind is not p.VAR_KEYWORD for p in required)


MODES = ("none", "exact", "arithmetic", "preimage")


@dataclass(frozen=True, kw_only=True, slots=True)
class UndoResult:
    mode: str
    exact: bool
    """True if parameters and state have the bits they had before the step."""
    buckets: int


class Record(Protocol):
    @property
    def exact(self) -> bool: ...
    @property
    def extra_bytes(self) -> int: ...
    def after(self) -> None: ...
    def undo(self) -> None: ...


class Journal:
    """The record of one optimizer's buckets.

    (runtime) per step ``begin(step)`` → ``recut()`` if it is ``stale`` → ``apply(bucket)`` of some, in any order →
    ``apply_rest()`` of all others, with the optimizer's step hooks around it. After a failure, before the next
    ``begin``: ``undo()``.

    Raises UsageError for an optimizer that should be undone and cannot be.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, undo: str = "none", bucket_bytes: int = 25 << 20
    ) -> None:
        if undo not in MODES:
            raise UsageError(f"undo={undo!r} is unknown; there are: {', '.join(MODES)}")
        self._optimizer = optimizer
        self._bucket_bytes = bucket_bytes
        self._bare = bare_step(type(optimizer))
        self._known = known = stock_step(type(optimizer))
        self._undo = undo
        self._pool = Pool()
        self.whole = known is None
        """True for an unknown class: one bucket, its step called as it is (`apply_whole` if it takes a closure)."""
        self.why = ""
        """One-line reason why `mode` differs from the requested one; empty if it does not."""
        self.mode = self._mode_for(undo, known)
        """Way in which buckets are undone: none, exact, arithmetic or preimage."""
        self._step = -1
        self._held = False
        self._forget()
        self._rebuild()

    def _mode_for(self, undo: str, known: type[torch.optim.Optimizer] | None) -> str:
        name = type(self._optimizer).__name__
        if undo != "none" and needs_closure(self._optimizer):
            raise UsageError(
                f"{name} calls a closure in its step, so it can be neither cut into buckets nor taken back; "
                "use updates='after_backward' with it"
            )
        if undo in ("none", "preimage"):
            return undo
        if known is None:
            self.why = f"{name} is no class that swift knows: one bucket, and copies of it are kept"
            return "preimage"
        reasons = [
            self._refusal(group, list(alike))
            for group in self._optimizer.param_groups
            for _, alike in groupby(group["params"], lambda parameter: (parameter.device, parameter.dtype))
        ]
        if any(reasons):
            reason = next(filter(None, reasons))
            which = "" if all(reasons) else " of some groups"
            self.why = f"{name} has no inverse ({reason}): copies of the buckets{which} in flight are kept"
        return "preimage" if all(reasons) else undo

    def _refusal(self, group: dict[str, Any], parameters: Sequence[torch.nn.Parameter]) -> str:
        """Returns why steps of these parameters of the group are not computed backwards; empty if they are."""
        if self._known not in RULES:
            return "none is known"
        kinds = {(p.device, p.dtype) for p in parameters}
        on_cpu = [dtype for device, dtype in kinds if device.type == "cpu"]
        if on_cpu and kernels.library() is None:
            return "swift's compiled code is not there"
        if unknown := [dtype for dtype in on_cpu if dtype not in kernels.TYPES]:
            return f"none for {unknown[0]}"
        if self._known is torch.optim.SGD and group["fused"]:
            if any(dtype.itemsize == 2 for dtype in on_cpu):
                # pytorch issue 191763: parameters do not change, momentum becomes garbage.
                return "torch's fused SGD is wrong for 16 bits on a CPU"
            if getattr(self._optimizer, "found_inf", None) is not None:
                return "fused SGD changes its momentum in steps that a scaler skips"
        on_devices = [(device, dtype) for device, dtype in kinds if device.type != "cpu"]
        if on_devices and (reason := self._refusal_on_devices(group)):
            return reason
        hyper = numbers(snapshot(group))
        if reason := RULES[self._known].refuses(hyper):
            return reason
        form, _ = RULES[self._known].backwards(Applied(hyper=hyper, step=1.0, trust_ratio=1.0, first=False))
        for device, dtype in on_devices:
            if not kernels.device_knows(device, form, dtype):
                return f"no kernel for {dtype} on {device.type}"
        return ""

    def _refusal_on_devices(self, group: dict[str, Any]) -> str:
        constants = [
            value for name, value in group.items() if name != "params" and isinstance(value, torch.Tensor)
        ]
        if self._undo == "arithmetic":
            return "only steps on a CPU have one"
        if (
            group.get("fused")
            or group.get("capturable")
            or self._known is Lamb
            or any(value.device.type != "cpu" for value in constants)
        ):
            return "the host would wait for its constants, which are on the device"
        return ""

    def _rebuild(self) -> None:
        groups = self._optimizer.param_groups
        self._layout = [list(group["params"]) for group in groups]
        size = self._bucket_bytes if not self.whole else None
        buckets = make_buckets(groups, size)
        self.buckets: list[list[torch.nn.Parameter]] = [parameters for _, parameters in buckets]
        self._group_of = [group for group, _ in buckets]
        self._pinned = [not self.whole and _mixed(group) for group in groups]

    def _forget(self) -> None:
        self._earlier: list[dict[int, Record | None]] = []  # updates of this step before the current one
        self._records: dict[int, Record | None] = {}
        self._uncounted: list[CodedCopies] = []
        self._torn: int | None = None
        self._states = len(self._optimizer.state)  # at the begin of the current update
        self._hooked = False  # step pre-hooks have been called
        self._ended = False  # and post-hooks too

    # --- one step ---

    @property
    def step(self) -> int:
        return self._step

    @property
    def early(self) -> bool:
        """Returns whether buckets may be applied before `apply_rest`. They may not if there are step pre-hooks, which
        must see all gradients and no update."""
        return not pre_hooks(self._optimizer)

    @property
    def applied(self) -> tuple[int, ...]:
        """Returns the applied buckets in order of application, including those of earlier updates of this step."""
        return tuple(bucket for records in (*self._earlier, self._records) for bucket in records)

    @property
    def undone_by(self) -> str:
        """Returns how this step is undone: the mode, or "preimage" if it is held."""
        return "preimage" if self._held else self.mode

    def of(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._optimizer is optimizer

    def again(self) -> None:
        """Begins another update of the optimizer in this step."""
        if self._ended:
            self._earlier.append(self._records)
            self._records, self._hooked, self._ended = {}, False, False
            self._states = len(self._optimizer.state)

    @property
    def complete(self) -> bool:
        return len(self._records) == len(self.buckets)

    @property
    def partial(self) -> bool:
        return self._torn is not None or (bool(self._records) and not self.complete)

    def begin(self, step: int, *, held: bool = False) -> None:
        """Begins a new step: forgets the last one, with its gradients and undo data.

        With `held`, copies of everything that this step changes are kept until the next one begins, in any mode. So
        the step can be undone regardless of the number of updates and of changes to the gradients.
        """
        self._step = step
        self._held = held
        self._forget()
        if self.stale:
            self._rebuild()

    @property
    def stale(self) -> bool:
        """Returns whether the optimizer's parameters have changed since the buckets were cut."""
        groups = self._optimizer.param_groups
        return len(groups) != len(self._layout) or not all(
            len(group["params"]) == len(known) and all(map(is_, group["params"], known))
            for group, known in zip(groups, self._layout)
        )

    def recut(self) -> None:
        """Cuts new buckets for the optimizer's current parameters. Raises UsageError in the middle of an update."""
        self.again()
        if self._hooked or self._records:
            raise UsageError(
                "an optimizer's parameters have changed in the middle of its update: change them before "
                "optimizer.step(), not in its hooks or its closure"
            )
        self._rebuild()

    def apply(self, bucket: int) -> None:
        """Runs the optimizer's own step for this bucket, with its parameters' current gradients.

        Raises UsageError if there are step pre-hooks that have not been called (see `early`).
        """
        assert bucket not in self._records, f"bucket {bucket} of step {self._step} is applied already"
        assert self._torn is None, "a bucket failed half-way in this step, or its undo"
        if not self._hooked and not self.early:
            raise UsageError(
                "the optimizer has a step pre-hook, which must see all gradients before any update; "
                "use updates='after_backward'"
            )
        parameters = [p for p in self.buckets[bucket] if p.grad is not None]
        self._torn = bucket
        self.replace_copies()
        record = self._before(bucket, parameters)
        with self._only(bucket):
            self._bare(self._optimizer)
        if record is not None:
            record.after()
        self._records[bucket] = record
        self._torn = None

    def replace_copies(self) -> None:
        """(at each bucket) Lets codes take the place of copies where a device has come so far. Does not wait."""
        self._uncounted = [record for record in self._uncounted if not record.decide()]

    def apply_rest(self, between: Callable[[int], None] | None = None) -> None:
        """Applies all remaining buckets, between the optimizer's step hooks (each is called once per step).

        `between(n)` is called between buckets, with `n` of them applied. Its errors pass through; the step is then
        partial, and another call continues. Raises UsageError if the update has already ended.
        """
        if self._ended:
            raise UsageError("optimizer.step() twice in one step of the journal; call again() in between")
        self._call_pre_hooks()
        if self.stale:  # a hook has changed the parameters
            self.recut()
        for bucket in range(len(self.buckets)):
            if bucket in self._records:
                continue
            self.apply(bucket)
            if between is not None and not self.complete:
                between(len(self._records))
        self._ended = True
        self._order_states()
        for hook in post_hooks(self._optimizer):
            hook(self._optimizer, (self._optimizer,), {})

    def _call_pre_hooks(self) -> None:
        if not self._hooked:
            for hook in pre_hooks(self._optimizer):
                hook(self._optimizer, (self._optimizer,), {})
            self._hooked = True

    def _order_states(self) -> None:
        """Reorders states that this update has created into the order of the parameters, as in the plain step."""
        state = self._optimizer.state
        new = set(list(state)[self._states :])
        for parameter in (p for group in self._optimizer.param_groups for p in group["params"] if p in new):
            state[parameter] = state.pop(parameter)

    def apply_whole(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs the step of an optimizer that is one bucket, called as it is; returns its result."""
        assert self.whole
        if self.complete:
            self.apply_rest()
            return None
        self._ended = True
        arguments = () if closure is None else (closure,)
        self._torn = 0
        self._hooked = True
        record = self._before(0, self.buckets[0])
        result = type(self._optimizer).step(self._optimizer, *arguments)
        if record is not None:
            record.after()
        self._records[0] = record
        self._torn = None
        return result

    def _before(self, bucket: int, parameters: list[torch.nn.Parameter]) -> Record | None:
        if self.undone_by == "none":
            return None
        # Post-hooks and unknown classes may also change parameters without a gradient.
        if self.whole or own_post_hooks(self._optimizer):
            return PreImage(self._optimizer, self.buckets[bucket], whole=self.whole)
        if self.undone_by == "preimage":
            return PreImage(self._optimizer, parameters, whole=self.whole)
        assert self._known is not None
        group, rule = self._optimizer.param_groups[self._group_of[bucket]], RULES.get(self._known)
        if rule is None or self._refusal(group, parameters):
            return PreImage(self._optimizer, parameters, whole=False)
        known = Bucket(self._optimizer, rule, group, parameters)
        if unfit(self._optimizer, parameters, known.names):
            return PreImage(self._optimizer, parameters, whole=False)
        if parameters[0].device.type != "cpu":
            coded = CodedCopies(known, PreImage(self._optimizer, parameters, whole=False))
            self._uncounted.append(coded)
            return coded
        return Arithmetic(known) if self.mode == "arithmetic" else Exact(known, self._pool, bucket)

    @contextmanager
    def _only(self, bucket: int) -> Any:
        if self.whole:
            yield
            return
        groups = self._optimizer.param_groups
        group = groups[self._group_of[bucket]]
        everything, foreach = group["params"], group.get("foreach")
        group["params"] = self.buckets[bucket]
        self._optimizer.param_groups = [group]
        if self._pinned[self._group_of[bucket]]:
            group["foreach"] = False
        try:
            yield
        finally:
            group["params"] = everything
            self._optimizer.param_groups = groups
            if self._pinned[self._group_of[bucket]]:
                group["foreach"] = foreach

    # --- after a failure ---

    def undo(self) -> UndoResult:
        """Undoes every applied bucket: parameters, optimizer state, step counters.

        Raises ServiceError if the step cannot be undone.
        """
        if self.undone_by == "none" and self.applied:
            raise ServiceError(
                "this step cannot be taken back: the journal keeps nothing to undo it (undo='none')"
            )
        if self._torn is not None:
            raise ServiceError("this step cannot be taken back: its optimizer, or its undo, failed half-way")
        records = [record for each in (*self._earlier, self._records) for record in each.values()]
        self._torn = -1  # until the undo is complete
        for record in reversed(records):
            assert record is not None
            record.undo()
        self._forget()
        return UndoResult(
            mode=self.undone_by,
            exact=all(record.exact for record in records if record is not None),
            buckets=len(records),
        )

    @property
    def extra_bytes(self) -> int:
        """Returns the bytes kept for the buckets applied in this step, until the next one."""
        return sum(
            record.extra_bytes
            for records in (*self._earlier, self._records)
            for record in records.values()
            if record is not None
        )


def make_buckets(
    groups: list[dict[str, Any]], bucket_bytes: int | None
) -> list[tuple[int, list[torch.nn.Parameter]]]:
    """Returns (index of the group, parameters) of each bucket, in reverse parameter order.

    A bucket is closed once it holds `bucket_bytes`; it has one group, dtype and device. None: one bucket in all.
    """
    if bucket_bytes is None:
        return [(0, [parameter for group in reversed(groups) for parameter in reversed(group["params"])])]
    done: list[tuple[int, list[torch.nn.Parameter]]] = []
    for index in range(len(groups) - 1, -1, -1):
        open_: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        for parameter in reversed(groups[index]["params"]):
            key = (parameter.dtype, parameter.device)
            open_.setdefault(key, []).append(parameter)
            sizes[key] = sizes.get(key, 0) + parameter.numel() * parameter.element_size()
            if sizes[key] >= bucket_bytes:
                done.append((index, open_.pop(key)))
                del sizes[key]
        done += [(index, parameters) for parameters in open_.values()]
    return done


def _mixed(group: dict[str, Any]) -> bool:
    """Returns whether torch, by default, uses the for-loop for the group but might use foreach for a part of it."""
    if group.get("foreach") is not None or group.get("fused") or "foreach" not in group:
        return False
    plain = (torch.Tensor, torch.nn.Parameter)
    return len({(parameter.device.type, type(parameter) in plain) for parameter in group["params"]}) > 1
