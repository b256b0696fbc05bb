"""``swift-ft run --failures FILE|SPEC``: validates the failures before anything starts, and reports them after the run.

    (command) ``schedule_of`` → ``planned`` → ``around`` the run

Invalid requests are refused in one line (exit code 2): a malformed specification, a rank that does not exist, a
service on another machine, a report that cannot be written.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

from swift_ft import events, fault_grammar
from swift_ft.errors import AccessDenied, SwiftError, UsageError
from swift_ft.fault_grammar import (
    CoordinatorFault,
    CorruptCheckpointFault,
    CorruptCopyFault,
    CorruptFault,
    Fault,
    LogLossFault,
    LogServerFault,
    RankFault,
    fault_id,
)
from swift_ft.files import make_directory, write_whole
from swift_ft.lab.failures import damage, report, schedule, services
from swift_ft.lab.failures.damage import HeldVictims
from swift_ft.lab.failures.schedule import Schedule
from swift_ft.lab.failures.services import service_at
from swift_ft.launch.decisions import Outcome
from swift_ft.launch.ranks import RankProgram, make_run_dir
from swift_ft.text import scheme_of, tell

if TYPE_CHECKING:
    from swift_ft._pb import coordinator_pb2 as pb
    from swift_ft.coordinator_client import CoordinatorClient
    from swift_ft.launch.ranks import LaunchSettings


# Injects the failures that a rank cannot do to itself, on threads of the launcher parallel to its loop.
#
#     (rank)     reaches its coordinates: writes ``<id>.reached``, waits for ``<id>.go`` (`swift_ft.train.fault_points`)
#     (injector) injects the failure and writes ``<id>.go``; injects failures with a time, or with a step of any rank,
#                when that has come; ends the failures that last
#     (asker)    polls the coordinator for suspicions while a detection is possible, and writes them into the trace; a
#                thread of its own, because it may block on the answer
#
# Ranks and their processes are known from the launcher's own events, everything else from the trace of the run.
# psutil signals no other process that has got the pid of one that is gone.

TURN_S = 0.01
ASK_S = 0.25
TOGETHER_S = 2.0
"""Longest time that the victims of one step wait for each other."""
HOLD_S = 10.0
"""Longest time that a victim waits for data to damage; shorter than the ranks' own timeout."""
WATCHED_S = 120.0
"""Seconds after an injection in which the coordinator is polled for its detection."""
SLICE_S = 0.005
"""Time slice in which a slowed process runs between two stops."""
PATIENCE_S = 1.0
"""Timeout of a coordinator call. A coordinator that does not answer in time counts as detected."""
SILENT_S = 2.0
"""Silence of a log server after which its failure counts as detected."""

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Injector:
    """Injects the failures of a run: ``with Injector(plan) as injector``. Leaving the block ends every failure, also
    after an error: stopped processes continue."""

    def __init__(self, plan: "Planned") -> None:
        self._plan = plan
        self._faults = dict(enumerate(plan.schedule.faults))
        self._held = HeldVictims(plan.fault_directory, plan.schedule.faults)
        self._processes: dict[int, psutil.Process] = {}
        """Rank -> its current process, for ranks of this launcher."""
        self._local: set[int] = set()
        """Ranks that this launcher has started."""
        self._lock = threading.Lock()
        """Guards `_processes` and every signal to one of them: the launcher's thread reports ends concurrently."""
        self._done: set[int] = set()
        self._ends: dict[int, tuple[float, Callable[[], None]]] = {}
        """Failure index -> (time when it is over, function that ends it)."""
        self._damage_since: dict[int, float] = {}
        self._step = -1
        self._replayed = False
        self._injected_at = float("-inf")
        self._said: set[tuple[Any, ...]] = set()
        self._again: list[subprocess.Popen[bytes]] = []
        self._client: CoordinatorClient | None = None
        self._client_lock = threading.Lock()
        self._tail = events.Tail(plan.trace)
        self._began_at = events.now()
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"swift-failures-{name}", daemon=True)
            for name, work in (("inject", self._run), ("ask", self._ask_again))
        ]
        self.began: float = self._began_at
        """Event clock when the first rank was started."""
        self._rank_started = False
        self.why_not: dict[str, str] = {}
        """id -> reason why a failure could not be injected."""

    def __enter__(self) -> Self:
        self._end_listening = events.listen(self._track_processes)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._end_listening()
        for index in list(self._ends):
            self._end(index)
        for index, fault in self._faults.items():
            if isinstance(fault, RankFault) and fault.rank not in self._local:
                self.why_not[fault_id(index)] = (
                    f"rank {fault.rank} is another launcher's, whose report has it"
                )
        if self._client is not None:
            self._client.close()

    def trace(self) -> list[dict[str, Any]]:
        return [event for event in events.read(self._plan.trace) if event["t"] >= self._began_at]

    # --- events ---

    def _track_processes(self, event: str, fields: Mapping[str, Any]) -> None:
        """(any thread of the launcher) Tracks the ranks' processes from the launcher's events."""
        if event == "spare_assigned":
            with contextlib.suppress(psutil.Error), self._lock:
                if not self._rank_started:
                    self._rank_started, self.began = True, events.now()
                self._local.add(fields["rank"])
                self._processes[fields["rank"]] = psutil.Process(fields["pid"])
        elif event == "child_exit":
            with self._lock:
                self._processes.pop(fields["rank"], None)

    def _see(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "step_begin" if not event.get("replay"):
                self._step = max(self._step, int(event["step"]))
            case "replay_begin":
                self._replayed = True
            case "fault":  # injected by the rank itself
                self._injected_at = events.now()
                index = self._index_of(event)
                fault = self._faults.get(index)
                if isinstance(fault, RankFault) and fault.kind == "stop" and fault.at_s is None:
                    self._done.add(index)
                    self._lasts(
                        index, fault.for_s, lambda: self._signal(fault.rank, signal.SIGCONT, event["pid"])
                    )

    def _index_of(self, event: Mapping[str, Any]) -> int:
        return next((n for n in self._faults if fault_id(n) == event.get("id")), -1)

    # --- the loop ---

    def _run(self) -> None:
        while not self._over.wait(TURN_S):
            for event in self._tail.read():
                if event["t"] >= self._began_at:
                    self._see(event)
            for index, fault in self._faults.items():
                if index not in self._done:
                    self._try(index, fault)
            self._held.turn(self._done, self._patience_s)
            for index, (at, _) in list(self._ends.items()):
                if events.now() >= at:
                    self._end(index)
            for process in self._again:
                process.poll()

    def _try(self, index: int, fault: Fault) -> None:
        try:
            if self._due(index, fault):
                self._inject(index, fault)
        except (SwiftError, OSError) as error:
            self.why_not[fault_id(index)] = " ".join(str(error).split())
            tell(f"failures: {fault}: {self.why_not[fault_id(index)]}")
            self._done.add(index)
            self._held.release(index)

    def _due(self, index: int, fault: Fault) -> bool:
        step, at_s = getattr(fault, "step", None), getattr(fault, "at_s", None)
        if at_s is not None:
            return self._rank_started and events.now() >= self.began + at_s
        match fault:
            case RankFault(kind=kind):
                return kind not in fault_grammar.IN_THE_RANK and self._held.reached(index)
            case LogLossFault(step=None):
                return self._replayed
            case LogServerFault() | LogLossFault() | CoordinatorFault():
                return step is not None and self._step >= step
            case CorruptFault() | CorruptCheckpointFault():
                victims = [n for group in self._held.groups for n in group if self._faults[n].step == step]  # type: ignore[union-attr]
                return any(map(self._held.reached, victims)) if victims else self._step >= fault.step
        return False

    def _inject(self, index: int, fault: Fault) -> None:
        """Injects the failure. Raises SwiftError or OSError if that is impossible."""
        match fault:
            case RankFault():
                self._hurt_rank(index, fault)
            case LogServerFault():
                self._kill(index, self._log_server(0), fault.for_s or 0.0)
            case LogLossFault(server=server):
                self._kill(index, self._log_server(server), None)
            case CoordinatorFault():
                self._kill(index, self._plan.job.coordinator, fault.for_s or 0.0)
            case CorruptFault() | CorruptCheckpointFault():
                self._corrupt(index, fault)

    def _hurt_rank(self, index: int, fault: RankFault) -> None:
        about = {"rank": fault.rank, "kind": fault.kind}
        if fault.step is not None:
            about |= {"step": fault.step, "phase": fault.phase}
        with self._lock:
            process = self._processes.get(fault.rank)
            if process is None:  # on another machine; or being replaced: then the next process is hit
                return
            pid = process.pid
            self._emit_injected("fault", index, pid=pid, **about)
            if fault.kind in _SIGNALS:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(_SIGNALS[fault.kind])
        match fault.kind:
            case "stop":
                self._lasts(index, fault.for_s, lambda: self._signal(fault.rank, signal.SIGCONT, pid))
            case "slow":
                self._lasts(index, fault.for_s, self._slow(fault, pid))
        self._held.release(index)

    def _signal(self, rank: int, signum: signal.Signals, pid: int) -> None:
        """Signals the rank's process; does not if `pid` has been replaced by another process."""
        with self._lock:
            process = self._processes.get(rank)
            if process is not None and process.pid == pid:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signum)

    def _slow(self, fault: RankFault, pid: int) -> Callable[[], None]:
        """Slows the process down from now on, by stopping it periodically. Returns a function that ends this."""
        over = threading.Event()

        def take_turns() -> None:
            while not over.wait(SLICE_S):
                self._signal(fault.rank, signal.SIGSTOP, pid)
                over.wait(SLICE_S * (fault.factor - 1.0))
                self._signal(fault.rank, signal.SIGCONT, pid)

        thread = threading.Thread(target=take_turns, name=f"swift-slow-{fault.rank}", daemon=True)
        thread.start()

        def end() -> None:
            over.set()
            thread.join()

        return end

    # --- services and files ---

    def _log_server(self, number: int) -> str:
        """Returns the address of a log server. Raises ServiceError; UsageError if there is no server of that number."""
        view = self._status().view
        addresses = [place.address for place in view.log_places] or list(view.log_servers)
        if number >= len(addresses):
            raise UsageError(f"log must be 0 to {len(addresses) - 1}: so many log servers the job has")
        return addresses[number]

    def _kill(self, index: int, address: str, down_s: float | None) -> None:
        """Kills the service at `address`. It is started again after `down_s` seconds; with None never."""
        service = service_at(address)
        self._emit_injected("service_killed", index, address=address, pid=service.pid)
        service.kill()

        def start_again() -> None:
            with contextlib.closing(service):
                self._again.append(service.start_again())

        if down_s is None:
            service.close()
        else:
            self._lasts(index, down_s, start_again)

    def _corrupt(self, index: int, fault: CorruptFault | CorruptCheckpointFault) -> None:
        """Damages the data as soon as there is any. Raises UsageError if there is none for `HOLD_S`."""
        since = self._damage_since.setdefault(index, time.monotonic())
        if isinstance(fault, CorruptCheckpointFault):
            saved = self._status().view.checkpoints
            place = Path(self._plan.job.checkpoint_dir or "", self._plan.job.name)
            flipped = damage.corrupt_checkpoint(place, fault.rank, saved[-1], seed=index) if saved else None
        else:
            directories = [service_at(address).data for address in self._status().view.log_servers]
            flipped = damage.corrupt_stream(directories, fault.stream, fault.step, seed=index)
        if flipped is not None:
            self._emit_injected("corrupted", index, **flipped)
        elif time.monotonic() - since > HOLD_S:
            raise UsageError("there is nothing that could be damaged")

    # --- lasting failures, and held victims ---

    def _emit_injected(self, event: str, index: int, **fields: Any) -> None:
        self._done.add(index)
        self._injected_at = events.now()
        events.emit(event, id=fault_id(index), **fields)

    def _lasts(self, index: int, for_s: float | None, end: Callable[[], None]) -> None:
        self._ends[index] = (float("inf") if for_s is None else events.now() + for_s, end)

    def _end(self, index: int) -> None:
        at, end = self._ends.pop(index)
        try:
            end()
        except OSError as error:
            tell(f"failures: {self._faults[index]}: it cannot be ended: {error}")
        if at < float("inf"):
            events.emit("fault_over", id=fault_id(index))

    def _patience_s(self, group: list[int], there: list[int]) -> float:
        """Returns how long victims wait for the others of their step: not for those of other launchers."""
        with self._lock:
            here = {n for n in group if getattr(self._faults[n], "rank", None) in self._processes}
        return 0.0 if here <= set(there) else TOGETHER_S

    # --- detection ---

    def _status(self) -> "pb.StatusReply":
        """Queries the coordinator's status. Raises ServiceError or UsageError."""
        from swift_ft.coordinator_client import CoordinatorClient

        with self._client_lock:
            if self._client is None:
                job = self._plan.job
                self._client = CoordinatorClient(job.coordinator, job.name, patience_s=PATIENCE_S)
        return self._client.status()

    def _ask_again(self) -> None:
        while not self._over.wait(ASK_S):
            if events.now() - self._injected_at <= WATCHED_S:
                self._ask()

    def _ask(self) -> None:
        try:
            status = self._status()
        except (UsageError, AccessDenied):  # no such job, or no permission
            return
        except SwiftError as error:
            self._note("coordinator_unanswered", reason=" ".join(str(error).split()))
            return
        for suspicion in status.suspicions:
            self._note("suspicion_seen", rank=suspicion.rank, told=suspicion.told)
        for server in status.log_servers:
            if server.silent_s > SILENT_S:
                self._note("log_silent_seen", address=server.address)

    def _note(self, event: str, **fields: Any) -> None:
        """Emits an event, at most once for each failure."""
        key = (event, self._injected_at, *(value for name, value in fields.items() if name != "reason"))
        if key not in self._said:
            self._said.add(key)
            events.emit(event, **fields)


FLAG = "--failures"
REPORT = "failures.json"
_TOLD_BYTES_MAX = 120_000
"""Limit of the environment variable for ranks. Linux allows 128 KiB for one variable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Checked failures of this launcher's run."""

    schedule: Schedule
    run_dir: Path
    job: RankProgram

    @property
    def fault_directory(self) -> Path:
        return self.run_dir / "failures"

    @property
    def trace(self) -> Path:
        return Path(os.environ[events.ENV_EVENTS_DIR])


def schedule_of(args: argparse.Namespace, config: "LaunchSettings") -> Schedule:
    """Reads and checks the value of ``--failures``. Raises UsageError."""
    ranks, machines = config.nproc_per_node * config.max_nodes, config.max_nodes
    found = schedule.schedule_of(
        args.failures, ranks, per_host=config.nproc_per_node if machines > 1 else 1, flag=f"run: {FLAG}"
    )
    _check(found, args, alone=machines == 1)
    return found


def _check(found: Schedule, args: argparse.Namespace, *, alone: bool) -> None:
    """Raises UsageError, in one line, for a failure that this run cannot inject."""
    flag = f"run: {FLAG}"
    for fault in found.faults:
        match fault:
            case RankFault(kind="hang" | "device", at_s=float()):
                raise UsageError(f"{flag} {fault}: the rank does it at a place in a step: give step=N")
            case CoordinatorFault(state=state) if state:
                raise UsageError(
                    f"{flag} {fault}: a state is known to the coordinator alone: give step=N (or use swift-ft drill)"
                )
            case CoordinatorFault() if alone:
                services.service_at(args.coordinator, f"{flag} {fault}: ").close()
            case CorruptFault(stream=""):
                raise UsageError(f"{flag} {fault}: name the stream (stream=s1.F)")
            case CorruptCheckpointFault() if args.checkpoint_dir is None or scheme_of(args.checkpoint_dir):
                raise UsageError(f"{flag} {fault}: give --checkpoint-dir, a directory")


def planned(found: Schedule, run_dir: Path | None, log_dir: str | None, job: RankProgram) -> Planned:
    """Creates the directories and a first report. Raises UsageError if that cannot be written."""
    told = _for_ranks(found)
    made = make_run_dir(log_dir, job.name) if run_dir is None else run_dir
    plan = Planned(schedule=found, run_dir=made, job=job)
    try:
        plan.fault_directory.mkdir(mode=0o700)
        if not os.environ.get(events.ENV_EVENTS_DIR):
            os.environ[events.ENV_EVENTS_DIR] = str(made / "events")
        make_directory(plan.trace)
        _write(plan, report.as_json(report.outcomes(found.faults, [], 0.0, {}), **_about(plan)))
    except OSError as error:
        raise UsageError(
            f"run: --log-dir {made}: {error.strerror}: name a directory with space for the report of {FLAG}"
        ) from None
    os.environ[fault_grammar.ENV_FAULTS_DIR] = str(plan.fault_directory)
    os.environ[fault_grammar.ENV_FAULTS] = told
    return plan


def _for_ranks(found: Schedule) -> str:
    held = {index for group in fault_grammar.held_together(found.faults) for index in group}
    told = []
    for index, fault in enumerate(found.faults):
        if isinstance(fault, RankFault | CorruptCopyFault) and getattr(fault, "at_s", None) is None:
            told.append(fault_grammar.item(fault, fault_id(index), hold=index in held))
    text = json.dumps(told)
    if len(text) > _TOLD_BYTES_MAX:
        raise UsageError(
            f"run: {FLAG}: ranks can be told no more than {_TOLD_BYTES_MAX} bytes: give fewer failures"
        )
    return text


def around(plan: Planned, run: Callable[[], Outcome]) -> Outcome:
    with Injector(plan) as injector:
        outcome = run()
    found = report.outcomes(plan.schedule.faults, injector.trace(), injector.began, injector.why_not)
    content = report.as_json(found, **_about(plan), exit_code=outcome.exit_code)
    for line in report.lines(content):
        tell(line)
    try:
        path = _write(plan, content)
    except OSError as error:
        tell(f"run: {plan.run_dir / REPORT}: {error.strerror}: free space there, or name another --log-dir")
        return replace(outcome, exit_code=outcome.exit_code or UsageError.exit_code)
    tell(f"failures: the report is {path}; the same failures again: {FLAG} {shlex.quote(str(path))}")
    return outcome


def _about(plan: Planned) -> dict[str, object]:
    return {
        "job": plan.job.name,
        "command": f"swift-ft run {shlex.join(sys.argv[1:])}",
        "given": plan.schedule.given.splitlines(),
    }


def _write(plan: Planned, content: dict[str, object]) -> Path:
    path = plan.run_dir / REPORT
    write_whole(path, json.dumps(content, indent=1) + "\n")
    return path
