"""A job's history: what the coordinator keeps of its generations, also when it is started again."""

from collections.abc import Mapping
from pathlib import Path

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.planner import Plan
from swift_ft_services.coordinator import job_record
from swift_ft_services.coordinator.job_record import JobRow, State
from swift_ft_services.coordinator.store import SqliteStore
from tests.unit.coordinator.driver_world import (
    DEATH,
    FakeClock,
    FakeLogs,
    driver_of,
    join,
    run_to_running,
    view_with,
)


def states(generation: pb.Generation) -> list[tuple[str, float]]:
    return [(pb.State.Name(entry.state), entry.at) for entry in generation.entries]


async def test_generations_are_known_with_their_causes_after_a_restart(
    tmp_path: Path, logs: FakeLogs, clock: FakeClock
) -> None:
    store = SqliteStore(tmp_path / "coordinator.sqlite")
    await store.hold()
    driver = await driver_of(logs, store, (), wall_clock=clock)
    await run_to_running(driver)
    clock.now = 200.0
    await driver.apply("j", DEATH)
    await view_with(driver, lambda view: view.state == pb.FENCING)
    driver.stop()
    await store.close()

    clock.now = 300.0
    store = SqliteStore(tmp_path / "coordinator.sqlite")
    await store.hold()
    driver = await driver_of(logs, store, (), wall_clock=clock)
    await driver.join("j", join(incarnation="b"))
    await driver.apply("j", pb.FailRequest(reason="no more", rank=0, incarnation="b"))
    first, second = (await driver.status("j", with_history=True)).history
    assert not (await driver.status("j")).history, "who watches does not get it every time"
    assert states(first) == [("FORMING", 100.0), ("RUNNING", 100.0)]
    assert states(second)[0] == ("FENCING", 200.0)
    assert states(second)[-1] == ("FAILED", 300.0)
    assert second.number == 2
    assert second.entries[0].reason == "rank 0 was killed by signal 9"
    assert "no more" in second.entries[-1].reason
    driver.stop()
    await store.close()


def row_of(generation: int, state: State, reason: str = "a cause") -> JobRow:
    row = JobRow(job="j", world_size=1, config={}, fingerprint={}, log_servers=[])
    row.generation, row.state, row.reason = generation, state, reason
    row.plan = Plan(target_version=1, ranks=(), collective_source=-1, reason=reason)
    return row


def read(rows: Mapping[str, str]) -> list[pb.Generation]:
    return job_record.read_history("j", dict(sorted(rows.items())))


def test_the_newest_generations_are_kept_and_fit_into_a_message() -> None:
    """gRPC's clients accept 4 MiB."""
    rows: dict[str, str] = {}
    last, longest = job_record.GENERATIONS_MAX + 2, "\U0001f600" * (2 * job_record.WORDS_MAX)
    entered = (State.FENCING, State.PLANNING, State.RECOVERING, State.RUNNING, State.FAILED)
    for generation in range(1, last + 1):
        for state in entered:
            row = row_of(generation, state, longest)
            rows |= job_record.history_entry(row, 1.0)
            for key in job_record.forgotten_history(row):
                rows.pop(key, None)
    known = read(rows)
    assert [generation.number for generation in known] == list(range(3, last + 1))
    assert [pb.State.Name(entry.state) for entry in known[-1].entries] == list(map(str, entered))
    assert 2 << 20 < pb.StatusReply(history=known).ByteSize() < 7 << 19


def test_a_damaged_entry_is_left_out() -> None:
    rows: dict[str, str] = {}
    for state, at in ((State.FORMING, 1.0), (State.RUNNING, 2.0)):
        rows |= job_record.history_entry(row_of(1, state), at)
    (generation,) = read({key: value.replace("1.0", "9.0") for key, value in rows.items()})
    assert states(generation) == [("RUNNING", 2.0)]
