"""Where the machines of a job meet that were given no number (`swift-ft run` without `--node-rank`).

The place where they meet must be on none of them: whichever is lost, another one that comes with the same command gets
its place, and the others notice nothing. It is in memory, and level-triggered: every launcher says again and again what
it holds, so a coordinator that begins anew knows it within seconds.

    (launcher)  ``say`` every few seconds: the answer has its place, or how many are here
    (driver)    `Meetings`: of all jobs

Places are given when all machines are there (or enough, and no other one has come for a while). Then there are so many
as long as a single one of them is held: a job's world size does not change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.coordinator.commands import Refusal, Refused
from swift._pb import coordinator_pb2 as pb

MACHINES_MAX = 1 << 13
"""That are heard of at once."""


@dataclass(kw_only=True, slots=True)
class _Launcher:
    request: pb.MeetRequest
    came_at: float
    seen_at: float
    spare: bool = False
    """It came while the job was under way, and there was no place."""
    over: str = ""


@dataclass(kw_only=True, slots=True)
class _Place:
    machine: pb.Machine
    run: str | None
    """Whose it is; None: it was lost."""


class Meeting:
    """The machines of one job. No clock, no I/O."""

    def __init__(self, *, quiet_until: float = 0.0) -> None:
        """`quiet_until`: before that nobody gets a place that it did not have; of a job that is under way, whose
        machines may not have spoken yet."""
        self._quiet_until = quiet_until
        self._places: list[_Place] = []
        self._launchers: dict[str, _Launcher] = {}
        self._looked_at = quiet_until

    @property
    def is_empty(self) -> bool:
        return not self._launchers

    def look(self, now: float, stall_s: float) -> None:
        """Forgets who was silent for too long. Nobody was, if this coordinator itself was away (`stall_s`)."""
        away, self._looked_at = now - self._looked_at > stall_s, now
        for run, launcher in list(self._launchers.items()):
            if away:
                launcher.seen_at = now
            elif now - launcher.seen_at > launcher.request.lease_s:
                self.leave(run)

    def leave(self, run: str) -> None:
        """Its place is free."""
        self._launchers.pop(run, None)
        for place in self._places:
            if place.run == run:
                place.run = None
        if all(place.run is None for place in self._places):
            self._places = []  # nobody waits for the others: what comes is a new beginning

    def say(self, request: pb.MeetRequest, now: float, *, job_is_over: bool) -> pb.MeetReply:
        """A launcher is there. Refusal: what it wants is not what the others want."""
        launcher = self._launchers.get(request.run)
        if launcher is None:
            self._check(request)
            launcher = _Launcher(request=request, came_at=now, seen_at=now)
            self._launchers[request.run] = launcher
            if request.HasField("held"):
                launcher.over = self._reclaim(request)
        request.ClearField("held")  # known by now, and long
        launcher.request, launcher.seen_at = request, now
        place = self._place_of(request.run)
        if place is None and not launcher.over:
            if job_is_over and launcher.spare:
                launcher.over = "the job is over"
            elif not (job_is_over and self._places) and now >= self._quiet_until:
                self._settle(now)
                place = self._place_of(request.run)
                launcher.spare = place is None and bool(self._places)
        if place is None:
            return pb.MeetReply(here=len(self._launchers), over=launcher.over)
        machines = [held.machine for held in self._places]
        return pb.MeetReply(place=place, machines=machines, here=len(self._launchers))

    # --- ---

    def _place_of(self, run: str) -> int | None:
        return next((number for number, place in enumerate(self._places) if place.run == run), None)

    def _check(self, request: pb.MeetRequest) -> None:
        if len(self._launchers) >= MACHINES_MAX:
            raise Refusal(Refused.INVALID, f"{MACHINES_MAX} machines are here: no more")
        for other in self._launchers.values():
            wanted = (other.request.machines_min, other.request.machines_max)
            mine = (request.machines_min, request.machines_max)
            if mine != wanted:
                raise Refusal(
                    Refused.INVALID,
                    f"--nnodes is {_range(mine)} here and {_range(wanted)} on another machine",
                )
            break
        free = {place.machine.ranks for place in self._places if place.run is None}
        if free and request.machine.ranks not in free and not request.HasField("held"):
            ranks = ", ".join(map(str, sorted(free)))
            raise Refusal(
                Refused.INVALID,
                f"--nproc-per-node is {request.machine.ranks} here, and was {ranks} on the machine that was lost",
            )

    def _reclaim(self, request: pb.MeetRequest) -> str:
        """It has had a place: of before this coordinator began, or of before it was silent. Why it has lost it."""
        held = request.held
        if not self._places:
            self._places = [_Place(machine=machine, run=None) for machine in held.machines]
        if held.place < len(self._places):
            place = self._places[held.place]
            if place.run is None:
                place.machine, place.run = request.machine, request.run
                return ""
        return f"this machine was silent for more than {request.lease_s:g} s, and another one has its place"

    def _settle(self, now: float) -> None:
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
        """Who came first is the first."""
        any_request = next(iter(waiting.values())).request
        count = min(any_request.machines_max, len(waiting))
        last_came = max(launcher.came_at for launcher in waiting.values())
        last_call = now - last_came < max(launcher.request.last_call_s for launcher in waiting.values())
        if count < any_request.machines_min or (count < any_request.machines_max and last_call):
            return
        for run, launcher in list(waiting.items())[:count]:
            self._places.append(_Place(machine=launcher.request.machine, run=run))


class Meetings:
    """Of all jobs, by name. One ends when nobody is there any more."""

    def __init__(self, now: float) -> None:
        self._began_at = now
        self._meetings: dict[str, Meeting] = {}

    def __len__(self) -> int:
        return len(self._meetings)

    def __contains__(self, job: str) -> bool:
        return job in self._meetings

    def look(self, now: float, stall_s: float) -> None:
        for job, meeting in list(self._meetings.items()):
            meeting.look(now, stall_s)
            if meeting.is_empty:
                del self._meetings[job]

    def say(self, request: pb.MeetRequest, now: float, *, over: bool | None) -> pb.MeetReply:
        """`over`: whether the job is; None: it has not begun yet. Refusal."""
        meeting = self._meetings.get(request.job)
        if meeting is None:
            # Of a job that is under way: its machines say what they hold, before others get it.
            meeting = Meeting(quiet_until=self._began_at + request.lease_s if over is False else 0.0)
        if request.leaves:
            meeting.leave(request.run)
            return pb.MeetReply()
        reply = meeting.say(request, now, job_is_over=bool(over))
        self._meetings[request.job] = meeting
        return reply


def _range(counts: Sequence[int]) -> str:
    return str(counts[0]) if counts[0] == counts[1] else f"{counts[0]}:{counts[1]}"
