"""Deliberately broken cores: each is caught, and by the checker whose promise it breaks.

A simulation that never fails says nothing. Each test breaks one rule of the product, as a bug would, and runs seeds
until a checker objects.
"""

import importlib
from collections import Counter, deque
from collections.abc import Collection, Generator, Iterator, Mapping
from dataclasses import replace

import pytest

from swift_ft._pb import log_pb2
from swift_ft.log import record
from swift_ft.log.frame import FrameHeader
from swift_ft.log.protocol import Fsync
from swift_ft.log.record import MARK_SLOT, Steps, Unlogged
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator import log_placement
from swift_ft_services.coordinator.job import Job
from swift_ft_services.coordinator.job_record import JobRow
from swift_ft_services.coordinator.log_placement import Call, Places
from swift_ft_services.logserver import procedures
from swift_ft_services.logserver.append_session import Appends, Commits, Gathered, Queued
from swift_ft_services.logserver.core import IndexEntry, JobState, LogCore, Refusal, StreamState
from swift_ft_services.logserver.procedures import Save, Step
from swift_ft_services.logserver.shared_memory import SharedBody
from swift_ft_services.logserver.state import AppendCall, ServerState
from swift_ft_services.logserver.storage import DirectoryStorage
from swift_ft_services.logserver.storage_interface import RecoveredJob, Write
from tests.sim import control, faults, world
from tests.sim.control import SharedStore
from tests.sim.run import run_seed

SEEDS_MAX = 1200


@pytest.fixture(autouse=True)
def faults_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `only` and `operated` choose ends with the test."""
    monkeypatch.setattr(faults, "WEIGHTS", faults.WEIGHTS)
    monkeypatch.setattr(world, "OPERATED", world.OPERATED)
    monkeypatch.setattr(world, "DROPPING", world.DROPPING)


def only(*names: str) -> None:
    """These faults alone, so that few seeds do."""
    assert set(names) <= {name for name, _ in faults.FAULTS}
    faults.WEIGHTS = [int(name in names) for name, _ in faults.FAULTS]


def operated(*names: str) -> None:
    """Worlds with operators, and these faults beside."""
    world.OPERATED = 1.0
    only(*names)


@pytest.fixture
def mutation() -> Iterator[pytest.MonkeyPatch]:
    """What breaks the product; the faults are chosen by another, and stay for the control run."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def is_caught(mutation: pytest.MonkeyPatch, checker: str) -> None:
    """This checker objects in some seed, and nobody does in the same seed once the mutation is undone."""
    others = Counter[str]()
    for seed in range(SEEDS_MAX):
        outcome = run_seed(seed)
        if outcome.checker == checker:
            assert outcome.trace
            mutation.undo()
            control = run_seed(seed)
            assert not control.violation, f"seed {seed} fails without the mutation too: {control.violation}"
            return
        others[outcome.checker] += bool(outcome.violation)
    pytest.fail(f"{checker!r} never objects; others: {+others}")


PAUSED = ("a rank killed", "a log server paused")
CUT_OFF = ("a rank cut off from a log server", "a log server paused")
PLAN = importlib.import_module("swift_ft.planner.plan")
OF_ONE_LINE: dict[str, tuple[str, Collection[str], object, str, object]] = {
    "an acknowledgement before the sync": ("acked", (), DirectoryStorage, "_sync", lambda self: None),
    "a call that is over and still counts as a writer": (
        *("limit", ["a connection broken"], Appends, "detach"),
        lambda self, session: None,
    ),
    "a trim that goes too far": (
        *("trim", (), LogCore, "begin_trim"),
        lambda self, job, below, real=LogCore.begin_trim: real(self, job, below + 1 if below else 0),
    ),
    "a recovery that finds nothing": (
        *("acked", ["a log server killed"], DirectoryStorage, "recover"),
        lambda self: [],
    ),
    "a declaration that is lost": ("declared", CUT_OFF, Unlogged, "due", lambda self, stream: None),
    "a declaration that names one step of several": (
        *("declared", CUT_OFF, record, "mark"),
        lambda steps, real=record.mark: real(Steps(steps.last, steps.last)),
    ),
    "a planner that does not look at declarations": (
        *("gap", PAUSED, PLAN, "_unlogged"),
        lambda summary, first, last: "",
    ),
    "an inventory that forgets declarations": ("gap", PAUSED, StreamState, "unlogged", None),
}
"""What is wrong -> (who objects, under which faults alone or all, where it is, its name, what stands there instead)"""


@pytest.mark.parametrize("wrong", OF_ONE_LINE)
def test_a_mutation_of_one_line(wrong: str, mutation: pytest.MonkeyPatch) -> None:
    checker, names, owner, name, instead = OF_ONE_LINE[wrong]
    if names:
        only(*names)
    mutation.setattr(owner, name, instead)
    is_caught(mutation, checker)


@pytest.mark.timeout(400)
def test_a_fence_that_is_answered_before_it_is_durable(mutation: pytest.MonkeyPatch) -> None:
    real = procedures.fence

    def fence(
        state: ServerState, job: str, generation: int, now: float, *, held: bool
    ) -> Generator[Step, None, None]:
        for step in real(state, job, generation, now, held=held):
            if not (isinstance(step, Save) and generation > 1):
                yield step

    gone = ("a rank paused", "a rank cut off from the coordinator")
    only(*gone, "a log server killed", "a log server without power")
    mutation.setattr(procedures, "fence", fence)
    is_caught(mutation, "writer")


def test_an_acknowledgement_before_the_write(mutation: pytest.MonkeyPatch) -> None:
    real = Commits.put

    def put(self: Commits, session: AppendCall, stream: StreamState, write: Write, fsync: Fsync) -> None:
        real(self, session, stream, write, fsync)
        durable = stream.durable
        stream.durable = write.sequence + 1
        self._acknowledge([Queued(session, stream, write, fsync)])
        stream.durable = durable

    mutation.setattr(Commits, "put", put)
    is_caught(mutation, "acked")


def test_a_body_in_memory_that_is_not_verified(mutation: pytest.MonkeyPatch) -> None:
    def copy(self: SharedBody, begin: int, buffer: memoryview) -> None:
        self.memory.read_into(self.offset + begin, buffer)

    mutation.setattr(SharedBody, "copy", copy)
    is_caught(mutation, "acked")


def test_credit_that_is_lost_when_replies_go_out_together(mutation: pytest.MonkeyPatch) -> None:
    real = Gathered.add

    def add(self: Gathered, reply: log_pb2.AppendReply) -> None:
        self._credit_bytes = 0
        real(self, reply)

    mutation.setattr(Gathered, "add", add)
    is_caught(mutation, "credit")


def test_a_trim_without_a_complete_checkpoint(mutation: pytest.MonkeyPatch) -> None:
    def trims_early(self: Job) -> list[m.Effect]:
        if not self.row.shards:
            return []
        return [m.TrimLogs(generation=self.row.generation, below_step=max(self.row.shards))]

    real = Job._checkpoint
    mutation.setattr(Job, "_checkpoint", lambda self, durable: [*real(self, durable), *trims_early(self)])
    is_caught(mutation, "trim")


def test_a_key_that_is_taken_under_a_second_sequence(mutation: pytest.MonkeyPatch) -> None:
    real = LogCore.append

    def append(
        self: LogCore, stream: StreamState, generation: int, frame: FrameHeader
    ) -> IndexEntry | Refusal | None:
        stream.by_key.pop(frame.key, None)
        return real(self, stream, generation, frame)

    only("a rank killed")
    mutation.setattr(LogCore, "append", append)
    is_caught(mutation, "unique")


def test_a_stale_generation_that_is_taken(mutation: pytest.MonkeyPatch) -> None:
    real = LogCore.check_generation

    def check_generation(self: LogCore, job: JobState, generation: int) -> None:
        if generation >= job.generation:
            real(self, job, generation)

    only("a rank cut off from the coordinator")
    mutation.setattr(LogCore, "check_generation", check_generation)
    is_caught(mutation, "writer")


def test_a_recovery_that_forgets_a_hole(mutation: pytest.MonkeyPatch) -> None:
    real = Appends.take_over

    def take_over(self: Appends, recovered: RecoveredJob, now: float) -> None:
        for found in recovered.streams:
            found.holes.clear()
        real(self, recovered, now)

    only("a rank killed", "a byte rotten", "a log server killed")
    mutation.setattr(Appends, "take_over", take_over)
    is_caught(mutation, "acked")


def test_a_lost_server_that_is_waited_for(mutation: pytest.MonkeyPatch) -> None:
    real = Places.lose

    def lose(self: Places, lost: Mapping[int, str]) -> dict[int, str]:
        words = real(self, lost)
        for number in lost:
            self._replace(number, lost="")
        return words

    mutation.setattr(Places, "lose", lose)
    is_caught(mutation, "live")


def test_a_reset_that_comes_late_and_drops_again(mutation: pytest.MonkeyPatch) -> None:
    real = procedures.reset

    def reset(state: ServerState, job: str, generation: int, number: int) -> Generator[Step, None, None]:
        state.core.job(job).reset_generation = 0
        return real(state, job, generation, number)

    only("two ranks killed")
    mutation.setattr(procedures, "reset", reset)
    is_caught(mutation, "reset")


def test_a_second_reset_of_a_generation_that_is_taken_for_the_first(mutation: pytest.MonkeyPatch) -> None:
    real = procedures.reset

    def reset(state: ServerState, job: str, generation: int, number: int) -> Generator[Step, None, None]:
        if state.core.known(job).reset_generation != generation:
            yield from real(state, job, generation, number)

    operated("two ranks killed")
    mutation.setattr(procedures, "reset", reset)
    is_caught(mutation, "reset")


def test_a_new_server_that_is_not_emptied(mutation: pytest.MonkeyPatch) -> None:
    real = log_placement.to_fence

    def to_fence(row: JobRow, places: Places) -> dict[str, tuple[Call, ...]]:
        return {address: calls[:1] for address, calls in real(row, places).items()}

    operated("a rank killed")
    mutation.setattr(log_placement, "to_fence", to_fence)
    is_caught(mutation, "emptied")


def test_a_server_that_came_back_empty_and_still_counts_as_whole(mutation: pytest.MonkeyPatch) -> None:
    real = Places.mark_whole_from

    def mark_whole_from(self: Places, version: int) -> str:
        for rank, logs in self._row.placement.items():
            copies = tuple(replace(copy, whole_from=copy.whole_from or 0) for copy in logs.copies)
            self._row.placement[rank] = replace(logs, copies=copies)
        return real(self, version)

    operated("a rank killed")
    mutation.setattr(Places, "mark_whole_from", mark_whole_from)
    is_caught(mutation, "whole")


def test_an_empty_server_that_nobody_notices(mutation: pytest.MonkeyPatch) -> None:
    """Its writers wait for a generation that it never grants."""
    operated("a rank killed")
    mutation.setattr(Job, "_log_lost", lambda job, lost, now: [])
    is_caught(mutation, "live")


def test_a_recovery_that_forgets_a_stream(mutation: pytest.MonkeyPatch) -> None:
    real = Appends.take_over

    def take_over(self: Appends, recovered: RecoveredJob, now: float) -> None:
        recovered.state.streams.pop(next(iter(recovered.state.streams), ""), None)
        real(self, recovered, now)

    only("a log server killed")
    mutation.setattr(Appends, "take_over", take_over)
    is_caught(mutation, "acked")


@pytest.mark.parametrize("too_early", ["a step more than it says", "a declaration"])
def test_a_trim_that_drops_too_early(too_early: str, mutation: pytest.MonkeyPatch) -> None:
    real = LogCore.end_trim

    def is_wrong(entry: IndexEntry, job: JobState) -> bool:
        if too_early == "a declaration":
            return entry.key.slot == MARK_SLOT
        return entry.key.step == job.trimmed_below_step

    def end_trim(self: LogCore, job: JobState, stream: StreamState) -> bool:
        changed = real(self, job, stream)
        for entry in list(stream.by_sequence.values()) if changed else ():
            if is_wrong(entry, job):
                stream.remove(entry)
        return changed

    if too_early == "a declaration":
        world.DROPPING = 1.0
        only(*PAUSED)
    mutation.setattr(LogCore, "end_trim", end_trim)
    is_caught(mutation, "acked")


TAKEN_OVER = ("the coordinator taken over by another one", "a rank killed")


def test_a_holder_that_commits_without_comparing_its_lease(mutation: pytest.MonkeyPatch) -> None:
    real = SharedStore.commit

    def commit(self: SharedStore, by: object, puts: Mapping[str, str], deletes: Collection[str]) -> bool:
        return real(self, self._holder, puts, deletes)

    only(*TAKEN_OVER)
    mutation.setattr(SharedStore, "commit", commit)
    is_caught(mutation, "generation")


def test_a_coordinator_that_takes_over_from_a_stale_read(mutation: pytest.MonkeyPatch) -> None:
    real, before = SharedStore.commit, deque[dict[str, str]](maxlen=8)

    def commit(self: SharedStore, by: object, puts: Mapping[str, str], deletes: Collection[str]) -> bool:
        before.append(dict(self.rows))
        return real(self, by, puts, deletes)

    def hold(self: SharedStore, by: object) -> dict[str, str]:
        if not self.rows:
            before.clear()
        self._holder = by
        return dict(before[0]) if before else {}

    only(*TAKEN_OVER)
    mutation.setattr(SharedStore, "commit", commit)
    mutation.setattr(SharedStore, "hold", hold)
    is_caught(mutation, "generation")


def test_a_generation_that_is_used_again_after_a_takeover(mutation: pytest.MonkeyPatch) -> None:
    real = control.decode

    def decode(job: str, parts: Mapping[str, str]) -> JobRow:
        row = real(job, parts)
        row.generation = max(1, row.generation - 1)
        return row

    only(*TAKEN_OVER)
    mutation.setattr(control, "decode", decode)
    is_caught(mutation, "generation")
