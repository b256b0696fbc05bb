"""Driver: carries out the effects of all jobs, on one asyncio loop.

It works in turns. A turn applies the queued commands, makes their changes durable in one transaction, then publishes
Views, starts calls to log servers and answers all commands. A turn ends with a state transition, so each state becomes
durable and visible separately. No command is applied while the store writes.

Log servers are called concurrently (`Questions`); their answers come back as commands.

An error in the core affects only its own job. The job's memory may be inconsistent, so the turn's changes to it are
dropped, and the job is loaded again from the store, as after a restart.
"""

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import UsageError
from swift_ft.text import LASTING_KEYS
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator import job_record, restarts
from swift_ft_services.coordinator.checks import is_stale
from swift_ft_services.coordinator.commands import Invalid, Refusal
from swift_ft_services.coordinator.communicators import job_class
from swift_ft_services.coordinator.job import Job
from swift_ft_services.coordinator.job_record import JobRow, LogServer
from swift_ft_services.coordinator.log_calls import LogServers, Questions, Unavailable, Unsure
from swift_ft_services.coordinator.store import MetadataStore, StoreConflict, StoreFailed
from swift_ft_services.coordinator.timeouts import BEATS_A_LEASE, Timing
from swift_ft_services.coordinator.views import measurements_of, status_of, summary_of, view_of, waiting_for

# Quarantine of single jobs: the others are served all the same.
#
# A row in the store may be damaged. Or the coordinator makes an error with a job: its memory of the job may then be
# inconsistent, and it reverts to the durable state (`Driver`). If such errors repeat, the job is quarantined: no
# command is applied to it until the coordinator is restarted.

ERRORS_MAX = 3
"""Errors with one job within `WITHIN_S` seconds that quarantine it."""
WITHIN_S = 60.0


class JobApart(Exception):
    """The job is quarantined: no command is applied to it."""


class Apart:
    """The quarantined jobs, and the recent errors of the others."""

    def __init__(self) -> None:
        self._why: dict[str, str] = {}
        self._errors: dict[str, deque[float]] = {}
        """Job -> times of its last errors, in monotonic seconds."""

    def row_of(self, name: str, parts: Mapping[str, str]) -> JobRow | None:
        """Returns the row that these parts store. Returns None if they are damaged; then the job is quarantined."""
        try:
            row = job_record.decode(name, parts)
            if row.job == name:
                return row
            why = f"it is of job {row.job}, and stands for {name}"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"it cannot be read: {error!r}"
        words = f"the coordinator's row of it is damaged ({why}); put a copy of the whole directory back"
        self._set(name, f"{words}, or start the job under another name", why)
        return None

    def is_repeated(self, name: str, error: str, now: float) -> bool:
        """Records an error of the coordinator with this job. Returns True if it was one too many; then the job is
        quarantined."""
        times = self._errors.setdefault(name, deque(maxlen=ERRORS_MAX))
        times.append(now)
        if len(times) < ERRORS_MAX or now - times[0] > WITHIN_S:
            return False
        self.put(name, error)
        return True

    def put(self, name: str, error: str) -> None:
        """Quarantines the job for an error that would repeat."""
        words = (
            f"the coordinator makes an error with it ({error}), which is a bug; its state is kept, report it"
        )
        self._set(name, f"{words}, and start the coordinator again, or the job under another name", error)

    def _set(self, name: str, words: str, why: str) -> None:
        self._why[name] = f"job {name} is set apart, others are served: {words}"
        events.emit("job_set_apart", job=name, reason=why)

    def __contains__(self, name: str) -> bool:
        return name in self._why

    def check(self, name: str) -> None:
        if name in self._why:
            raise JobApart(self._why[name])

    def summaries(self, may_see: Callable[[str], bool]) -> list[pb.JobSummary]:
        return [
            pb.JobSummary(job=name, state=pb.FAILED, reason=why)
            for name, why in sorted(self._why.items())
            if may_see(name)
        ]


# Views shown to watchers: each is a recent durable state of its job.

SOON_S = 0.05
"""Delay of a View while state and generation are unchanged: the joins of n ranks must not cause n Views for each
watcher."""
TOLD_PER_S = 1024
"""Upper limit of View updates per second of a job; with many watchers it extends the delay."""
SHOWN_S = 5.0
"""Maximum age of an outdated `waiting_for` in a View: showing each report or Ready at once would wake all watchers."""


class Published:
    """The published Views of all jobs. Used only on the driver's loop."""

    def __init__(self, clock: Callable[[], float], soon: Callable[[str], None]) -> None:
        """`soon` publishes the named job's durable state in the next turn."""
        self._clock = clock
        self._soon = soon
        self._views: dict[str, pb.View] = {}
        self._shown_at: dict[str, float] = {}
        self._unshown: set[str] = set()
        """Jobs with changes that are not published yet, but will be soon."""
        self._watchers: dict[str, set[asyncio.Event]] = {}

    def publish(self, row: JobRow) -> None:
        """Publishes a new state or generation at once, any other change after a short delay, with later ones."""
        shown = self._views.get(row.job)
        state = pb.State.Value(row.state)
        if shown is None or (row.generation, state) != (shown.generation, shown.state):
            self.show(row)
        elif row.job not in self._unshown:
            self._unshown.add(row.job)
            watchers = len(self._watchers.get(row.job, ()))
            asyncio.get_running_loop().call_later(max(SOON_S, watchers / TOLD_PER_S), self._if_due, row.job)

    def _if_due(self, name: str) -> None:
        if name in self._unshown:
            self._soon(name)

    def show(self, row: JobRow) -> None:
        self._unshown.discard(row.job)
        self._views[row.job] = view_of(row)
        self._shown_at[row.job] = self._clock()
        self.wake(row.job)

    def wake(self, name: str) -> None:
        for changed in self._watchers.get(name, ()):
            changed.set()

    def wake_all(self) -> None:
        for name in self._watchers:
            self.wake(name)

    def is_outdated(self, row: JobRow) -> bool:
        """Returns whether the published `waiting_for` is wrong and at least SHOWN_S old."""
        at = self._shown_at.get(row.job, -math.inf)
        return self._clock() - at >= SHOWN_S and self._views[row.job].waiting_for != waiting_for(row)

    async def views(self, name: str, over: Callable[[], bool]) -> AsyncGenerator[pb.View, None]:
        """Yields the published View at once, then newer ones, until `over()`. A slow reader skips to the newest."""
        changed = asyncio.Event()
        self._watchers.setdefault(name, set()).add(changed)
        try:
            changed.set()
            while not over():
                await changed.wait()
                changed.clear()
                view = self._views.get(name)
                if view is not None:
                    yield view
        finally:
            self._watchers[name].discard(changed)
            if not self._watchers[name]:
                del self._watchers[name]


# Key-value store shared by the ranks of a job: a few keys, in memory.
#
# Process groups are built with it. So it is not on a training machine, and it is not durable: a restarted coordinator
# has an empty one, under another `epoch`. Ranks that still need it detect that, report a lost connection, and build the
# next generation.
#
#     (servicer)  `change` applies a member's changes, `wait` waits for others' changes, `news` returns the new ones
#     (driver)    `begin` at a new generation: drops all keys but those about the job (`LASTING_KEYS`) and answers
#                 all waiting calls; `end` once the job is over
#
# Every rank keeps a copy of all keys and asks for what it lacks: a group of n ranks costs each of them a few calls, not
# n.

ENTRY_BYTES = 512
"""Overhead of a key beyond its own bytes and its value's: objects and table slots."""
NEWS_BYTES_MAX = 1 << 20
"""Limit for one answer; the rest comes with the next."""
BYTES_MAX = 1 << 22
BYTES_PER_RANK = 1 << 20
"""Allowance per rank that has joined; the world size does not count, since any number can be claimed."""
BYTES_EVER_MAX = 1 << 27
DELETED_MAX = 1 << 10
"""Number of deleted keys remembered for ranks that have not seen the deletion."""
OBJECT_BYTES = 64
"""Overhead of a value beyond its own bytes."""
_INT64 = 1 << 63


class Sharing:
    """The shared keys of one job. Used only on the driver's loop."""

    def __init__(self, generation: int, members: int) -> None:
        self.generation = generation
        self.members = members
        """Number of ranks that have joined so far."""
        self.epoch = secrets.randbits(63) + 1
        self.revision = 0
        self._bytes = 0
        """Size of everything stored here, in bytes with overhead."""
        self._shared: dict[str, _Entry] = {}
        """The keys, in the order of their last changes."""
        self._answered: dict[str, tuple[int, list[bytes | None]]] = {}
        """Incarnation -> (number of its last request with changes, results of those changes that are no `set`)."""
        self._deleted: dict[str, None] = {}
        self._waiting: set[asyncio.Event] = set()
        self.ended = False

    def begin(self, generation: int) -> None:
        """Starts a new generation: drops all keys except those about the job."""
        self.generation = generation
        for key in [key for key in self._shared if not key.startswith(LASTING_KEYS)]:
            self._bytes -= _size(key, self._shared.pop(key).value)
            self._deleted.pop(key, None)
        for _, results in self._answered.values():
            self._bytes -= _results_size(results)
        self._answered.clear()
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def change(self, incarnation: str, number: int, changes: Sequence[pb.SharedChange]) -> list[pb.Shared]:
        """Applies all changes or none. Returns each key as it is right after its change. Raises Refusal."""
        before, results = self._answered.get(incarnation, (0, []))
        if number <= before:  # repeated, because the answer was lost
            return _answer(changes, results) if number == before else []
        made: dict[str, bytes | None] = {}
        freed, results = _results_size(results), []
        for change in changes:
            value = made[change.key] = _changed(change, made.get(change.key, self._value(change.key)))
            if not change.HasField("set"):
                results.append(value)
        kept = _results_size(results) - freed
        self._check_room(made, kept)
        for key, value in made.items():
            self._put(key, value)
        self._answered[incarnation] = (number, results)
        self._bytes += kept
        return _answer(changes, results)

    def news(self, seen: int) -> tuple[list[pb.Shared], int, bool]:
        """Returns (changes since revision `seen`, revision up to which they are complete, whether more follow)."""
        newest_first = takewhile(lambda item: item[1].revision > seen, reversed(self._shared.items()))
        found: list[pb.Shared] = []
        size = 0
        for key, entry in reversed(list(newest_first)):
            size += OBJECT_BYTES + len(key) + len(entry.value or b"")
            if found and size > NEWS_BYTES_MAX:
                return found, found[-1].revision, True
            found.append(pb.Shared(key=key, value=entry.value, revision=entry.revision))
        return found, self.revision, False

    async def wait(self, keys: Sequence[str], wait_s: float) -> None:
        """Waits until all keys exist, the generation ends, or `wait_s` has passed."""
        changed, generation = asyncio.Event(), self.generation
        missing = 0
        """Number of leading keys still to be checked: each is checked once, however often something changes, and all
        once more at the end."""
        self._waiting.add(changed)
        try:
            async with asyncio.timeout(wait_s):
                while self.is_in(generation):
                    missing = self._missing(keys, missing) or self._missing(keys, len(keys))
                    if not missing:
                        return
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting.discard(changed)

    def _missing(self, keys: Sequence[str], count: int) -> int:
        """Returns the position after the last missing key among the first `count`; 0 if none is missing."""
        while count and self._value(keys[count - 1]) is not None:
            count -= 1
        return count

    def is_in(self, generation: int) -> bool:
        return not self.ended and self.generation == generation

    def _value(self, key: str) -> bytes | None:
        entry = self._shared.get(key)
        return None if entry is None else entry.value

    def _check_room(self, made: Mapping[str, bytes | None], more: int) -> None:
        size = self._bytes + more
        for key, value in made.items():
            if not key:
                raise Invalid("a key without a name")
            old = self._shared.get(key)
            if old is not None:
                size -= _size(key, old.value)
            if old is not None or value is not None:
                size += _size(key, value)
        most = min(BYTES_EVER_MAX, BYTES_MAX + BYTES_PER_RANK * self.members)
        if size > max(most, self._bytes):
            raise Invalid(
                f"{size} bytes of keys, each with {ENTRY_BYTES} more than it has: the {self.members} ranks of this job "
                f"share at most {most}"
            )

    def _put(self, key: str, value: bytes | None) -> None:
        if key in self._shared:
            if self._value(key) == value:
                return
            self._bytes -= _size(key, self._shared.pop(key).value)
        elif value is None:
            return
        self.revision += 1
        self._shared[key] = _Entry(value, self.revision)
        self._bytes += _size(key, value)
        self._deleted.pop(key, None)
        if value is None:
            self._deleted[key] = None
            if len(self._deleted) > DELETED_MAX:
                oldest = next(iter(self._deleted))
                del self._deleted[oldest]
                self._bytes -= _size(oldest, self._shared.pop(oldest).value)
        self._wake()

    def _wake(self) -> None:
        for changed in self._waiting:
            changed.set()


class _Entry(NamedTuple):
    value: bytes | None
    """None: the key was deleted."""
    revision: int


def _size(key: str, value: bytes | None) -> int:
    return ENTRY_BYTES + len(key) + len(value or b"")


def _results_size(results: Sequence[bytes | None]) -> int:
    return sum(OBJECT_BYTES + len(value) for value in results if value is not None)


def _answer(changes: Iterable[pb.SharedChange], results: Iterable[bytes | None]) -> list[pb.Shared]:
    came = iter(results)
    return [
        pb.Shared(key=change.key, value=change.set if change.HasField("set") else next(came, None))
        for change in changes
    ]


def _changed(change: pb.SharedChange, value: bytes | None) -> bytes | None:
    """Returns the key's next value; None if it is deleted."""
    match change.WhichOneof("what"):
        case "set":
            return change.set
        case "add":
            return _sum(change, value)
        case "swap":
            swaps = change.swap.expected == (value or b"")
            return change.swap.desired if swaps else value
        case "delete":
            return None
    raise Invalid(f"nothing is to be done with {change.key}")


def _sum(change: pb.SharedChange, value: bytes | None) -> bytes:
    digits = (value or b"0").removeprefix(b"-")
    if digits.isdigit() and len(digits) < 20:
        total = int(value or b"0") + change.add
        if -_INT64 <= total < _INT64:
            return b"%d" % total
    raise Invalid(f"{change.key} is no number that {change.add} can be added to")


# Meeting of a job's machines that were given no number (`swift-ft run` without `--node-rank`).
#
# The meeting point must not be on any of them: if a machine is lost, another one that runs the same command gets its
# place, and the others are not affected. It is in memory and level-triggered: every launcher repeats its state, so a
# restarted coordinator knows it within seconds.
#
#     (launcher)  ``say`` every few seconds: the answer has its place, or the number of launchers present
#     (driver)    `Meetings`: those of all jobs
#
# Places are assigned when all machines are present (or enough, and no other one has come for a while). Their number is
# fixed as long as at least one of them is held: a job's world size does not change.

MACHINES_MAX = 1 << 13
"""Limit of launchers known at the same time."""


@dataclass(kw_only=True, slots=True)
class _Launcher:
    request: pb.MeetRequest
    came_at: float
    seen_at: float
    spare: bool = False
    """True if it came while all places were taken."""
    over: str = ""


@dataclass(kw_only=True, slots=True)
class _Place:
    machine: pb.Machine
    run: str | None
    """Launcher that holds the place; None: it was lost."""


class Meeting:
    """The machines of one job. Reads no clock and does no I/O."""

    def __init__(self, *, quiet_until: float = 0.0) -> None:
        """`quiet_until`: until then no launcher gets a new place; for an active job whose machines may not have
        reported yet."""
        self._quiet_until = quiet_until
        self._places: list[_Place] = []
        self._launchers: dict[str, _Launcher] = {}
        self._looked_at = quiet_until

    @property
    def is_empty(self) -> bool:
        return not self._launchers

    def expire(self, now: float, timing: Timing, bereft: Collection[str]) -> None:
        """Removes launchers whose lease has expired; renews all if this coordinator itself was stalled. `bereft`: those
        that have lost all their ranks. If they are silent too, it is the machine, which takes half a lease of ranks."""
        away, self._looked_at = now - self._looked_at > timing.stall_s, now
        for run, launcher in list(self._launchers.items()):
            lease_s = launcher.request.lease_s
            if away:
                launcher.seen_at = now
            elif now - launcher.seen_at > (min(lease_s, timing.lease_s / 2) if run in bereft else lease_s):
                self.leave(run)

    def leave(self, run: str) -> None:
        self._launchers.pop(run, None)
        for place in self._places:
            if place.run == run:
                place.run = None
        if all(place.run is None for place in self._places):
            self._places = []  # no launcher waits for the others: the next one starts anew

    def say(self, request: pb.MeetRequest, now: float, *, job_is_over: bool) -> pb.MeetReply:
        """Records that a launcher is present and returns its place, if it has one. Raises Refusal if its settings
        differ from the others'."""
        launcher = self._launchers.get(request.run)
        if launcher is None:
            self._check(request)
            launcher = _Launcher(request=request, came_at=now, seen_at=now)
            self._launchers[request.run] = launcher
            if request.HasField("held"):
                launcher.over = self._reclaim(request)
        request.ClearField("held")  # applied by now, and long
        launcher.request, launcher.seen_at = request, now
        place = self._place_of(request.run)
        if place is None and not launcher.over:
            if job_is_over and not self._places:
                self._dismiss()
            if not (launcher.over or (job_is_over and self._places)):
                if now >= self._quiet_until:
                    self._fill_places(now)
                    place = self._place_of(request.run)
                launcher.spare = place is None and bool(self._places)
        if place is None:
            here = max(len(self._launchers), len(self._places))  # the others are not late if they have left
            return pb.MeetReply(here=here, over=launcher.over)
        machines = [held.machine for held in self._places]
        return pb.MeetReply(place=place, machines=machines, here=len(self._launchers))

    # --- ---

    def _dismiss(self) -> None:
        """(the job is over, and all that had a place have left) Ends the spares. Not before: a scheduler may take the
        end of enough launchers for the end of all, while a rank still saves files of its own."""
        for launcher in self._launchers.values():
            if launcher.spare:
                launcher.over = "the job is over"

    def _place_of(self, run: str) -> int | None:
        return next((number for number, place in enumerate(self._places) if place.run == run), None)

    def _check(self, request: pb.MeetRequest) -> None:
        if len(self._launchers) >= MACHINES_MAX:
            raise Invalid(f"{MACHINES_MAX} machines are here: no more")
        for other in self._launchers.values():
            wanted = (other.request.machines_min, other.request.machines_max)
            mine = (request.machines_min, request.machines_max)
            if mine != wanted:
                raise Invalid(f"--nnodes is {_range(mine)} here and {_range(wanted)} on another machine")
            break
        free = {place.machine.ranks for place in self._places if place.run is None}
        if free and request.machine.ranks not in free and not request.HasField("held"):
            ranks = ", ".join(map(str, sorted(free)))
            raise Invalid(
                f"--nproc-per-node is {request.machine.ranks} here, and was {ranks} on the machine that was lost"
            )

    def _reclaim(self, request: pb.MeetRequest) -> str:
        """Restores the place that the launcher held before this coordinator started or before its lease expired.
        Returns why that place is lost; empty if it is restored."""
        held = request.held
        if not self._places:
            self._places = [_Place(machine=machine, run=None) for machine in held.machines]
        if held.place < len(self._places):
            place = self._places[held.place]
            if place.run is None:
                place.machine, place.run = request.machine, request.run
                return ""
        return f"this machine was silent for more than {request.lease_s:g} s, and another one has its place"

    def _fill_places(self, now: float) -> None:
        waiting = {run: one for run, one in self._launchers.items() if self._waits(run, one)}
        if not self._places:
            self._begin(waiting, now)
            return
        for run, launcher in waiting.items():
            machine = launcher.request.machine
            free = (p for p in self._places if p.run is None and p.machine.ranks == machine.ranks)
            if place := next(free, None):
                place.machine, place.run = machine, run

    def _waits(self, run: str, launcher: _Launcher) -> bool:
        return not launcher.over and self._place_of(run) is None

    def _begin(self, waiting: Mapping[str, _Launcher], now: float) -> None:
        """Assigns places in order of arrival, once enough machines are present."""
        any_request = next(iter(waiting.values())).request
        count = min(any_request.machines_max, len(waiting))
        last_came = max(launcher.came_at for launcher in waiting.values())
        last_call = now - last_came < max(launcher.request.last_call_s for launcher in waiting.values())
        if count < any_request.machines_min or (count < any_request.machines_max and last_call):
            return
        for run, launcher in list(waiting.items())[:count]:
            self._places.append(_Place(machine=launcher.request.machine, run=run))


class Meetings(dict[str, Meeting]):
    """The meetings of all jobs, by name. One ends when its last launcher has left."""

    def __init__(self, now: float) -> None:
        super().__init__()
        self._began_at = now

    def expire(self, now: float, timing: Timing, bereft: Callable[[str], Collection[str]]) -> None:
        for job, meeting in list(self.items()):
            meeting.expire(now, timing, bereft(job))
            if meeting.is_empty:
                del self[job]

    def say(self, request: pb.MeetRequest, now: float, *, over: bool | None) -> pb.MeetReply:
        """Answers a launcher. `over`: whether the job is over; None if it has not begun. Raises Refusal."""
        meeting = self.get(request.job)
        if meeting is None:
            # Active job: its machines report their places before others get them.
            meeting = Meeting(quiet_until=self._began_at + request.lease_s if over is False else 0.0)
        if request.leaves:
            meeting.leave(request.run)
            return pb.MeetReply()
        reply = meeting.say(request, now, job_is_over=bool(over))
        self[request.job] = meeting
        return reply


def _range(counts: Sequence[int]) -> str:
    return str(counts[0]) if counts[0] == counts[1] else f"{counts[0]}:{counts[1]}"


logger = logging.getLogger(__name__)

JOBS_MAX = 1024
JOBS_SHOWN_MAX = 4096
"""Limit for one answer; gRPC clients accept up to 4 MiB."""

STOPS = "the coordinator is shutting down"

T = TypeVar("T")


class TooMany(Exception):
    """A limit of this coordinator would be exceeded."""


class NoSuchJob(Exception):
    """No rank has joined a job of that name."""


class _Error(Exception):
    """An error of the coordinator with a job."""


class Driver:
    """All jobs of one coordinator. Everything runs on the loop that called `start`."""

    def __init__(
        self,
        store: MetadataStore,
        logs: LogServers,
        timing: Timing,
        log_servers: list[LogServer],
        *,
        copies: int = 1,
        clock: Callable[[], float] = events.now,
        wall_clock: Callable[[], float] = time.time,
        caught_up: Callable[[], bool] = lambda: True,
        after_durable: Callable[[JobRow, m.Persist], None] = lambda row, persist: None,
        jobs_max: int = JOBS_MAX,
    ) -> None:
        self.timing = timing
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Reason why this process must end: its memory is ahead of its disk."""
        self._store = store
        self._log_servers = log_servers
        self._copies = copies
        self._clock = clock
        self._wall_clock = wall_clock
        self._caught_up = caught_up
        """Returns whether the inbox was empty at some moment since the last call."""
        self._after_durable = after_durable
        self._jobs_max = jobs_max
        self._questions = Questions(logs, self._apply_once_sure, self._spoil)
        self._jobs: dict[str, Job] = {}
        self._queue: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        """Queued work, each with the future of its result."""
        self._effects: list[tuple[Job, m.Effect]] = []
        """Effects of this turn, to be carried out once it is durable."""
        self._turn_ends = False
        """True if a state was entered in this turn or an error occurred."""
        self._touched: set[str] = set()
        """Jobs that the current work has applied a command to."""
        self._spoilt: dict[str, str] = {}
        """Job -> error of the coordinator with it in this turn."""
        self._going_back: dict[str, int] = {}
        """Job being loaded again from the store -> its generation."""
        self._turns: asyncio.Task[None] | None = None
        self._published = Published(clock, self._show_soon)
        self._stopping = False
        self._looked_at_logs: dict[str, float] = {}
        self._sharing: dict[str, Sharing] = {}
        self.apart = Apart()
        self._meetings = Meetings(clock())

    async def start(self) -> None:
        """Loads all jobs and carries out their effects again. Quarantines a job whose row is damaged. Raises
        StoreFailed, and UsageError if the log servers do not match a job's."""
        for name, parts in job_record.by_job(await self._store.read(job_record.ROOT)).items():
            self._load(name, parts)
        await self._enqueue(lambda: None)

    def _load(self, name: str, parts: Mapping[str, str]) -> None:
        """Resumes the job that these parts store, or quarantines it. Raises UsageError as `_relocated`."""
        row = self.apart.row_of(name, parts)
        if row is None:
            return
        try:
            kind = job_class(row.config)
            job = kind(row, self.timing, self._clock(), self._log_servers, stored=True)
            effects = [*self._relocated(job), *job.resume()]
            self._published.show(row)
        except UsageError:
            raise
        except Exception as error:
            logger.exception("job %s, as it is stored", name)
            self.apart.put(name, f"{type(error).__name__}: {error}")
            return
        self._jobs[name] = job
        events.emit("resumed", job=name, generation=row.generation, state=str(row.state), reason=row.reason)
        self._effects += [(job, effect) for effect in effects]

    def _job(self, name: str) -> Job:
        """Returns the job. Raises NoSuchJob, JobApart, or Unavailable while it is being loaded again."""
        self.apart.check(name)
        if name in self._going_back:
            raise Unavailable(f"job {name} goes back to what is durable of it")
        job = self._jobs.get(name)
        if job is None:
            raise NoSuchJob(f"no rank has joined a job {name} here")
        return job

    def _relocated(self, job: Job) -> list[m.Effect]:
        """Applies new addresses of log servers: a stream's location is a position in their list. Raises UsageError if
        --log-servers does not match."""
        row = job.row
        named = {server.address for server in self._log_servers}
        known = {server.address: number for number, server in enumerate(row.log_servers)}
        if row.state.is_over or set(row.addresses()) <= named <= set(known):
            return []
        for numbers in (job.places.in_order(), range(len(row.log_servers))):  # lost ones may be left out
            moved = dict(zip(numbers, self._log_servers, strict=False))
            others = [known.get(server.address, number) for number, server in moved.items()]
            if len(named) == len(numbers) and others == list(moved):
                return job.relocate(moved)
        kept = ",".join(row.log_servers[number].address for number in job.places.in_order())
        raise UsageError(
            f"--log-servers names {','.join(sorted(named))}, job {row.job} is kept on {kept}: "
            "name as many, in the same order; those that are lost may be left out"
        )

    async def run_ticks(self) -> None:
        while True:
            await asyncio.sleep(self.timing.tick_s)
            with contextlib.suppress(Unavailable):  # `failed` or `stop` reports it
                await self.tick()

    async def tick(self) -> None:
        """Checks leases after all commands received before have been applied, and polls the log servers."""
        await self._in_turn(self._tick)

    def _tick(self) -> None:
        tick = m.Tick(behind=not self._caught_up())
        for job in [job for job in self._jobs.values() if not job.row.state.is_over]:
            with contextlib.suppress(_Error):
                self._step(job, tick)
                self._look_at_logs(job)
                if self._published.is_outdated(job.row):
                    self._effects.append((job, m.PublishView()))
        self._meetings.expire(self._clock(), self.timing, self._bereft)

    def _bereft(self, name: str) -> Collection[str]:
        """Returns the launchers of the job whose ranks are all lost."""
        job = self._jobs.get(name)
        if job is None or job.row.state.is_over:
            return ()
        run_of, holders = job.row.run_of, job.row.holders
        return set(run_of.values()).difference(run_of[rank] for rank in holders if rank in run_of)

    def _look_at_logs(self, job: Job) -> None:
        """Polls whether the log servers answer and how much room they have, every `space_s`."""
        name, now = job.row.job, self._clock()
        due = now - self._looked_at_logs.get(name, -math.inf) >= self.timing.space_s
        if due and not self._questions.under_way(name, "space"):
            self._looked_at_logs[name] = now
            self._questions.ask(job, "space", self._questions.space(job, job.row.generation))

    def stop(self) -> None:
        """Ends all View streams and all calls to log servers. Queued work fails with Unavailable."""
        self._stopping = True
        self._published.wake_all()
        for sharing in self._sharing.values():
            sharing.end()
        self._questions.stop()
        for _, answer in self._queue:
            if not answer.done():
                answer.set_exception(Unavailable(STOPS))
        self._queue.clear()

    # --- for the servicer ---

    async def join(
        self, name: str, join: pb.JoinRequest, may_see: Callable[[str], bool] = lambda _job: True
    ) -> int:
        """Returns the generation that the rank joined. `may_see` returns whether the caller may know of another job.
        Raises as `apply`, and TooMany."""
        return await self._in_turn(lambda: self._join(name, join, may_see))

    def _join(self, name: str, join: pb.JoinRequest, may_see: Callable[[str], bool]) -> int:
        self.apart.check(name)
        job, command = self._jobs.get(name), m.Join(join)
        if job is None or restarts.starts_again(job.row, join):
            live = sum(not other.row.state.is_over for other in self._jobs.values())
            if live >= self._jobs_max:
                raise TooMany(f"{live} jobs are under way here: no more (--jobs-max)")
            if origin := restarts.wanted(None if job is None else job.row, join):
                other = self._jobs.get(origin) if may_see(origin) else None
                chosen = restarts.chosen(name, origin, None if other is None else other.row, join)
                command = m.Join(join, chosen)
            elif job is None or not job.row.checkpoints:
                command = m.Join(join, restarts.adopted(name, None if job is None else job.row, join))
        if job is None:
            kind = job_class(join.config)
            job = kind.create(name, self._log_servers, command, self.timing, self._clock(), self._copies)
        self._step(job, command)
        self._jobs[name] = job
        return job.row.generation

    async def apply(self, name: str, command: m.Command) -> Job:
        """Applies a command. Returns once it is durable. Raises Refusal, NoSuchJob, JobApart, Unavailable."""

        def work() -> Job:
            job = self._job(name)
            self._step(job, command)
            return job

        return await self._in_turn(work)

    async def _apply_once_sure(self, name: str, command: m.Command) -> Job:
        """As `apply`, for answers of log servers, which nobody repeats: waits for the store."""
        while True:
            try:
                return await self.apply(name, command)
            except Unsure:
                await asyncio.sleep(self.timing.tick_s)

    async def status(self, name: str, *, with_history: bool = False) -> pb.StatusReply:
        """Returns the job's status. Runs in a turn, so that it shows only durable state."""
        status = await self._in_turn(lambda: status_of(self._job(name), self._clock()))
        if with_history:
            try:
                status.history.extend(
                    job_record.read_history(name, await self._store.read(job_record.history_prefix(name)))
                )
            except StoreFailed as failure:
                raise Unavailable(str(failure)) from failure
        return status

    async def jobs(self, may_see: Callable[[str], bool]) -> pb.JobsReply:
        """Returns the jobs that the caller may see, up to JOBS_SHOWN_MAX. Runs in a turn, as `status`."""
        return await self._in_turn(lambda: self._listed(may_see))

    def _listed(self, may_see: Callable[[str], bool]) -> pb.JobsReply:
        seen = [job for name, job in sorted(self._jobs.items()) if may_see(name)]
        seen.sort(key=lambda job: job.row.state.is_over)
        shown = [summary_of(job) for job in seen]
        shown += self.apart.summaries(may_see)
        return pb.JobsReply(jobs=shown[:JOBS_SHOWN_MAX], left_out=max(0, len(shown) - JOBS_SHOWN_MAX))

    def measurements(self, name: str) -> pb.MeasurementsReply:
        return measurements_of(self._job(name))

    def sharing(self, name: str, asked: pb.ShareRequest) -> Sharing | None:
        """Returns the shared keys of that generation; None if it is over. A caller without incarnation (a spare) may
        only read. Raises Refusal, NoSuchJob, Unavailable."""
        self._check_holds()
        job = self._job(name)
        only_reads = not (asked.changes or asked.incarnation)
        other = asked.generation != job.row.generation
        if (other if only_reads else is_stale(job.row, asked)) or job.row.state.is_over:
            return None
        if name not in self._sharing:
            self._sharing[name] = Sharing(asked.generation, 0)
        sharing = self._sharing[name]
        sharing.members = len(job.row.holders)
        return sharing

    def meet(self, name: str, request: pb.MeetRequest) -> pb.MeetReply:
        """Answers a launcher without a node rank. Raises Refusal, TooMany, Unavailable."""
        self._check_holds()
        job = self._jobs.get(name)
        if name not in self._meetings and len(self._meetings) >= self._jobs_max:
            raise TooMany(f"machines of {self._jobs_max} jobs are here: no more (--jobs-max)")
        reply = self._meetings.say(
            request, self._clock(), over=None if job is None else job.row.state.is_over
        )
        reply.every_s = self.timing.lease_s / BEATS_A_LEASE
        return reply

    def generation_of(self, name: str) -> int:
        job = self._jobs.get(name)
        return self._going_back.get(name, 0) if job is None else job.row.generation

    async def read_jobs(self, read: Callable[[Collection[Job]], T]) -> T:
        """Returns what `read` says of all jobs, in a turn, as `status`: events of what is durable are emitted."""
        return await self._in_turn(lambda: read(self._jobs.values()))

    def views(self, name: str) -> AsyncGenerator[pb.View, None]:
        """As `Published.views`, until this coordinator stops or the job is quarantined."""
        return self._published.views(name, lambda: self._stopping or name in self.apart)

    # --- turns ---

    async def _in_turn(self, work: Callable[[], T]) -> T:
        """Runs `work` in a turn. Returns its result, or raises its error, once all its changes are durable."""
        self._check_holds()
        return await self._enqueue(work)

    def _enqueue(self, work: Callable[[], T]) -> asyncio.Future[T]:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.append((work, answer))
        if self._turns is None:
            self._turns = asyncio.create_task(self._take_turns())
        return answer

    def _check_up(self) -> None:
        if self.failed.done():
            raise Unavailable(self.failed.result())
        if self._stopping:
            raise Unavailable(STOPS)

    def _check_holds(self) -> None:
        """(before a decision) Raises Unavailable unless it is certain that no other coordinator decides."""
        self._check_up()
        try:
            holds = self._store.holds()
        except StoreConflict as error:
            self._fail(str(error))
            raise Unavailable(str(error)) from None
        if not holds:
            raise Unsure("the coordinator's store does not answer")

    async def _take_turns(self) -> None:
        try:
            while self._queue:
                await self._take_turn()
        except Exception as error:
            logger.exception("in a turn")
            self._fail(f"{type(error).__name__} in a turn: {error}")
        finally:
            self._turns = None

    async def _take_turn(self) -> None:
        done: list[tuple[asyncio.Future[Any], Any, Exception | None, set[str]]] = []
        self._turn_ends = False
        while self._queue and not self._turn_ends:
            work, answer = self._queue.popleft()
            self._touched = set()
            try:
                done.append((answer, work(), None, self._touched))
            except Exception as error:  # noqa: BLE001  (reported to the waiting caller)
                done.append((answer, None, error, self._touched))
        spoilt, self._spoilt = self._spoilt, {}
        answers = [
            (answer, result, why_not)
            if touched.isdisjoint(spoilt)
            else (answer, None, Unavailable(f"job {', '.join(touched)} goes back to what is durable of it"))
            for answer, result, why_not, touched in done
        ]
        effects = [(job, effect) for job, effect in self._effects if job.row.job not in spoilt]
        self._effects = []
        try:
            await self._make_durable(
                [(job, effect) for job, effect in effects if isinstance(effect, m.Persist)]
            )
        except Unavailable as unavailable:
            # Every decision of this turn is void, including refusals.
            answers = [
                (answer, None, unavailable if bug is None or isinstance(bug, Refusal) else bug)
                for answer, _, bug in answers
            ]
        else:
            spoilt |= self._carry_out(effects)
        for name, why in spoilt.items():
            await self._go_back(name, why)
        for answer, result, why_not in answers:
            if answer.done():  # no caller waits for it any more
                continue
            if why_not is None:
                answer.set_result(result)
            else:
                answer.set_exception(why_not)

    async def _go_back(self, name: str, error: str) -> None:
        """Reverts a job, after an error of the coordinator with it, to its durable state."""
        self._going_back[name] = self.generation_of(name)
        self._jobs.pop(name, None)
        self._questions.forget(name)
        events.emit("job_error", job=name, reason=error)
        try:
            parts = await self._store.read(job_record.key_of(name, ""))
        except StoreFailed as failure:
            self._fail(str(failure))
            return
        finally:
            del self._going_back[name]
        if parts and not self.apart.is_repeated(name, error, self._clock()):
            self._load(name, parts)
            self._enqueue(lambda: None).cancel()  # its effects belong to the next turn
        if name in self.apart:
            if name in self._sharing:
                self._sharing.pop(name).end()
            self._published.wake(name)

    def _step(self, job: Job, command: m.Command) -> None:
        """(in a turn) Applies a command. Raises Refusal, or _Error if the core raised an error: the job is then
        reverted."""
        self._check_holds()
        name = job.row.job
        self._touched.add(name)
        if name in self._spoilt:
            raise _Error
        try:
            effects = job.step(command, self._clock())
        except Refusal:
            raise
        except Exception as error:
            logger.exception("job %s, at %s", name, m.name_of(command))
            self._spoilt[name] = f"{type(error).__name__} at {m.name_of(command)}: {error}"
            self._turn_ends = True
            raise _Error from error
        self._effects += [(job, effect) for effect in effects]
        self._turn_ends = self._turn_ends or any(
            isinstance(effect, m.Persist) and effect.entered is not None for effect in effects
        )

    async def _make_durable(self, changes: Sequence[tuple[Job, m.Persist]]) -> None:
        """Commits the changes of these jobs, and with them the states that they enter to their histories. Raises
        Unavailable if that fails; then this process must end."""
        self._check_up()
        jobs = {job.row.job: job for job, _ in changes}
        puts, deletes = dict[str, str](), list[str]()
        for job, persist in changes:
            if persist.entered is not None:
                puts |= job_record.history_entry(job.row, self._wall_clock())
                deletes += job_record.forgotten_history(job.row)
        for job in jobs.values():
            changed, gone = job.changes.drain()
            puts |= changed
            deletes += gone
        if not puts:
            return
        try:
            await self._store.commit(puts, deletes)
        except (StoreConflict, StoreFailed) as error:
            reason = f"job {', '.join(jobs)} cannot be made durable: {error}"
            self._fail(reason)
            raise Unavailable(reason) from error

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)

    # --- effects ---

    def _spoil(self, name: str, error: str) -> None:
        """Reports an error with this job that occurred outside of a turn."""
        if name in self._jobs and not self._stopping and not self.failed.done():
            self._enqueue(lambda: self._spoilt.setdefault(name, error)).cancel()

    def _carry_out(self, effects: Sequence[tuple[Job, m.Effect]]) -> dict[str, str]:
        """(after a turn is durable) Carries out its effects. Returns job -> error for those that failed."""
        spoilt: dict[str, str] = {}
        if self._stopping:
            return spoilt
        published: set[str] = set()
        for job, effect in effects:
            try:
                self._carry_out_one(job, effect, published)
            except Exception as error:
                logger.exception("job %s, at %s", job.row.job, type(effect).__name__)
                spoilt[job.row.job] = f"{type(error).__name__} at {type(effect).__name__}: {error}"
        return spoilt

    def _carry_out_one(self, job: Job, effect: m.Effect, published: set[str]) -> None:
        asks = self._questions
        match effect:
            case m.Persist():
                self._after_durable(job.row, effect)
            case m.PublishView():
                if job.row.job not in published:
                    self._publish(job.row)
                    published.add(job.row.job)
                if effect.at_once:
                    self._published.show(job.row)
            case m.Emit():
                events.emit(effect.event, **effect.fields)
            case m.FenceLogs():
                asks.ask(job, "fence", asks.fence(job, effect.generation))
            case m.FetchInventory():
                asks.ask(job, "inventory", asks.inventory(job, effect.generation))
            case m.ResetLogs():
                asks.ask(job, "reset", asks.reset(job, effect.generation))
            case m.TrimLogs():
                asks.ask(job, "trim", asks.trim(job, effect.generation, effect.below_step))

    def _publish(self, row: JobRow) -> None:
        sharing = self._sharing.get(row.job)
        if sharing is not None and row.state.is_over:
            self._sharing.pop(row.job).end()
        elif sharing is not None and sharing.generation < row.generation:
            sharing.begin(row.generation)
        self._published.publish(row)

    def _show_soon(self, name: str) -> None:
        """Publishes a delayed View in a turn: the state in memory may not be durable yet."""

        def show() -> None:
            if name in self._jobs:
                self._effects.append((self._jobs[name], m.PublishView(at_once=True)))

        if not self._stopping and not self.failed.done():
            self._enqueue(show).cancel()
