"""Communicator: process groups for a script's own recovery, which survive the loss of members.

::

    with swift_ft.Communicator.from_env() as communicator:
        while working:
            try:
                dist.all_reduce(tensor)          # any collective of torch.distributed
            except RuntimeError:                 # a member was lost, or has revoked the groups
                communicator.revoke()            # members that saw no error leave their blocked operations
                communicator.shrink()            # the survivors go on, with new rank numbers

The terms are those of ULFM, MPI's User-Level Failure Mitigation. Joint decisions (`agree`, `shrink`, `grow`) are taken
at the coordinator (`services/swift_ft_services/coordinator/communicators.py`), so they are equal at all members. A
`swift_ft.Session` does all this by itself; this class is for scripts that decide themselves how to handle a loss.
"""

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
import xxhash
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from swift_ft import events, torch_private, warm_up
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.comm.backend import Fabric
from swift_ft.comm.gloo import GlooBackend
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.comm.rank_store import CoordinatorStore, stores_of
from swift_ft.errors import Fenced, JobFailed, MembersLost, ServiceError, SwiftError, UsageError
from swift_ft.train.config import Place, place_from_environment
from swift_ft.train.coordinator_session import RESAY_S, Holder, Member

_BUILD_TIMEOUT = timedelta(seconds=30)
_ABORT_INTERVAL_S = 0.02
_CONFIG = {"communicator": "1"}
VALUE_MAX = (1 << 63) - 1
LABEL_MAX = 100


class Failure(NamedTuple):
    """A member of this generation that was lost, or has left."""

    rank: int
    """The member's rank in this generation."""
    slot: int
    """The member's number in the job as started."""


class Communicator:
    """The live members of a job, and the groups that connect them. Use it from one thread.

    `rank` and `size` belong to the current generation; `slot` never changes. The default group of torch.distributed is
    the communicator's, with these numbers. An operation that a loss or a `revoke` has ended raises RuntimeError.
    Members may see different errors, but `agree` returns the same to all.

    A loss ends every operation in the groups of the lost member, so no member waits for it forever. Groups without the
    lost member (`group`) are not disturbed.
    """

    def __init__(self, place: Place) -> None:
        """Joins the job, and returns once all members are connected. Use `from_env`. Raises UsageError in a warm-up."""
        if warm_up.is_warming_up():
            raise UsageError("a script with a swift_ft.Communicator cannot be warmed up: leave --warm-up out")
        self.slot = place.rank
        """The number that this process was started with (`RANK`)."""
        self._member = Member(place.coordinator, place.job, place.rank, place.incarnation)
        # Not NCCL: its operations raise no error here, which a script's own decisions rest on.
        self._backend = GlooBackend(self._service_ports)
        self._stores = stores_of(self._member.client)
        self._lock = threading.Lock()
        self._generation = 0
        self._slots: tuple[int, ...] = ()
        self._groups: dict[str, _Group] = {}
        """Label -> the groups of this generation."""
        self._store: CoordinatorStore | None = None
        self._number = 0
        """Number of the next decision."""
        self._acknowledged: set[int] = set()
        self._closed, self._process = threading.Event(), os.getpid()
        self._saying: list[threading.Thread] = []
        """Threads that report a revoke to the coordinator."""
        try:
            self._member.join(
                place.world_size, _CONFIG, {"torch": torch.__version__}, _Notices(self._interrupt)
            )
            self._member.watcher.subscribe(self._saw)
            self._enter()
        except BaseException:
            self._end()
            raise

    @classmethod
    def from_env(cls) -> "Communicator":
        """Creates the communicator of a process that `swift-ft run` has started. Blocks until all members have joined.

        In a process that replaces a lost member it blocks until the others call `grow`. If they end without it, it
        raises SystemExit(0). Raises UsageError if `swift-ft run` has not started this process.
        """
        warm_up.begin_session()
        place = place_from_environment()
        events.configure(f"rank{place.rank}")
        return cls(place)

    # --- membership ---

    @property
    def rank(self) -> int:
        """This member's number in this generation, from 0."""
        return self._slots.index(self.slot)

    @property
    def size(self) -> int:
        """The number of members of this generation. Some may have been lost since (`failures`)."""
        return len(self._slots)

    @property
    def slots(self) -> tuple[int, ...]:
        """The slot of each rank of this generation."""
        return self._slots

    @property
    def generation(self) -> int:
        """The number of the generation. Each `shrink`, and each `grow` that admits a member, begins a new one."""
        return self._generation

    @property
    def revoked(self) -> str:
        """The member that has revoked all groups of this generation, and its reason. Empty if none has."""
        view = self._member.watcher.latest
        return view.revoked.get("", "") if view is not None and view.generation == self._generation else ""

    def failures(self) -> tuple[Failure, ...]:
        """Returns the members of this generation that were lost or have left, as far as this process knows, by rank."""
        view = self._member.watcher.latest
        if view is None or view.generation != self._generation:
            return ()
        return tuple(Failure(self._slots.index(slot), slot) for slot in view.lost)

    def acknowledge(self) -> tuple[Failure, ...]:
        """Marks the present failures as known, so that `agree` does not raise for them. Returns them."""
        failures = self.failures()
        self._acknowledged.update(failure.slot for failure in failures)
        return failures

    # --- after a loss ---

    def revoke(self, reason: str = "revoked", group: ReconfigurableGroup | None = None) -> None:
        """Ends every operation in the groups of this generation, at all members. A single member may call it. It waits
        neither for the others nor for the coordinator.

        Until `shrink`, every further operation in these groups raises RuntimeError. `agree`, `shrink` and `grow` still
        work. With `group`, a result of `group`, only that group is revoked.
        """
        label = "" if group is None else group.label
        said = threading.Thread(
            target=self._say_revoked, args=(self._generation, reason, label), name="swift-revoke", daemon=True
        )
        self._saying = [*(each for each in self._saying if each.is_alive()), said]
        said.start()
        self._break(self._generation, lambda made: label in ("", made.group.label))

    def agree(self, value: int = 1) -> int:
        """(called by every member) Returns the bitwise AND of all members' values. All members get the same result,
        even if some are lost meanwhile. `value`: 0 to 2**63 - 1.

        Raises MembersLost if a member was lost and not all others have acknowledged that. Then all members get this
        error, with the agreed `value` in it. Raises UsageError if the members have called different methods.
        """
        if not 0 <= value <= VALUE_MAX:
            raise UsageError(f"agree({value}): give a number from 0 to 2**63 - 1")
        decision = self._decide(pb.AGREE, value)
        assert decision is not None
        if decision.failed:
            ranks = tuple(self._slots.index(slot) for slot in decision.failed)
            raise MembersLost(decision.value, ranks)
        return decision.value

    def shrink(self) -> None:
        """(called by every remaining member) Begins a generation of the remaining members, with new rank numbers in the
        order of the old ones. If another member is lost meanwhile, it shrinks again before it returns.
        """
        self._decide(pb.SHRINK)
        self._enter()

    def grow(self) -> bool:
        """(called by every member) Admits the processes that wait for a slot. Returns True if there were any: then a
        generation that includes them has begun."""
        if self._decide(pb.GROW) is not None:
            return False
        self._enter()
        return True

    def group(self, ranks: Sequence[int]) -> ReconfigurableGroup:
        """(called by each of `ranks`) Returns a group of some members for torch.distributed. It has its own
        connections, so the loss of a member outside of it does not disturb it. It ends with this generation. `ranks`:
        ranks of this generation, this one among them. Raises UsageError for ranks outside of this generation, or
        without this one.
        """
        chosen = tuple(sorted(set(ranks)))
        if not chosen or chosen[0] < 0 or chosen[-1] >= self.size or self.rank not in chosen:
            raise UsageError(
                f"group({list(ranks)}): give ranks from 0 to {self.size - 1}, this one ({self.rank}) among them"
            )
        label = _label(chosen)
        known = self._groups.get(label)
        return (known or self._connect(label, chosen)).group

    def close(self) -> None:
        """Leaves the job. Operations that this member has completed also complete at the others. New ones with it fail,
        until the others `shrink`. The job is FINISHED once all members have left.
        """
        if not self._closed.is_set() and os.getpid() == self._process:
            try:
                self._member.client.call(pb.FinishRequest())
            finally:
                self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the job. A member that leaves with an error counts as lost for the others."""
        if error is None:
            self.close()
        else:
            self._end()

    # --- ---

    def _interrupt(self, generation: int) -> None:
        """(notice thread) Breaks all groups of generations before this one."""
        self._break(generation - 1, lambda _made: True)

    def _say_revoked(self, generation: int, reason: str, label: str) -> None:
        try:
            self._member.client.call(pb.RevokeRequest(generation=generation, reason=reason, label=label))
        except SwiftError as error:  # it is fenced, or the coordinator is away: the next decision reports it
            events.emit("revoke_untold", rank=self.slot, reason=str(error))
        except ValueError:  # gRPC raises it for a closed channel
            if not self._closed.is_set():
                raise

    def _saw(self, view: pb.View) -> None:
        """(watcher thread) Breaks the groups that the View reports as revoked or as having lost a member."""
        lost = set(view.lost) - set(view.left)
        self._break(
            view.generation,
            lambda made: (
                "" in view.revoked or made.group.label in view.revoked or not lost.isdisjoint(made.slots)
            ),
        )

    def _break(self, generation: int, hits: Callable[["_Group"], bool]) -> None:
        """(any thread) Frees threads that wait in groups that `hits` selects, of this generation or an older one."""
        with self._lock:
            groups = self._groups.values() if self._generation <= generation else ()
            broken = [made for made in groups if hits(made)]
        for made in broken:
            made.abort()

    def _takes_part(self, view: pb.View) -> bool:
        me = self._member.identity.incarnation
        ids = {member.rank: member.id for member in view.members if member.incarnation == me}
        return any(ids.get(seat.slot) == seat.member for seat in view.taking_part)

    def _enter(self) -> None:
        """Builds the newest generation; if that fails, the next one, until all members have built the same one."""
        while True:
            view = self._await(lambda view: view.generation > self._generation and self._takes_part(view))
            with self._lock:
                groups, self._groups = self._groups, {}
                self._generation = view.generation
                self._slots = tuple(seat.slot for seat in view.taking_part)
                self._number = 0
                self._acknowledged.clear()
            for group in groups.values():
                group.close()
            if dist.is_initialized():
                dist.destroy_process_group()
            self._member.enter(view.generation)
            self._store = self._stores(view.generation)
            if self._build():
                return

    def _build(self) -> bool:
        """Builds the group of all members. Returns False if another generation follows."""
        why = ""
        try:
            world = self._connect("world", range(self.size))
            torch_private.make_default(world.group)
        except (RuntimeError, ValueError) as error:
            why = " ".join(str(error).split())[:200] or type(error).__name__
        decision = self._decide(pb.BUILT, 0 if why else 1, why)
        if decision is None or not decision.value:
            return False
        assert self._store is not None
        self._store.built()
        events.emit("group_built", rank=self.slot, generation=self._generation)
        return True

    def _connect(self, label: str, ranks: Sequence[int]) -> "_Group":
        """Connects a group. Raises RuntimeError if a member was lost meanwhile, or does not answer."""
        assert self._store is not None
        fabric = self._backend.open()
        own = ranks.index(self.rank)
        group = ReconfigurableGroup(label, tuple(ranks), own, self._backend)
        made = _Group(fabric, group, tuple(self._slots[rank] for rank in ranks))
        with self._lock:
            self._groups[label] = made
        latest = self._member.watcher.latest
        if latest is not None:  # it may have come before the group existed, and not broken it
            self._saw(latest)
        store = PrefixStore(f"g{self._generation}/{label}", self._store)
        with self._store.building(len(ranks)):
            connections = fabric.connect(store, own, len(ranks), _BUILD_TIMEOUT)
        group.attach(connections, ranks)
        fabric.finish_connecting()
        group.register()
        return made

    def _decide(self, kind: "pb.VoteKind.ValueType", value: int = 0, reason: str = "") -> pb.Decision | None:
        """Returns the joint decision of all members, or None if a generation with this member has begun instead."""
        generation, number = self._generation, self._number
        self._number += 1
        waits = False  # at first: the View brings the answer sooner
        while True:
            vote = pb.VoteRequest(
                generation=generation,
                number=number,
                kind=kind,
                value=value,
                acknowledged=sorted(self._acknowledged),
                reason=reason,
            )
            self._member.client.call(vote, waits=waits)
            try:
                view = self._await(
                    lambda view: view.generation > generation or _decision(view, number) is not None, RESAY_S
                )
            except ServiceError:
                waits = True  # repeats patiently: the coordinator may have restarted
                continue
            if view.generation > generation:
                return None
            decision = _decision(view, number)
            assert decision is not None
            if decision.kind == pb.MISMATCH:
                raise UsageError(
                    f"the members called different things: {decision.words}; let all call the same, in one order"
                )
            return decision

    def _await(self, wanted: Callable[[pb.View], bool], timeout_s: float | None = None) -> pb.View:
        """Waits for a View that satisfies `wanted`. Raises Fenced, JobFailed, SystemExit (the job has ended without
        this process), and ServiceError after the timeout."""
        view = self._member.watcher.wait_for(
            lambda view: wanted(view) or self._is_over(view) or self._member.fenced, timeout_s
        )
        if self._member.fenced:
            raise Fenced(
                f"this process does not hold rank {self.slot} of job {view.job} any more: {view.reason}"
            )
        if view.state == pb.FAILED:
            raise JobFailed(f"job {view.job} failed: {view.reason}")
        if self._is_over(view) and not wanted(view):
            raise SystemExit(0)
        return view

    def _is_over(self, view: pb.View) -> bool:
        return view.state in (pb.FAILED, pb.FINISHED, pb.STOPPED)

    def _end(self) -> None:
        if os.getpid() != self._process:  # a forked child process, which is no member
            return
        self._closed.set()
        self._member.close()
        # A thread inside a call at interpreter exit would end the process by SIGABRT.
        for said in self._saying:
            said.join(timeout=5.0)
        with self._lock:
            groups, self._groups = self._groups, {}
        for group in groups.values():
            group.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _service_ports(self) -> list[int]:
        return [int(self._member.client.address.rpartition(":")[2])]


class _Notices(Holder):
    """A communicator's rank: it takes notices only."""

    def __init__(self, interrupt: Callable[[int], None]) -> None:
        self.interrupt = interrupt  # type: ignore[assignment, method-assign]


class _Group:
    def __init__(self, fabric: Fabric, group: ReconfigurableGroup, slots: tuple[int, ...]) -> None:
        self.group = group
        self.slots = slots
        self._fabric = fabric
        self._over = threading.Event()
        self._aborting: threading.Thread | None = None

    def abort(self) -> None:
        """(any thread) Frees threads that wait in the group, now and in operations that are just being started."""
        if self._aborting is None:
            self._aborting = threading.Thread(target=self._abort, name="swift-abort", daemon=True)
            self._aborting.start()

    def _abort(self) -> None:
        while not self._over.is_set():
            self._fabric.abort()
            self._over.wait(_ABORT_INTERVAL_S)

    def close(self) -> None:
        self._over.set()
        self._fabric.close()
        self.group.detach()


def _label(ranks: Sequence[int]) -> str:
    """Returns a label that is equal at all members, and no longer than the coordinator accepts."""
    label = f"ranks[{','.join(map(str, ranks))}]"
    return label if len(label) <= LABEL_MAX else f"ranks#{xxhash.xxh3_128_hexdigest(label.encode())}"


def _decision(view: pb.View, number: int) -> pb.Decision | None:
    return next((decision for decision in view.decisions if decision.number == number), None)
