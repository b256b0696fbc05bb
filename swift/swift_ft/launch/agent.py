"""The launcher's main loop: a dead rank is replaced, and the others are left alone. torchrun's agent would restart them
all; so does this one where the script has no session.

    (kernel)  a child's pidfd becomes readable
    (agent)   notice to the coordinator, queued; a warm spare gets the rank; once the job runs again, a new
              spare is started, so that importing torch takes no CPU time from the recovery (without a fork
              server; a new server waits for the same)
    (agent)   no rank has begun a session, and none is known to the coordinator: all ranks are stopped, and
              started again (`_restart`)
    (agent)   a View says FAILED, or fences a child of this launcher: stops everything, or kills that child
"""

import math
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import (
    ADOPTED,
    OVER,
    STARTED_AGAIN,
    end_words,
    has_left_forming,
    inexact_words,
    of_view,
    state_name,
)
from swift_ft.launch.children import Child, Nursery, SignalGate, Signalled, StartFailed
from swift_ft.launch.command import LaunchPlan
from swift_ft.launch.death import MemoryKills
from swift_ft.launch.decisions import (
    Action,
    Outcome,
    Situation,
    Verdict,
    check_delay_s,
    delay_s,
    describe_exit,
    judge_exit,
    judge_place,
    outcome_of,
)
from swift_ft.launch.health_check import WaitingPlaces
from swift_ft.launch.link import CoordinatorLink
from swift_ft.launch.ranks import MachinePlace, make_program, place_env, rank_env
from swift_ft.launch.rendezvous import Rendezvous
from swift_ft.launch.spares import Rehearsals, Spares
from swift_ft.launch.together import Together
from swift_ft.launch.worker import Program
from swift_ft.log.memory import available_memory
from swift_ft.text import listed
from swift_ft.text import tell as say

# Messages of a launcher about its job, derived from the Views that it sees.

LATE_S = 20.0
"""Seconds after which a launcher reports what the job waits for: longer than missing a rank and starting another
take."""
_REFUSED = re.compile(r"(rank \d+) refused(?: ([A-Z_]+))?: (.*)", re.DOTALL)


class Told:
    """Messages about losses on other machines, log servers that were given up, recoveries in which all ranks restore a
    checkpoint, or that are not exact, what a recovery without a plan waits for, and when the job goes on.

    One line for each plan. Views may be skipped.
    """

    def __init__(self, adopts: bool = False) -> None:
        """`adopts`: --from-checkpoints was given."""
        self._adopts = adopts
        self._adopted_in = 0
        """The newest generation in which the job began with checkpoints of its own."""
        self._generation = 0
        self._ran = 0
        """The newest generation that was seen to run."""
        self._members: dict[int, pb.Member] = {}
        self._log_servers_lost: set[str] = set()
        self._inexact = False
        self._waits_for = ""
        self._late_at = math.inf

    def of(self, view: pb.View, mine: Collection[int] = ()) -> list[str]:
        """Returns what is new in this View. `mine`: the ranks of this machine."""
        return [*self._begins(view), *self._losses(view, mine), *self._plans(view), *self._goes_on(view)]

    def _begins(self, view: pb.View) -> list[str]:
        asked, self._adopts = self._adopts, False
        if view.reason.startswith(ADOPTED):
            known, self._adopted_in = self._adopted_in == view.generation, view.generation
            return [] if known else [view.reason]
        if not asked:
            return []
        return [f"the coordinator knows job {view.job} and its checkpoints: --from-checkpoints is not needed"]

    def _losses(self, view: pb.View, mine: Collection[int]) -> list[str]:
        before, self._members = self._members, {member.rank: member for member in view.members}
        lines = []
        if view.state not in (pb.RUNNING, *OVER):
            hosts = {member.host for rank, member in before.items() if rank not in {*mine, *self._members}}
            for host in sorted(hosts):
                there = {rank for rank, member in before.items() if member.host == host}
                is_gone = there.isdisjoint({*mine, *self._members})
                lines.append(
                    f"machine {host} is missing: {view.reason}" if is_gone else f"{view.reason} (on {host})"
                )
        for server in view.log_places:
            if server.lost and server.address not in self._log_servers_lost:
                self._log_servers_lost.add(server.address)
                lines.append(f"log server {server.address} was given up: {server.lost}")
        return lines

    def _goes_on(self, view: pb.View) -> list[str]:
        if view.state != pb.RUNNING or view.generation <= self._ran:
            return []
        first, self._ran = self._ran == 0, view.generation
        if first:
            return []
        step = f" at step {view.plan.target_version}" if view.HasField("plan") else ""
        without = f", without rank {listed(view.vacant)}" if view.vacant else ""
        return [f"the job goes on{step}{without}"]

    def _plans(self, view: pb.View) -> list[str]:
        lines = self._plan(view)
        if view.HasField("inexact_since") and not self._inexact:
            self._inexact = True
            if not (lines or (view.HasField("plan") and not view.plan.exact)):  # already said with the plan
                lines = [*lines, inexact_words(view)]
        return lines

    def late(self, view: pb.View | None, now: float) -> str:
        """Returns, once, what the job has waited for during the last `LATE_S`; empty if it has not waited that long."""
        waits = view is not None and view.state in (pb.FORMING, pb.FENCING, pb.PLANNING)
        waits_for = view.waiting_for if view is not None and waits else ""
        if waits_for != self._waits_for:
            self._waits_for, self._late_at = waits_for, now + LATE_S
        if not waits_for or now < self._late_at:
            return ""
        self._late_at = math.inf
        return f"the job has waited for {LATE_S:g} s for {waits_for}{_way_on(waits_for)}"

    def _plan(self, view: pb.View) -> list[str]:
        if view.generation <= self._generation or (published := of_view(view)) is None:
            return []
        self._generation, plan = view.generation, published.plan
        if plan.exact and not plan.restores:
            return []
        exactly = "exact" if plan.exact else "not exact"
        if plan.restores and view.reason.startswith(STARTED_AGAIN):
            return [f"{view.reason}; {exactly}"]
        if plan.restores:
            return [f"{_cause(plan.ranks[0].reason)}; restored version {plan.target_version}; {exactly}"]
        return [f"{plan.reason}; {exactly}"]


def _way_on(waits_for: str) -> str:
    ways = []
    if "to join" in waits_for:
        ways.append("if a machine is lost, start the same command on another one")
    if waits_for.startswith("log server "):
        ways.append("if a log server is lost for good, swift-ft logs --lost names it, and --add another one")
    return f" ({'; '.join(ways)})" if ways else ""


def _cause(reason: str) -> str:
    """Returns why all ranks restore: "replay refused: rank 2: ...", or the planner's own words."""
    refused = _REFUSED.fullmatch(reason)
    if refused is None:
        return reason
    rank, strategy, why = refused.groups(default="")
    what = {"CATCH_UP": "replay", "REPLICA": "copy"}.get(strategy, strategy.lower().replace("_", " "))
    return f"{what} refused: {rank}: {why}".lstrip()


# Check for memory for a process of a lost rank on the machine of survivors.
#
# A pipeline whose stage has no other rank goes on if the stage moves to a survivor's machine: into a process of its
# own, on the survivor's device. torch's schedules run only the stages that they were constructed with, so the
# survivor's own process cannot run a second one.

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def room_for_one_more(pids: Iterable[int]) -> str:
    """Returns why another process as large as the largest of these does not fit; empty if it does."""
    living, available = list(map(resident_bytes, pids)), available_memory()
    if not living:
        return "none of them is on this machine"
    if available is None or max(living) <= available:
        return ""
    return f"{available >> 20} MiB are free, and a rank here takes {max(living) >> 20} MiB"


class Vacated:
    def __init__(self) -> None:
        self._lost: dict[int, Child] = {}
        """Local rank -> its last process."""

    def add(self, local_rank: int, lost: Child) -> None:
        self._lost[local_rank] = lost

    def missed(self, view: pb.View) -> list[int]:
        """Returns the local ranks whose place this View neither leaves vacant nor gives to another process, once they
        are free. Forgets every place about which this View decides. Only a View of a job that shrinks reports any:
        members of a communicator decide themselves."""
        if not self._lost:
            return []
        holders: dict[int | None, str] = {member.rank: member.incarnation for member in view.members}
        there = {*view.vacant, *holders}
        known = {
            place: lost
            for place, lost in self._lost.items()
            if holders.get(lost.rank) != lost.incarnation and lost.gone
        }
        for place in known:
            del self._lost[place]
        return [place for place, lost in known.items() if view.shrinks and lost.rank not in there]


# Ranks that have ended with exit code 0 before the job is known to be over.
#
# The job may have just finished, which the next View shows. Or they have left early, which is an error: the coordinator
# fences one that is a member; one that is no member is detected here. The coordinator decides only after it has
# received the exit, so an unreachable coordinator is waited for.

LEFT_S = 5.0
"""Seconds for which the View is searched for a rank that has left, once the coordinator has received its exit."""
UNHEARD_S = 120.0
"""Seconds for which a machine without running ranks waits for a coordinator that does not answer."""


class Left:
    """The ranks of one launcher that ended with 0. Used by its main thread."""

    def __init__(self, link: CoordinatorLink) -> None:
        self._link = link
        self._left: dict[int, tuple[Child, float]] = {}
        """Local rank -> the process, and when it ended."""
        self._unheard_at = -math.inf
        """The last time at which some exits were not yet delivered to the coordinator."""

    def add(self, local_rank: int, child: Child, now: float) -> None:
        self._left[local_rank] = child, now

    def clear(self) -> None:
        self._left.clear()

    def await_end(self, view: pb.View | None) -> bool:
        return any(_misses(view, child) is not None for child, _ in self._left.values())

    def missed(self, view: pb.View | None, now: float) -> list[Child]:
        """Returns, once each, the processes for which the job waits: they never joined, so the coordinator does not
        fence them."""
        if self._link.unheard:
            self._unheard_at = now
        missed = []
        for local_rank, (child, ended_at) in list(self._left.items()):
            if view is not None and now - max(ended_at, self._unheard_at) >= LEFT_S:
                del self._left[local_rank]
                if _misses(view, child):
                    missed.append(child)
        return missed

    def given_up(self, now: float) -> str:
        """(no rank runs here) Returns why the end of the job is no longer waited for; empty while it is."""
        newest = max((ended_at for _, ended_at in self._left.values()), default=math.inf)
        if not self._link.unheard or now - newest < UNHEARD_S:
            return ""
        return (
            f"all ranks here have ended with exit code 0, and the coordinator has not said within {UNHEARD_S:g} s "
            "whether the job is finished: swift-ft status says so once it is back"
        )


def _misses(view: pb.View | None, child: Child) -> bool | None:
    """Returns whether the job waits for that process, which has ended with 0, to join. None: the job does not depend on
    it. False: it has joined, so the coordinator will report that the job is finished, or that the process is lost."""
    if view is None or view.state == pb.FINISHED:
        return None
    if any(member.incarnation == child.incarnation for member in view.members):
        return False
    return True if view.state != pb.RUNNING else None


# SIGTERM of a launcher whose job runs: a checkpoint first, so that no step is lost when the job is started again.
#
# ::
#
#     (sender)      SIGTERM
#     (launcher)    asks the coordinator for a checkpoint, and keeps looking after its ranks
#     (all ranks)   save the version that the View then names (`checkpoint_at`)
#     (launcher)    it is complete, or the time is up, or another signal has come: the ranks are ended
#
# A job that does not run has no state newer than its newest checkpoint: then the launcher leaves at once.


class Leaving:
    """The exit after SIGTERM. The main loop calls ``check`` after every event."""

    def __init__(self, gate: SignalGate, link: CoordinatorLink, patience_s: float) -> None:
        """Initializes. `patience_s`: seconds for the checkpoint; 0: no checkpoint."""
        self._gate = gate
        self._link = link
        self._patience_s = patience_s
        self._until: float | None = None
        """The time at which it leaves in any case; None: no SIGTERM has come."""
        self._newest = -1
        self._wanted: int | None = None

    def begins(self, view: pb.View | None) -> bool:
        """Returns True if SIGTERM has just come and a checkpoint is saved first. Raises Signalled for a signal that
        takes effect at once."""
        runs = view is not None and view.state == pb.RUNNING
        if (
            self._until is not None
            or not self._patience_s
            or not runs
            or not self._gate.consume(signal.SIGTERM)
        ):
            self._gate.check()
            return False
        assert view is not None
        self._until = events.now() + self._patience_s
        self._newest = max(view.checkpoints, default=-1)
        self._link.ask_checkpoint("a launcher was told to stop")
        return True

    def patience_s(self, longest_s: float) -> float:
        return longest_s if self._until is None else min(longest_s, max(0.0, self._until - events.now()))

    def check(self, view: pb.View | None) -> None:
        """Raises Signalled once the checkpoint is complete, the time is up, or the job no longer runs."""
        if self._until is None:
            return
        newest = -1 if view is None else max(view.checkpoints, default=-1)
        if view is not None and view.HasField("checkpoint_at"):
            self._wanted = view.checkpoint_at
        saved = newest > self._newest if self._wanted is None else newest >= self._wanted
        runs = view is not None and view.state == pb.RUNNING
        if saved or not runs or self._link.not_asked or events.now() >= self._until:
            events.emit("leaves", saved=saved, version=newest)
            raise Signalled(signal.SIGTERM)


# A script without a session (`swift_ft.Session`, `swift_ft.Communicator`) is run as torchrun runs it.

UNPROTECTED = (
    "not protected: its script has begun no session, so a failure restarts all its ranks, as torchrun does "
    "(--max-restarts {max_restarts}). Three lines change that: session = swift_ft.Session.from_env(); optimizer = "
    "session.optimizer(optimizer); session.run(train_step, num_steps=N) (docs/trainers.md)"
)

SPARE_DELAY_S_MAX = 30.0
"""Seconds after a death until a new spare is started, even if no View says that the job runs again."""
SETTLE_S = 0.5
"""Seconds for which ranks may end by themselves once the job fails: their output and exit codes show why."""
CHECK_HOLDS_S = 60.0
"""Seconds of waiting for a place in the job after which a machine is checked again."""


class ReplacingAgent:
    """One machine's ranks and spares.

    Every living child is either a rank in `_ranks` or a spare, except while the ranks are being stopped.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        machines: Rendezvous,
        nursery: Nursery,
        link: CoordinatorLink,
        gate: SignalGate,
    ) -> None:
        settings, job = plan.config, plan.job
        self._settings = settings
        self._place: MachinePlace
        """Known once the machines have met."""
        self._job = job
        self._output = plan.output
        self._spares = Spares(nursery, plan.spare_count, warm_up=self._warming if plan.warms_up else None)
        self._rehearsals = Rehearsals(
            nursery,
            link,
            lambda place, incarnation, version: replace(self._program(place, incarnation), rehearse=version),
        )
        self._grace_s = plan.grace_s
        self._nursery = nursery
        self._link = link
        self._gate = gate

        def environment(place: int) -> dict[str, str]:
            return place_env(settings, self._host.get(place, place), job)

        self._waiting = WaitingPlaces(plan.health_check, nursery, environment)
        self._leaving = Leaving(gate, link, plan.last_checkpoint_s)
        self._machines = machines
        self._ranks: dict[int, Child] = {}
        """Local rank -> its living process."""
        self._done: dict[int, Child] = {}
        """Local rank -> its process that ended with 0, or that was lost after the job had finished."""
        self._left = Left(link)
        self._replacements_left = settings.replacements
        self._attempts: Counter[int] = Counter()
        """Local rank -> deaths since the job last ran."""
        self._deaths: Counter[int] = Counter()
        """Local rank -> deaths since all ranks reached a new version."""
        self._before: int | None = None
        """The generation in which a previous run of the job ended, before this launcher; 0: no previous run."""
        self._known = False
        """The coordinator's View names this launcher's run."""
        self._has_run = False
        self._has_session = False
        """A rank of this machine has begun a session or a communicator."""
        self._told_unprotected = False
        self._restarts = 0
        """How often all ranks were restarted."""
        self._together: Together | None = None
        """(one of several machines) The others, until it is known that there is a session."""
        self._looked_at: pb.View | None = None
        self._told = Told(bool(job.from_checkpoints))
        self._memory_kills = MemoryKills()
        self._last_death: tuple[float, int] | None = None
        """Time and generation of the newest death whose recovery is not over."""
        self._lost_code = 0
        self._vacated = Vacated()
        self._host: dict[int, int] = {}
        """Local rank -> the local rank on whose device it runs, if it has moved."""
        self.outcome: Outcome | None = None

    def run(self) -> None:
        """Runs the ranks to the job's end, which `outcome` tells. Raises Signalled, NotNeeded and ServiceError."""
        try:
            self._nursery.tend()
            self._check_all_places()
            with self._gate.raising():
                self._nursery.prepare()
            self._spares.begin(self._settings.nproc_per_node)
            began = events.now()
            with self._gate.raising():
                self._place = self._machines.next_rendezvous()
            if len(self._place.ranks_of) > 1:
                self._together = Together(self._place, self._settings.timeout_s, self._nursery.wake)
            if events.now() - began > CHECK_HOLDS_S:
                self._check_all_places()
            for local_rank in range(self._settings.nproc_per_node):
                self._give_rank(local_rank)
            while self.outcome is None:
                self._turn()
        finally:
            self._shut_down()

    def _stop_ranks(self) -> None:
        ranks, self._ranks = list(self._ranks.values()), {}
        self._nursery.stop(ranks, self._grace_s, hurry=lambda: self._gate.pending)
        if self.outcome is None:
            for child in ranks:
                self._notify(child)

    def _shut_down(self) -> None:
        self._waiting.stop()
        if self._together is not None:
            self._together.close()
        self._nursery.kill([child for child in self._nursery.children if child.rank is None])
        self._stop_ranks()
        self._nursery.close()

    def _turn(self) -> None:
        now = events.now()
        patience_s = self._waiting.patience_s(self._settings.monitor_interval)
        spoke, ended = self._nursery.wait(self._leaving.patience_s(patience_s))
        if self._leaving.begins(self._view):
            say("SIGTERM: a checkpoint is made first (another signal ends the ranks at once)")
        self._leaving.check(self._view)
        self._has_session = self._has_session or any(child.has_session for child in (*spoke, *ended))
        for child in spoke:  # first: a spare that has just become warm can be used
            (self._rehearsals if child.rehearses else self._spares).handle_output(child)
        self._look_after_unprotected()
        # Then deaths, which are urgent.
        for child in ended:
            self._on_exit(child)
        self._on_view(self._view)
        self._spares.on_view(self._view)
        self._rehearsals.on_view(self._view)
        for child in self._left.missed(self._view, now):
            self._fail_without(child)
        for local_rank, why, failures in self._waiting.failed():
            self._on_unfit(local_rank, why, failures)
        if self._machines.lost and self.outcome is None:
            self._end({3}, self._machines.lost)
        if self.outcome is not None:
            return
        if late := self._told.late(self._view, now):
            say(late)
        self._replace_due()
        self._check_vacated()
        if not self._ranks and not self._waiting:
            if not self._is_protected:
                self._tell_unprotected()
                if self._together is not None:
                    self._together.ended(self._restarts)
                    if not self._together.all_ended:
                        return
            if not self._left.await_end(self._view):
                self.outcome = Outcome(exit_code=self._lost_code, line=self._summary())
                return
            if why := self._left.given_up(now):
                self._end({3}, why)
                return
        if self._is_quiet():
            ranks = [self._place.rank(local_rank) for local_rank in range(self._settings.nproc_per_node)]
            self._spares.tend(self._view, ranks)
            self._rehearsals.tend(self._view, ranks)

    def _summary(self) -> str:
        words = [] if self._view is None else end_words(self._view)
        return f"swift: job {self._job.name}: {'; '.join(words)}" if words else ""

    def _check_all_places(self) -> None:
        self._waiting.check_all(
            self._settings.nproc_per_node, self._settings.monitor_interval, self._gate.check
        )

    # Ranks and spares.

    def _program(self, local_rank: int, incarnation: str) -> Program:
        device_of = self._host.get(local_rank)
        env = rank_env(
            self._settings,
            self._place,
            local_rank,
            job=self._job,
            incarnation=incarnation,
            device_of=device_of,
            restarts=self._restarts,
        )
        # The rank then fails, instead of starting anew, if the coordinator has lost the job.
        env["SWIFT_HAS_RUN"] = "1" if self._has_run else ""
        return make_program(self._job, self._output, local_rank, env)

    def _warming(self, local_rank: int, incarnation: str) -> Program:
        return replace(self._program(local_rank, incarnation), warm_up=True)

    def _give_rank(self, local_rank: int) -> Child:
        rank = self._place.rank(local_rank)
        child = self._spares.assign(rank, on_its_device=local_rank not in self._host)
        child.assign(rank, self._program(local_rank, child.incarnation))
        events.emit(
            "spare_assigned",
            rank=rank,
            pid=child.pid,
            incarnation=child.incarnation,
            warm=child.warm,
            warmed_up=child.warmed_up,
        )
        self._ranks[local_rank] = child
        return child

    def _is_quiet(self) -> bool:
        if self._last_death is None:
            return True
        died_at, generation = self._last_death
        view = self._view
        recovered = view is not None and view.state == pb.RUNNING and view.generation > generation
        if recovered or events.now() - died_at > SPARE_DELAY_S_MAX:
            self._last_death = None
            return True
        return False

    # Events of children.

    def _on_exit(self, child: Child) -> None:
        assert child.exit_code is not None
        if child.rank is None:
            (self._rehearsals if child.rehearses else self._spares).ended(child)
            return
        local_rank = next((local for local, held in self._ranks.items() if held is child), None)
        if local_rank is None:  # `_count_ended` has already counted it
            return
        del self._ranks[local_rank]
        events.emit("child_exit", rank=child.rank, pid=child.pid, code=child.exit_code)
        self._rehearsals.give_way()
        if self.outcome is not None:
            return
        why = self._memory_kills.words(child.pid) if child.exit_code == -signal.SIGKILL else ""
        if self._is_plain(child.exit_code):
            self._restart(f"rank {child.rank}: {describe_exit(child.exit_code, why)}")
            return
        self._attempts[local_rank] += 1
        self._deaths[local_rank] += 1
        situation = self._situation(local_rank)
        verdict = judge_exit(child.rank, child.exit_code, situation, why)
        if verdict.action == Action.STOP:
            self._fail(verdict)
            return
        self._notify(child, given_up=verdict.action == Action.VACANT)
        if verdict.action == Action.REPLACE:
            self._replace(child, local_rank, verdict.reason)
            return
        if verdict.action == Action.VACANT:
            self._vacated.add(local_rank, child)
            self._leave_vacant(verdict)
            return
        self._done[local_rank] = child
        if not situation.finished:
            self._left.add(local_rank, child, events.now())
        if verdict.action == Action.LOST:
            self._lost_code = verdict.exit_code
            say(verdict.reason)

    # Scripts without a session.

    @property
    def _is_protected(self) -> bool:
        return self._has_session or self._view is not None

    def _is_plain(self, exit_code: int) -> bool:
        """Returns whether the end of a rank is treated as in torchrun. A session may not have begun yet; so a rank that
        a signal has killed is replaced alone, if neither a store that is used nor --max-restarts says otherwise."""
        if exit_code == 0 or self._is_protected:
            return False
        return exit_code > 0 or self._told_unprotected or self._settings.max_restarts is not None

    def _tell_unprotected(self) -> None:
        if not self._told_unprotected:
            self._told_unprotected = True
            say(
                f"job {self._job.name} is {UNPROTECTED.format(max_restarts=self._settings.max_restarts or 0)}"
            )
            if self._together is not None:
                self._together.used()

    def _look_after_unprotected(self) -> None:
        """Follows the other machines, as long as no session is known."""
        together = self._together
        if self._is_protected:
            if together is not None:
                together.close()
                self._together = None
            return
        is_used = together is not None and together.is_used
        if not self._told_unprotected and (is_used or self._machines.is_used):
            self._tell_unprotected()
        if together is not None and together.failed:
            self._end({1}, f"{together.failed}: the job is stopped")
        elif together is not None and together.round > self._restarts:
            self._restart("")

    def _restart(self, reason: str) -> None:
        """Stops all ranks, and starts them again; else ends the job. `reason`: a rank of this machine has ended; empty:
        another machine restarts."""
        if reason:
            self._tell_unprotected()
        ranks, self._ranks = list(self._ranks.values()), {}
        self._nursery.stop(ranks, self._grace_s, hurry=lambda: self._gate.pending)
        together, most = self._together, self._settings.max_restarts or 0
        if reason and self._restarts >= most and (together is None or together.round <= self._restarts):
            if together is not None:
                together.fail(reason)
            restarted = f", after {most} restarts" if most else ""
            self._end({1}, f"{reason}: the job is stopped{restarted} (--max-restarts {most})")
            return
        if together is None:
            self._restarts += 1
            with self._gate.raising():
                self._place = self._machines.next_rendezvous()
        else:
            reason = self._restart_together(together, reason)
            if self.outcome is not None:
                return
        if not self._is_protected:
            self._tell_unprotected()
            say(f"{reason}: all ranks are restarted ({self._restarts} of {most})")
        events.emit("restarted", count=self._restarts, reason=reason)
        self._done.clear()
        self._left.clear()
        self._check_all_places()
        for local_rank in range(self._settings.nproc_per_node):
            self._give_rank(local_rank)

    def _restart_together(self, together: Together, reason: str) -> str:
        """Waits until the ranks of all machines have stopped. Returns why they did."""
        if reason:
            together.ask(self._restarts + 1, reason)
        stopped = self._restarts
        while together.store_port is None or together.store_port[0] <= self._restarts:
            if why := together.failed or together.lost:
                self._end({1}, f"{reason or together.reason}; {why}: the job is stopped")
                return ""
            if self._is_protected:
                return reason or together.reason
            if together.round > stopped:
                stopped = together.round
                together.stopped(stopped)
            self._gate.check()
            self._nursery.wait(self._settings.monitor_interval)
        self._restarts, port = together.store_port
        self._place = replace(self._place, master_port=port)
        return together.reason

    def _situation(self, local_rank: int) -> Situation:
        view = self._view
        has_run = self._has_run or has_left_forming(view)  # the View may show it only at this moment
        return Situation(
            replacements_left=self._replacements_left,
            # Without a coordinator it is unknown whether the job ran in between.
            attempts=0 if view is None else self._attempts[local_rank],
            has_run=has_run,
            finished=view is not None and view.state == pb.FINISHED,
            can_return=view is not None and view.HasField("final_version"),
            may_shrink=has_run
            and view is not None
            and (bool(view.taking_part) or view.shrinks or view.shrinks_late),
        )

    def _leave_vacant(self, verdict: Verdict) -> None:
        say(verdict.reason)
        if not self._ranks and not self._done and not self._waiting:
            self._lost_code = 1
            say("no rank is left on this machine: the same command goes on from the newest checkpoint")

    def _replace(self, lost: Child, local_rank: int, reason: str) -> None:
        self._replacements_left -= 1
        # Without a View, it was in generation 1 at the earliest.
        generation = 1 if self._view is None else self._view.generation
        wait_s = delay_s(self._deaths[local_rank])
        if wait_s:
            times = self._deaths[local_rank]
            say(f"{reason}, no. {times} without a new version: replaced in {wait_s:g} s")
        self._last_death = (events.now(), generation)
        self._waiting.add(local_rank, lost, at=events.now() + wait_s, reason=reason, generation=generation)
        self._replace_due()

    def _replace_due(self) -> None:
        for local_rank, waiting in self._waiting.ready():
            self._last_death = (events.now(), waiting.generation)
            try:
                child = self._give_rank(local_rank)
            except StartFailed as error:
                failures = self._waiting.requeue(local_rank, waiting)
                self._leave_empty(local_rank, str(error), failures)
                if self.outcome is not None:
                    return
                continue
            say(f"{waiting.reason}: replaced by process {child.pid} ({child.kind})")

    def _on_unfit(self, local_rank: int, why: str, failures: int) -> None:
        self._link.notify(pb.ExitRequest(rank=self._place.rank(local_rank), unfit=why))
        self._leave_empty(local_rank, f"its place has failed the health check ({why})", failures)

    def _leave_empty(self, local_rank: int, why: str, failures: int) -> None:
        rank = self._place.rank(local_rank)
        verdict = judge_place(f"rank {rank}: {why}", failures, self._situation(local_rank))
        if verdict.action == Action.REPLACE:
            say(verdict.reason)
            self._waiting.put_off(local_rank, events.now() + check_delay_s(failures))
            return
        waiting = self._waiting.drop(local_rank)
        match verdict.action:
            case Action.STOP:
                self._fail(verdict)
            case Action.VACANT:
                self._link.notify(pb.ExitRequest(rank=rank, given_up=True))
                self._vacated.add(local_rank, waiting.lost)
                self._leave_vacant(verdict)
            case _:
                self._lost_code = verdict.exit_code
                say(verdict.reason)

    def _notify(self, child: Child, *, given_up: bool = False) -> None:
        assert child.rank is not None
        if child.exit_code is not None:
            exited = pb.ExitRequest(rank=child.rank, pid=child.pid, exit_code=child.exit_code)
            exited.incarnation, exited.given_up = child.incarnation, given_up
            self._link.notify(exited)

    # The end of the job, and messages of the coordinator.

    def _fail(self, verdict: Verdict) -> None:
        exit_codes = {verdict.exit_code}
        if verdict.exit_code == 1:
            # The rank may only have followed another rank's error, or the job's failure.
            exit_codes |= self._await_ending()
        view = self._view
        if view is not None and view.state == pb.FAILED:
            self._end(exit_codes, f"job failed: {view.reason}", view.exit_code)
            return
        self._end(exit_codes, f"{verdict.reason}: the job is stopped")
        self._link.fail(verdict.reason)

    def _end(self, exit_codes: set[int], line: str, exit_code: int = 0) -> None:
        self._waiting.clear()
        self.outcome = outcome_of(exit_codes, f"swift: {line}", exit_code)

    def _await_ending(self) -> set[int]:
        """Waits for ranks that are about to end. Returns the exit codes of all that have ended by then."""
        deadline = time.monotonic() + SETTLE_S
        exit_codes = self._count_ended()
        while self._ranks and not self._gate.pending and (left_s := deadline - time.monotonic()) > 0:
            self._nursery.wait(left_s)
            exit_codes |= self._count_ended()
        return exit_codes

    def _count_ended(self) -> set[int]:
        exit_codes = set()
        for local_rank, child in list(self._ranks.items()):
            if child.exit_code is not None:
                exit_codes.add(child.exit_code)
                events.emit("child_exit", rank=child.rank, pid=child.pid, code=child.exit_code)
                del self._ranks[local_rank]
        return exit_codes

    @property
    def _view(self) -> pb.View | None:
        """The newest View; None while it shows how the job ended before this launcher came."""
        view = self._link.view
        if view is None:
            return None
        if self._before is None:
            over = view.state in OVER and self._job.run not in view.runs
            self._before = view.generation if over else 0
        return None if view.generation == self._before else view

    def _on_view(self, view: pb.View | None) -> None:
        if view is None or view is self._looked_at or self.outcome is not None:
            return
        self._looked_at = view
        state = state_name(view.state)
        events.emit("view_seen", generation=view.generation, state=state, reason=view.reason)
        if self._known and self._job.run not in view.runs:
            self._end({3}, "the job was started again by another swift-ft run: this one ends")
            return
        self._known = self._job.run in view.runs
        if not view.setbacks:
            self._deaths.clear()
        self._has_run = self._has_run or has_left_forming(view)
        if view.state == pb.FAILED:
            self._end(self._await_ending(), f"job failed: {view.reason}", view.exit_code)
            return
        mine = [self._place.rank(local_rank) for local_rank in range(self._settings.nproc_per_node)]
        for line in self._told.of(view, mine):
            say(line)
        if view.state == pb.RUNNING and self._is_quiet():
            self._attempts.clear()
        if view.state == pb.FINISHED:  # vacant places are not waited for
            ranks = range(self._settings.nproc_per_node)
            self._waiting.leave(place for place in ranks if self._place.rank(place) in view.vacant)
        self._obey_fence({member.incarnation for member in view.fenced}, over=view.state == pb.FINISHED)

    def _check_vacated(self) -> None:
        view = self._view
        for local_rank in () if view is None else self._vacated.missed(view):
            if self.outcome is None:
                self._move(local_rank)

    def _move(self, local_rank: int) -> None:
        """Gives a lost rank a process on the device of a living rank of this machine; else ends the job."""
        rank, hosts = self._place.rank(local_rank), sorted(self._ranks)
        why = room_for_one_more(child.pid for child in self._ranks.values())
        if not why:
            self._host[local_rank] = self._host.get(hosts[0], hosts[0])
            try:
                child, host = self._give_rank(local_rank), self._ranks[hosts[0]]
            except StartFailed as error:
                why = str(error)
        if why:
            reason = (
                f"rank {rank} is lost, the others cannot go on without its stage, and it cannot move: {why}"
            )
            self._fail(Verdict(action=Action.STOP, exit_code=1, reason=reason))
            return
        say(f"rank {rank} moves to the place of rank {host.rank}: process {child.pid}, on the same device")
        events.emit("moved", rank=rank, pid=child.pid, beside=host.rank)

    def _obey_fence(self, fenced: Iterable[str], *, over: bool) -> None:
        for child in self._ranks.values():
            if child.incarnation in fenced:
                events.emit("fenced_kill", rank=child.rank, pid=child.pid)
                say(f"rank {child.rank}: process {child.pid} is fenced: killed")
                child.kill_group()
        for child in self._done.values():
            if child.incarnation in fenced and not over:
                self._fail_without(child)

    def _fail_without(self, child: Child) -> None:
        if self.outcome is None:
            reason = (
                f"rank {child.rank}: exit code 0 before the job was finished (session.stop() ends one early)"
            )
            self._fail(Verdict(action=Action.STOP, exit_code=1, reason=reason))
