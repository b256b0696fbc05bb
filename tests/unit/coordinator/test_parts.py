"""The small parts: rows, timeouts, step times, what log servers say."""

from dataclasses import replace

import pytest

from swift_ft._pb.log_pb2 import StreamInventory
from swift_ft.log import admin
from swift_ft.planner import HeldSnapshot, Help, Plan, RankPlan, Refusals, Report, Strategy, StreamSummary
from swift_ft_services.coordinator.job_record import (
    Changes,
    Holder,
    JobRow,
    LogServer,
    State,
    Table,
    decode,
    key_of,
    row_key,
    sealed,
)
from swift_ft_services.coordinator.liveness import StepClock, Suspicions
from swift_ft_services.coordinator.log_calls import LogServers
from swift_ft_services.coordinator.timeouts import Timing, usual_log_lost_s
from tests.unit.coordinator.rows import copy_of, encode


def row() -> JobRow:
    holder = Holder(rank=1, incarnation="i", pid=3, host="h", since_generation=2, gone=True)
    return JobRow(
        job="j",
        world_size=2,
        config={"seed": "7"},
        fingerprint={},
        log_servers=[LogServer(address="l:1")],
        state=State.RECOVERING,
        generation=3,
        holders={1: holder},
        fenced=Table({0: holder}),
        num_stages=2,
        stages={0: [0], 1: [1]},
        stage_shards={0: 0, 1: 2},
        reports={
            0: Report(rank=0, version=None, undo_to=4, undo_exact=True, forward_to=5, since_generation=3),
            1: Report(
                rank=1, version=5, host="h", can_help=True, snapshots=(HeldSnapshot(0, 4), HeldSnapshot(1, 4))
            ),
        },
        ready={1: 5},
        plan=Plan(
            target_version=5,
            ranks=(
                RankPlan(rank=0, strategy=Strategy.REPLAY, from_version=0, reason="why"),
                RankPlan(rank=1, strategy=Strategy.KEEP, from_version=5, reason=""),
                RankPlan(rank=2, strategy=Strategy.REPLICA, from_version=5, reason="", sources=(1, 0)),
            ),
            exact=False,
            collective_source=1,
            reason="because",
            help=(
                Help(owner=0, helpers=(1, 2), until=4),
                Help(owner=3, helpers=(4,), until=4),
            ),
        ),
        refused=Refusals(help=True).and_of([Strategy.UNDO], "it cannot"),
        distrusted=[1],
        checkpoints=[0],
        shards={10: frozenset({0})},
    )


def test_a_row_is_the_same_after_it_was_stored() -> None:
    assert copy_of(row()) == row()
    assert encode(copy_of(row())) == encode(row())


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("row", {"format": 1, "revision": 0}, "another version"),
        ("state", "DREAMING", "DREAMING"),
        ("colour", "red", "colour"),
        ("end", {"hue": 3}, "hue"),
    ],
)
def test_a_row_of_another_version_is_refused(part: str, value: object, words: str) -> None:
    key = key_of("j", part)
    with pytest.raises((ValueError, TypeError, KeyError), match=words):
        decode("j", encode(row()) | {key: sealed(key, value)})


def test_a_row_without_one_of_its_fields_is_refused() -> None:
    stored = encode(row())
    del stored[key_of("j", "reason")]
    with pytest.raises(ValueError, match="parts of it are missing: reason"):
        decode("j", stored)


def test_a_part_in_another_ones_place_is_noticed() -> None:
    stored = encode(row())
    with pytest.raises(ValueError, match="the part that holds it together is missing"):
        decode("j", {key: text for key, text in stored.items() if key != row_key("j")})
    with pytest.raises(ValueError, match="checksum of jobs/j/ready/0"):
        decode("j", stored | {key_of("j", "ready", 0): stored[key_of("j", "ready", 1)]})


def test_what_has_changed_is_written_and_nothing_else() -> None:
    known = row()
    changes = Changes(known, stored=True)
    assert not changes.detect()
    assert changes.drain() == ({}, [])
    known.ready[0] = 5
    del known.reports[1]
    known.fence(known.holders[1])
    known.log_servers = [replace(known.log_servers[0], lost="gone")]
    assert changes.detect()
    assert not changes.detect()
    puts, deletes = changes.drain()
    assert set(puts) == {
        key_of("j", "ready", 0),
        key_of("j", "fenced", 1),
        key_of("j", "log_servers"),
        row_key("j"),
    }
    assert deletes == [key_of("j", "reports", 1)]
    known.holders, known.reason = {}, "lost"  # another table, in which nobody is any more
    assert changes.detect()
    puts, deletes = changes.drain()
    assert set(puts) == {key_of("j", "reason"), row_key("j")}
    assert deletes == [key_of("j", "holders", 1)]


def test_a_table_is_not_changed_behind_its_back() -> None:
    table = Table({1: "a"})
    for change in (
        table.clear,
        lambda: table.update({1: "b"}),
        table.popitem,
        lambda: table.__ior__({1: "b"}),
    ):
        with pytest.raises(TypeError, match="one by one"):
            change()


def test_the_step_bound_is_derived_from_observed_steps() -> None:
    clock = StepClock(Timing(heartbeat_s=0.5, lease_s=2.5, step_bound_s=10.0))
    clock.see(0, 4, 0.0, running=True)
    assert clock.overdue(1000.0) == []  # no step was seen to end: nothing to compare with
    clock.see(0, 6, 8.0, running=True)
    assert clock.bound_s == 40.0  # ten times the 4 s that each of the two took
    assert clock.overdue(48.0) == []
    assert clock.overdue(49.0) == [(0, 41.0)]
    clock.see(0, 7, 50.0, running=False)  # steps of a replay teach nothing
    assert clock.bound_s == 40.0
    clock.restart({0: 7}, 100.0)
    assert clock.overdue(139.0) == []
    clock.forget(0)
    assert clock.overdue(1000.0) == []
    assert clock.version(0) == 0


def test_a_device_that_hangs_is_shown_until_it_is_taken_back_and_hides_no_lost_connection() -> None:
    said, running = Suspicions(StepClock(Timing())), row()
    assert said.say(1, "its device hangs", 0.0, 0)
    assert [each.reason for each in said.all(running, 1.0)] == ["its device hangs"]
    assert not said.say(1, "", 1.0, 0)
    assert said.all(running, 1.0) == []
    assert said.say(1, "connection closed", 2.0, running.generation)
    for reason in ("its device hangs", ""):
        assert not said.say(1, reason, 3.0, 0)
    assert "connection closed" in said.due(running, 1.0, 4.0)
    assert said.say(1, "its place is unfit", 5.0, 0, unfit=True)


def test_what_a_recovery_gives_a_rank_is_no_step_that_it_has_done() -> None:
    """Else an early checkpoint, whose margin goes by the steps seen, would be agreed on far ahead."""
    clock = StepClock(Timing())
    clock.see(0, 0, 0.0, running=True)
    clock.see(0, 1, 1.0, running=True)
    clock.see(1, 40, 1.0, running=True)
    clock.forget(2)  # its successor has said nothing of a version yet
    clock.restart({0: 50, 1: 50, 2: 50}, 10.0)
    assert [clock.version(rank) for rank in range(3)] == [50, 50, 50]
    for rank in range(3):
        clock.see(rank, 51, 11.0, running=True)
    assert clock.steps_within(1.0) == 1


def test_a_late_heartbeat_does_not_put_an_early_checkpoint_off() -> None:
    """It makes the next step look short; SIGTERM's checkpoint would come after the launcher's time."""
    clock = StepClock(Timing())
    clock.see(0, 0, 0.0, running=True)
    for version, at in enumerate((1.0, 2.0, 3.95, 4.0, 5.0), start=1):
        clock.see(0, version, at, running=True)
    assert clock.steps_within(1.0) == 1


def test_what_a_heartbeat_tells_late_is_no_step_back() -> None:
    """Read before its rank was ready, taken once all are RUNNING: the next one would be many steps in one."""
    clock = StepClock(Timing())
    clock.restart({0: 50}, 10.0)
    clock.see(0, 40, 10.1, running=True)
    assert clock.version(0) == 50
    clock.see(0, 51, 11.0, running=True)
    assert clock.steps_within(1.0) == 1
    clock.see(0, 45, 11.5, running=False)  # undone, or restored: this one is of a recovery
    assert clock.version(0) == 45


def test_an_inventory_becomes_summaries(monkeypatch: pytest.MonkeyPatch) -> None:
    def inventory(*_arguments: object) -> list[StreamInventory]:
        return [
            StreamInventory(
                stream="s0.F", records=4, has_records=True, first_step=10, last_step=13, trimmed_below_step=10
            ),
            StreamInventory(stream="s1.B", trimmed_below_step=10, corrupt=True, reason="a hole"),
        ]

    monkeypatch.setattr(admin, "inventory", inventory)
    assert LogServers(1.0).inventory("l:1", "j") == [
        StreamSummary(stream="s0.F", records=4, first_step=10, last_step=13, trimmed_below_step=10),
        StreamSummary(stream="s1.B", records=0, trimmed_below_step=10, corrupt=True, reason="a hole"),
    ]


@pytest.mark.parametrize(
    ("seconds", "good"), [(0.0, True), (6.0, True), (60.0, True), (5.9, False), (61.0, False)]
)
def test_a_log_server_is_lost_neither_too_soon_nor_later_than_ranks_wait(seconds: float, good: bool) -> None:
    if good:
        assert Timing(log_lost_s=seconds).log_lost_s == seconds
    else:
        with pytest.raises(ValueError, match="choose 6 to 60 s"):
            Timing(log_lost_s=seconds)


@pytest.mark.parametrize(
    ("heartbeat_s", "usual"), [(0.01, 30.0), (1.0, 30.0), (8.0, 48.0), (10.0, 60.0), (12.0, 0.0)]
)
def test_with_every_heartbeat_there_is_a_time_after_which_a_log_server_is_lost(
    heartbeat_s: float, usual: float
) -> None:
    chosen = usual_log_lost_s(heartbeat_s)
    assert chosen == usual
    Timing(
        heartbeat_s=heartbeat_s,
        suspicion_s=heartbeat_s / 2,
        lease_s=10 * heartbeat_s,
        step_bound_s=400.0,
        log_lost_s=chosen,
    )
