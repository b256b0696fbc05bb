"""The coordinator's View of a job: differences between Views, a watcher of the newest, and human-readable text."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import grpc

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft._pb import coordinator_pb2_grpc as pb_grpc
from swift_ft.credentials import AWAY, advice
from swift_ft.errors import ServiceError
from swift_ft.text import WORLD_SIZE_MAX, one_line

# A View as human-readable text, for `swift-ft status` and the launcher's lines.

OVER = (pb.FINISHED, pb.FAILED, pb.STOPPED)
"""States in which a job's ranks and log servers are no longer monitored."""
STARTED_AGAIN = "started again"
"""First words of the `reason` of a job that was over and has been started again."""
ADOPTED = "adopted"
"""First word of the `reason` of a job that begins with its own checkpoints, which its coordinator did not know."""


def state_name(state: int) -> str:
    """Returns the state's name; `STATE_<number>` for a state that only a newer coordinator knows."""
    return pb.State.Name(state) if state in pb.State.values() else f"STATE_{state}"  # type: ignore[arg-type]


def has_left_forming(view: pb.View | None) -> bool:
    """Returns whether the job has left FORMING and has neither failed nor been stopped; False if no View is known."""
    return view is not None and view.state not in (
        pb.FORMING,
        pb.FAILED,
        pb.STOPPED,
    )


def inexact_words(view: pb.View) -> str:
    """Returns since when and why the job is not exact; empty if it equals a run without failures bit for bit."""
    if not view.HasField("inexact_since"):
        return ""
    return f"not exact since version {view.inexact_since}: {view.inexact_reason}"


def rehearsal_words(view: pb.View) -> list[str]:
    """Returns one line per rank that records steps for rehearsals; ranks with equal lines share one."""
    told: dict[tuple[str, str], list[int]] = {}
    for known in view.rehearsals:
        came = f" at version {known.version}, {known.steps} step{'s' * (known.steps != 1)}, "
        told_before = known.difference and known.difference in view.inexact_reason
        came += "equal" if not known.difference else "different"
        came += f": {known.difference}" if known.difference and not told_before else ""
        before, behind = ("rehearsed", came) if known.done else ("not rehearsed", "")
        if known.why_not:
            behind += f" (the last attempt could not be done: {known.why_not})"
        if known.HasField("under_way"):
            behind += f" (one is under way, from version {known.under_way})"
        told.setdefault((before, behind), []).append(known.rank)
    if not told:
        return ["not rehearsed"]
    return [f"{before}: {_ranks_words(ranks)}{behind}" for (before, behind), ranks in told.items()]


def _ranks_words(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} others" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {named}"


def end_words(view: pb.View) -> list[str]:
    """Returns lines to print when a run ends. Empty if it has done all of its steps, exactly."""
    words = []
    if view.state == pb.FINISHED and view.reason:  # the trainer ended the job before all steps
        words.append(f"{view.reason}; with more than {view.ends_of} steps it goes on")
    rehearsed = rehearsal_words(view) if view.rehearsals else []
    return [*words, *filter(None, [inexact_words(view)]), *rehearsed]


# Updates: the difference between two Views, and the View that results from applying it.
#
# A job of n ranks has a View of n members, and n ranks watch it: sending whole Views would move n * n in a recovery.
#
#     (coordinator)  whole(view), between(old, new)   update for a watcher that has no View, or `old`
#     (watcher)      applied(update, old)             the new View

_BY_RANK = ("members", "log_copies", "rehearsals")
_APPENDED = ("fenced", "log_servers", "log_places", "runs")
_LONG: tuple[Any, ...] = (*_BY_RANK, *_APPENDED, "plan")
_NUMBERS = {name: pb.View.DESCRIPTOR.fields_by_name[name].number for name in _LONG}


def whole(view: pb.View, *, reads_log: bool = True) -> pb.ViewUpdate:
    """Returns the update for a watcher that has no View. `reads_log`: keeps the plan's `sources`."""
    update = pb.ViewUpdate(view=view)
    _fold_plan(update, reads_log=reads_log)
    return update


def between(old: pb.View, new: pb.View, *, reads_log: bool = True) -> pb.ViewUpdate:
    """Returns the update for a watcher that has `old`. `reads_log`: keeps the plan's `sources`."""
    update = pb.ViewUpdate(base=old.revision, view=_short(new))
    view = update.view
    for name in _BY_RANK:
        before = {entry.rank: entry for entry in getattr(old, name)}
        after = {entry.rank: entry for entry in getattr(new, name)}
        getattr(view, name).extend(entry for rank, entry in after.items() if before.get(rank) != entry)
        gone = before.keys() - after.keys()
        if name == "members":
            update.gone.extend(sorted(gone))
        elif gone:
            _replace(update, name, new)
    for name in _APPENDED:
        before, after = getattr(old, name), getattr(new, name)
        if list(after[: len(before)]) == list(before):
            getattr(view, name).extend(after[len(before) :])
        else:
            _replace(update, name, new)
    if (old.HasField("plan"), old.plan) != (new.HasField("plan"), new.plan):
        _replace(update, "plan", new)
    _fold_plan(update, reads_log=reads_log)
    return update


def applied(update: pb.ViewUpdate, old: pb.View | None) -> pb.View | None:
    """Applies an update. Returns None if its base is another View than `old`, or if it is malformed."""
    counts = [count for together in update.planned for count in together.ranges[1::2]]
    if any(len(together.ranges) % 2 for together in update.planned) or sum(map(abs, counts)) > WORLD_SIZE_MAX:
        return None
    view = pb.View()
    view.CopyFrom(update.view)
    if view.HasField("plan"):
        view.plan.ranks.extend(_unfolded(update.planned))
    if not update.base:
        return view
    if old is None or old.revision != update.base:
        return None
    for name in _LONG:
        if _NUMBERS[name] in update.replaced:
            continue
        view.ClearField(name)
        if name == "plan":
            if old.HasField("plan"):
                view.plan.CopyFrom(old.plan)
        elif name in _BY_RANK:
            before, news = getattr(old, name), getattr(update.view, name)
            gone = update.gone if name == "members" else ()
            getattr(view, name).extend(_merged(before, news, gone) if news or gone else before)
        else:
            getattr(view, name).extend([*getattr(old, name), *getattr(update.view, name)])
    return view


def _short(view: pb.View) -> pb.View:
    """Returns a copy of the View without its long fields."""
    short = pb.View()
    short.CopyFrom(view)
    for name in _LONG:
        short.ClearField(name)
    return short


def _replace(update: pb.ViewUpdate, name: Any, new: pb.View) -> None:
    update.replaced.append(_NUMBERS[name])
    update.view.ClearField(name)
    if name == "plan":
        if new.HasField("plan"):
            update.view.plan.CopyFrom(new.plan)
    else:
        getattr(update.view, name).extend(getattr(new, name))


def _merged(old: Iterable[pb.Member], new: Iterable[pb.Member], gone: Sequence[int]) -> list[pb.Member]:
    by_rank = {entry.rank: entry for entry in old} | {entry.rank: entry for entry in new}
    return [by_rank[rank] for rank in sorted(by_rank.keys() - set(gone))]


def _fold_plan(update: pb.ViewUpdate, *, reads_log: bool) -> None:
    """Groups the plan's ranks with equal entries into ranges. Without `reads_log`, removes the plan's `sources`."""
    if not update.view.HasField("plan"):
        return
    plan = update.view.plan
    alike: dict[bytes, list[int]] = {}
    unnumbered = pb.RankPlan()
    for entry in plan.ranks:
        unnumbered.CopyFrom(entry)
        unnumbered.rank = 0
        alike.setdefault(unnumbered.SerializeToString(deterministic=True), []).append(entry.rank)
    del plan.ranks[:]
    if not reads_log:
        del plan.sources[:]
    for data, ranks in alike.items():
        update.planned.append(pb.PlannedRanks(plan=pb.RankPlan.FromString(data), ranges=_ranges(ranks)))


def _ranges(ranks: Iterable[int]) -> list[int]:
    ranges: list[int] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-2] + ranges[-1]:
            ranges[-1] += 1
        else:
            ranges += [rank, 1]
    return ranges


def _unfolded(planned: Iterable[pb.PlannedRanks]) -> Iterator[pb.RankPlan]:
    entries = [
        (rank, together.plan)
        for together in planned
        for first, count in zip(together.ranges[::2], together.ranges[1::2], strict=True)
        for rank in range(first, first + count)
    ]
    for rank, plan in sorted(entries, key=lambda entry: entry[0]):
        own = pb.RankPlan()
        own.CopyFrom(plan)
        own.rank = rank
        yield own


# Pause between two attempts to reconnect, in addition to the channel's own backoff.
RECONNECT_PAUSE_S = 0.05


def outcome(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Returns code and details of a failed call. A raised RpcError is also a Call, which grpc's types do not show."""
    call = cast("grpc.Call", error)
    return call.code(), one_line(call.details() or "")


class Line:
    """State of the connection to the coordinator. Reports each change once, as a human-readable line. Thread-safe."""

    def __init__(self, address: str, tell: Callable[[str], None]) -> None:
        self._address = address
        self._tell = tell
        self._lock = threading.Lock()
        self._is_down = False
        self._missed = 0
        """Calls in a row that were not answered."""

    def went(self, details: str) -> None:
        """Records that a call was not answered. `details`: grpc's text; its part after the last ": " is the cause. Of
        several coordinators all but one stand by, so that is reported only once each was asked."""
        with self._lock:
            self._missed += 1
            if self._missed <= self._address.count(","):
                return
            news, self._is_down = not self._is_down, True
        if news:
            why = details.rpartition(": ")[2].strip() or "no reason given"
            more = advice(self._address, details or why)
            why = f"{why}; {more}" if more else why
            self._tell(f"the coordinator at {self._address} does not answer ({why}): trying again")

    def came(self) -> None:
        with self._lock:
            news, self._is_down, self._missed = self._is_down, False, 0
        if news:
            self._tell(f"the coordinator at {self._address} answers again")


def newer(view: pb.View, than: pb.View | None) -> bool:
    """Returns whether `view` is newer than `than`, by (generation, revision). Both numbers are durable before a View is
    published."""
    return than is None or (view.generation, view.revision) > (than.generation, than.revision)


class ViewWatcher:
    """A daemon thread that follows the View of one job, through restarts of the coordinator, until closed.

    `latest` is the newest View seen. Callbacks run in the watcher's thread, one View at a time and in order;
    Views may be skipped, but never the newest. A callback must not raise: if it does, the watcher ends and
    `wait_for` raises ServiceError.
    """

    def __init__(
        self,
        stub: pb_grpc.CoordinatorStub,
        line: Line,
        address: str,
        job: str,
        *callbacks: Callable[[pb.View], None],
        rank: int | None = None,
    ) -> None:
        """`rank`: the watching rank. It is not sent what only other ranks need. None: an operator or a launcher."""
        self.latest: pb.View | None = None
        self._stub = stub
        self._line = line
        self._address = address
        self._job = job
        self._rank = rank
        self._callbacks = list(callbacks)
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._ended = ""  # why the thread has ended
        self._problem = ""  # why the last attempt failed
        self._stream: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name=f"view-watcher-{job}", daemon=True)
        self._thread.start()

    def subscribe(self, callback: Callable[[pb.View], None]) -> None:
        """Passes every newer View to `callback` from now on. Check `latest` afterwards: a View may already be there."""
        with self._changed:
            self._callbacks.append(callback)

    def wait_for(self, predicate: Callable[[pb.View], bool], timeout_s: float | None) -> pb.View:
        """Returns the first View (the latest included) that satisfies `predicate`. Raises ServiceError after
        `timeout_s`, or once the watcher has ended."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self.latest is not None and predicate(self.latest):
                    return self.latest
                if self._ended:
                    raise ServiceError(self._ended)
                remaining_s = None if deadline is None else deadline - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    raise ServiceError(f"waited {timeout_s:g} s for job {self._job}: {self._where()}")
                self._changed.wait(remaining_s)

    def close(self) -> None:
        """Ends the thread and waits for it, unless called from a callback."""
        self._closed.set()
        stream = self._stream
        if stream is not None:
            stream.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _where(self) -> str:
        if self.latest is None:
            return f"no view of it from the coordinator at {self._address} {self._problem}".rstrip()
        view = self.latest
        waiting = f", waiting for {view.waiting_for}" if view.waiting_for else ""
        state = state_name(view.state)
        return f"{state} in generation {view.generation}{waiting} {self._problem}".rstrip()

    def _run(self) -> None:
        ended = f"a callback of the watcher of job {self._job} failed"
        try:
            while not self._closed.is_set():
                self._follow()
                self._closed.wait(RECONNECT_PAUSE_S)
            ended = f"the watcher of job {self._job} was closed"
        finally:
            with self._changed:
                self._ended = ended
                self._changed.notify_all()

    def _follow(self) -> None:
        try:
            self._stream = self._stub.Watch(pb.WatchRequest(job=self._job, rank=self._rank))
            if self._closed.is_set():
                self._stream.cancel()
            known: pb.View | None = None
            for update in self._stream:
                self._problem = ""
                self._line.came()
                known = applied(update, known)
                if known is None:  # a new stream begins with the whole View
                    self._stream.cancel()
                    return
                self._take(known)
        except grpc.RpcError as error:
            code, details = outcome(error)
            self._problem = f"({details})"
            if code in AWAY and not self._closed.is_set():
                self._line.went(details)
        except ValueError:  # grpc's word for a closed channel
            self._closed.set()

    def _take(self, view: pb.View) -> None:
        with self._changed:
            if self._closed.is_set() or not newer(view, self.latest):
                return
            self.latest = view
            callbacks = list(self._callbacks)
            self._changed.notify_all()
        for callback in callbacks:
            callback(view)
