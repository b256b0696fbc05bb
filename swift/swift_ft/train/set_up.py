"""Collectives of the trainer's before `session.run`: seeds that are broadcast, barriers, a parameter sync.

The ranks that begin together run them. A process that replaces a lost rank runs the script alone: it gets the results
that the others got, from the keys that ranks share (`swift_ft.comm.rank_store`). A key holds as long as one of the
processes is there that had its result. If none is, all ranks are new, and run the collective again.

What is large is taken for parameters (DDP's sync, `distribute_tensor`, the initialization of DTensors). It is not kept:
such a process computes with its own numbers in place of the others', and its state is loaded later. If there is no
state yet, because the job has not begun, the job ends instead. A rehearsal finds whatever else depends on them.

    (a collective begins)  ``begin`` → ``finish`` when its result is waited for: done again after a failure, unless some
                           rank has told that all have done it
    (session.run)          ``agree``

Objects are carried as JSON, so nothing that another process sends is unpickled.
"""

import json
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from swift_ft import events, torch_private
from swift_ft.comm.backend import Collective, Collectives
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.comm.process_groups import Interrupted
from swift_ft.comm.worker_thread import Task
from swift_ft.errors import ServiceError, UsageError
from swift_ft.state import tree
from swift_ft.state.tensors import as_bytes, byte_view, dtype_name, plain
from swift_ft.text import tell
from swift_ft.train.failures import Failures
from swift_ft.train.generation import Membership
from swift_ft.train.participants import Site

KEPT_BYTES = 64 << 10
"""Maximum size of a result that is kept for processes that come later."""
KEPT_OF_GROUP = 1 << 20
"""Maximum size of all such results of one group."""
_OF_PARAMETERS = ("broadcast", "scatter", "all_gather", "all_gather_into_tensor")


class SetUp:
    """Runs the collectives of one process before `session.run`, or answers them."""

    def __init__(self, site: Site, membership: Membership, failures: Failures, *, alone: bool) -> None:
        """`alone`: this process holds no rank (a warm-up or a rehearsal)."""
        self._site, self._rank = site, site.rank
        self._membership = membership
        self._failures = failures
        self._alone = alone
        self._numbers: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._said = False

    def begin(
        self,
        group: ReconfigurableGroup,
        name: str,
        results: list[torch.Tensor],
        run: Collective,
        *,
        alike: bool,
    ) -> "SetUpWork":
        """Begins a collective over `group` that fills in `results`. `alike`: all ranks get the same. Raises UsageError
        if a later process could not get them."""
        number = self._numbers[group.label]
        self._numbers[group.label] += 1
        size = sum(result.nbytes for result in results)
        kept = size <= KEPT_BYTES and self._bytes[group.label] + size <= KEPT_OF_GROUP
        self._bytes[group.label] += size * kept
        if not kept and name not in _OF_PARAMETERS:
            raise UsageError(
                f"dist.{name} of {size} bytes before session.run: a process that replaces a lost rank could not get "
                f"the result, of which {KEPT_BYTES} bytes are kept ({KEPT_OF_GROUP} of a group); do it in train_step"
            )
        if not kept and not self._said and group.ranks[0] == self._rank and not self._alone:
            self._said = True
            tell(
                f"dist.{name} of {size} bytes before session.run is taken for parameters: what a later process holds "
                "there is loaded with its state"
            )
        key = f"set-up/{group.label}-{group.ranks[0]}/{number}"
        work = SetUpWork(self, group, name, results, run, key, alike=alike, kept=kept)
        if not self._alone and not self._membership.finished:
            with suppress(RuntimeError):  # a generation has ended: `finish` goes on in the next one
                if self._read_of_earlier(key) is None:
                    work.submit(self._membership.generation)
        return work

    def finish(self, work: "SetUpWork") -> None:
        """Waits for the collective. Raises ServiceError if a result is lost."""
        while True:
            try:
                if not self._alone:
                    self._membership.join_newest()
                told = self._read_of_earlier(work.key)
                if told is None:
                    generation = self._membership.generation
                    work.carry_out(generation)
                    self._put_own(work, generation)
                    forms = work.forms if work.alike else []
                    self._put(work.key, self._result(work, forms, generation))
                else:
                    self._answer(work, told)
                return
            except (Interrupted, RuntimeError) as error:
                if self._alone:
                    raise
                self._failures.handle(error, self._membership.generation)

    def agree(self, made: Sequence[str]) -> None:
        """(session.run) Raises UsageError unless all ranks have made the same process groups, in the same order.
        `made`: name and ranks of each."""
        while not (self._alone or self._membership.finished):
            try:
                self._membership.join_newest()
                self._agree(made)
                return
            except (Interrupted, RuntimeError) as error:
                self._failures.handle(error, self._membership.generation)

    def _agree(self, made: Sequence[str]) -> None:
        key, mine = "set-up/groups", json.dumps({"made": list(made)} | self._signed())
        told = json.loads(self._site.communicator.store.compare_set(key, "", mine))
        if not self._holds(told):
            told = json.loads(self._site.communicator.store.compare_set(key, json.dumps(told), mine))
        ours, theirs = [*made, "none"], [*told["made"], "none"]
        for number, (own, other) in enumerate(zip(ours, theirs, strict=False), start=1):
            if own != other:
                raise UsageError(
                    f"process group {number} of rank {self._rank} is {own!r} (name: ranks), and that of another rank "
                    f"{other!r}: make the same groups in the same order on all ranks, also those without this rank"
                )

    # --- ---

    def _answer(self, work: "SetUpWork", told: dict[str, Any]) -> None:
        """Fills in what the others told. Raises UsageError if they called something else, ServiceError if it is
        lost."""
        same = told["forms"] == work.forms or not work.alike
        if told["name"] != work.name or not same:
            raise UsageError(
                f"rank {self._rank} comes to dist.{work.name} {work.forms} before session.run, and the others came to "
                f"dist.{told['name']} {told['forms']} there: make the same calls in every process"
            )
        if work.has_results_of(told["generation"]):
            self._put_own(work, told["generation"])
        else:
            work.take_back()
            own = told if work.alike else self._own(work, told)
            if not self._alone and (own is None or (not work.kept and not self._membership.has_run)):
                raise ServiceError(
                    f"a rank was lost before the job had begun, and rank {self._rank} cannot get what dist.{work.name} "
                    "gives it: start the job again"
                )
            if own is None or not work.kept:
                work.run_alone()
            else:
                work.fill([b64decode(data) for data in own["data"]])
        if not self._alone:
            self._put(work.key, told)  # it holds for those who come while this process is there
            events.emit("set_up_answered", rank=self._rank, key=work.key, name=work.name)

    def _own(self, work: "SetUpWork", told: dict[str, Any]) -> dict[str, Any] | None:
        """Returns this rank's own result of a collective that gives each another one; None if it died with it."""
        own = self._read(f"{work.key}/{self._rank}")
        return own if own is not None and own["generation"] == told["generation"] else None

    def _put_own(self, work: "SetUpWork", generation: int) -> None:
        """Keeps this rank's result of a collective that gives each another one, for its successor."""
        if not work.alike:
            self._put(f"{work.key}/{self._rank}", self._result(work, work.forms, generation))

    def _result(self, work: "SetUpWork", forms: Any, generation: int) -> dict[str, Any]:
        data = work.bytes() if work.kept and forms else []
        return {
            "name": work.name,
            "forms": forms,
            "data": [b64encode(each).decode() for each in data],
            "generation": generation,
        }

    def _put(self, key: str, told: dict[str, Any]) -> None:
        self._site.communicator.store.set(key, json.dumps(told | self._signed()))

    def _signed(self) -> dict[str, int]:
        return {"newest": max(self._membership.members())}

    def _holds(self, told: dict[str, Any]) -> bool:
        """Returns whether some process of now was there when this was told, by the ids, which grow."""
        return bool(min(self._membership.members()) <= told["newest"])

    def _read_of_earlier(self, key: str) -> dict[str, Any] | None:
        """Returns what is kept under `key`, unless this rank takes part in the collective itself."""
        told = self._read(key)
        if told is None or self._alone or self._membership.finished:
            return told
        # Of the same generation: the others' messages are on the way to this rank.
        return told if self._holds(told) and told["generation"] < self._membership.generation else None

    def _read(self, key: str) -> dict[str, Any] | None:
        there = self._site.communicator.store.check([key])
        while self._alone and not there:  # the job's ranks come there as well; the store bounds the wait
            there = self._site.communicator.store.check([key])
        if not there:
            return None
        told: dict[str, Any] = json.loads(self._site.communicator.store.get(key))
        return told


class SetUpWork(torch_private.Work):
    """A collective before `session.run`. It is under way from the call on, and told once it is waited for."""

    def __init__(
        self,
        set_up: SetUp,
        group: ReconfigurableGroup,
        name: str,
        results: list[torch.Tensor],
        run: Collective,
        key: str,
        *,
        alike: bool,
        kept: bool,
    ) -> None:
        super().__init__()
        self._set_up, self._group, self._run = set_up, group, run
        self.name, self.key, self.alike, self.kept = name, key, alike, kept
        self.forms = [[dtype_name(result), list(result.shape)] for result in results]
        self._results = results
        self._before = [result.detach().clone() for result in results]
        self._task: Task | None = None
        self._generation = 0
        """In which the task was started."""
        self._has_results = False
        self._over = False

    def submit(self, generation: int) -> None:
        self._generation = generation

        def together(collectives: Collectives) -> None:
            self._run(collectives)
            self._has_results = True
            if not self.alike:
                collectives.barrier()  # no rank tells of it before all have their results

        self._task = self._group.submit(together)

    def has_results_of(self, generation: int) -> bool:
        """(a rank has told of it in `generation`, which is over) Returns whether this rank has its results too, though
        it may have lost the others before it knew that all had theirs."""
        if self._task is None or self._generation != generation:
            return False
        with suppress(Interrupted, RuntimeError):
            self._task.wait()  # it has ended; what a device still does of it comes first
        return self._has_results

    def carry_out(self, generation: int) -> None:
        """Waits for it in this generation; starts it there unless it is under way."""
        if self._task is None or self._task.error is not None or self._generation != generation:
            self.take_back()
            self.submit(generation)
        assert self._task is not None
        self._task.wait()

    def take_back(self) -> None:
        self._task, self._has_results = None, False
        for result, earlier in zip(self._results, self._before, strict=True):
            result.detach().copy_(earlier)

    def run_alone(self) -> None:
        self._group.run_alone(self._run)

    def fill(self, data: Sequence[bytes]) -> None:
        for result, each in zip(self._results, data, strict=True):
            room = torch.empty(result.shape, dtype=result.dtype)
            byte_view(room)[:] = np.frombuffer(each, dtype=np.uint8)
            result.detach().copy_(room)

    def bytes(self) -> list[bytes]:
        return [as_bytes(plain(result)).cpu().numpy().tobytes() for result in self._results]

    def wait(self, timeout: Any = None) -> bool:
        if not self._over:
            self._set_up.finish(self)
            self._over = True
        return True

    def is_completed(self) -> bool:
        return self._over or (self._task is not None and self._task.done and self._task.error is None)

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future


def encoded(value: Any) -> bytes:
    """Returns a plain object as JSON. Raises UsageError for other objects."""
    try:
        tensors, skeleton = tree.split(value, "the object")
    except tree.Inexpressible as error:
        raise UsageError(
            f"a collective of Python objects: {error} (objects are not pickled: nothing is unpickled from a peer)"
        ) from None
    if tensors:
        raise UsageError(
            "a collective of Python objects with tensors among them: send tensors by dist.broadcast or dist.all_gather"
        )
    return json.dumps(skeleton).encode()


def decoded(data: bytes) -> Any:
    return tree.join(json.loads(data), {})
