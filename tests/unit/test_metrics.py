"""The library's part of metrics: distributions, registries, HTTP; and what ranks and the coordinator count."""

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.cli_parser import metrics_address
from swift_ft.errors import UsageError
from swift_ft.metrics import (
    CONNECTIONS_MAX,
    COUNTER,
    GAUGE,
    HISTOGRAM,
    STATES,
    Distribution,
    Exposition,
    Family,
    Samples,
    plain,
)
from swift_ft.planner import Plan, RankPlan, Strategy
from swift_ft.train import metrics as trainer
from swift_ft.train.config import SessionConfig
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.job import Job
from swift_ft_services.coordinator.job_record import JobRow, State
from swift_ft_services.coordinator.metrics import CoordinatorMetrics
from swift_ft_services.coordinator.timeouts import Timing
from tests.integration.scraping import answer, scrape
from tests.patience import eventually
from tests.unit.coordinator.driver_world import FakeClock

BOUNDS = (0.1, 1.0, 10.0)


@given(st.lists(st.floats(0, 100)))
def test_a_distribution_counts_each_value_in_every_bucket_that_holds_it(values: list[float]) -> None:
    known = Distribution(BOUNDS)
    for value in values:
        known.observe(value)
    buckets, total = known.read()
    assert [bound for bound, _ in buckets] == ["0.1", "1.0", "10.0", "+Inf"]
    for bound, count in buckets:
        assert count == sum(value <= float(bound) for value in values)
    assert total == pytest.approx(sum(values))


def test_each_registry_is_its_own_and_shows_what_it_reads() -> None:
    families = (
        Family("x_total", COUNTER, "Xs.", ("job",)),
        Family("y_bytes", GAUGE, "Ys."),
        Family("z_seconds", HISTOGRAM, "Zs."),
        Family("w", STATES, "Ws.", (), ("on", "off")),
    )
    times = Distribution(BOUNDS)
    times.observe(0.5)
    count = 0

    def read() -> Samples:
        nonlocal count
        count += 1
        return {
            "x_total": {("a",): count, ('quo"te\n',): 2},
            "y_bytes": plain(1 << 40),
            "z_seconds": plain(times),
            "w": plain("off"),
        }

    one, other = Exposition("127.0.0.1", 0, families, read), Exposition("127.0.0.1", 0, families[:1], read)
    try:
        assert count == 0  # nothing is read before somebody asks
        shown = scrape(one.address)
        assert shown.value("x_total", job="a") == 1
        assert shown.value("x_total", job='quo"te\n') == 2
        assert shown.value("y_bytes") == 1 << 40
        assert shown.value("z_seconds_bucket", le="1.0") == 1
        assert shown.value("z_seconds_bucket", le="0.1") == 0
        assert (shown.value("w", w="off"), shown.value("w", w="on")) == (1, 0)
        assert scrape(one.address).value("x_total", job="a") == 2
        assert not any(name.endswith("_created") for name in shown.types)
        with pytest.raises(UsageError, match="cannot show metrics"):
            Exposition("127.0.0.1", int(one.address.rpartition(":")[2]), families, read)
    finally:
        one.close()
        other.close()
    with pytest.raises(OSError, match="refused"):
        scrape(one.address)


def test_other_paths_are_not_found_and_one_tells_health() -> None:
    problem = ""
    families = (Family("y", GAUGE, "Ys."),)
    shown = Exposition("127.0.0.1", 0, families, lambda: {"y": plain(1)}, lambda: problem)
    try:
        assert answer(shown.address, "/metrics")[0] == 200
        assert answer(shown.address, "/metrics?name[]=y")[0] == 200
        for path in ("/", "/metricsx", "/metrics/", "/favicon.ico", "/healthz/x"):
            assert answer(shown.address, path) == (404, "there are /metrics and /healthz\n")
        assert answer(shown.address, "/healthz") == (200, "ok\n")
        problem = "the disk\nhas failed"
        assert answer(shown.address, "/healthz") == (503, "the disk has failed\n")
        assert answer(shown.address, "/metrics")[0] == 200, "what is wrong is best seen in its metrics"
    finally:
        shown.close()


@pytest.fixture
def shown() -> Iterator[Exposition]:
    exposition = Exposition("127.0.0.1", 0, (Family("y", GAUGE, "Ys."),), lambda: {"y": plain(1)})
    yield exposition
    exposition.close()


def test_connections_that_say_nothing_take_little_and_keep_nobody_out(shown: Exposition) -> None:
    host, _, port = shown.address.rpartition(":")
    threads = threading.active_count()
    silent = []
    try:
        for said in (b"", b"GET /metrics HT", b"POST /metrics HTTP/1.1\r\nX:") * 30:
            silent.append(socket.create_connection((host, int(port)), timeout=5))
            silent[-1].sendall(said)
        assert scrape(shown.address).value("y") == 1
        # A connection is let go a moment before its thread has ended.
        eventually(lambda: threading.active_count() - threads <= CONNECTIONS_MAX)
        assert silent[0].recv(1) == b""  # it was let go
    finally:
        for connection in silent:
            connection.close()


def test_who_goes_away_in_the_middle_is_not_told_of(
    shown: Exposition, capfd: pytest.CaptureFixture[str]
) -> None:
    host, _, port = shown.address.rpartition(":")
    for said in (b"", b"G", b"GET /metrics HTTP/1.1\r\n\r\n") * 5:
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(said)
            reset = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    assert scrape(shown.address).value("y") == 1
    shown.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "insecure", "found"),
    [
        ("", False, None),
        ("127.0.0.1:0", False, ("127.0.0.1", 0)),
        ("localhost:9", False, ("localhost", 9)),
        ("[::1]:9", False, ("[::1]", 9)),
        ("10.0.0.1:9", True, ("10.0.0.1", 9)),
        ("10.0.0.1:9", False, UsageError),
        ("example.com:9", False, UsageError),
        (":9", True, UsageError),
        ("127.0.0.1", True, UsageError),
        ("127.0.0.1:65536", True, UsageError),
    ],
)
def test_where_metrics_may_be_shown(text: str, insecure: bool, found: Any) -> None:
    if found is UsageError:
        with pytest.raises(UsageError, match="--metrics-listen"):
            metrics_address(text, insecure=insecure)
    else:
        assert metrics_address(text, insecure=insecure) == found


# -- the coordinator ----------------------------------------------------------------------------------


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def coordinator(clock: FakeClock) -> Iterator[CoordinatorMetrics]:
    metrics = CoordinatorMetrics(clock)
    yield metrics
    metrics.close()


def row(checkpoints: list[int] | None = None, plan: Plan | None = None) -> JobRow:
    made = JobRow(
        job="a", world_size=2, config={}, fingerprint={}, log_servers=[], checkpoints=checkpoints or []
    )
    made.plan = plan
    return made


def plan_of(*strategies: Strategy) -> Plan:
    ranks = tuple(
        RankPlan(rank=rank, strategy=strategy, from_version=0, reason="", sources=())
        for rank, strategy in enumerate(strategies)
    )
    return Plan(target_version=0, ranks=ranks, collective_source=-1, reason="", exact=True)


def job(checkpoint: int | None, **fields: Any) -> Job:
    made = Job(row([] if checkpoint is None else [checkpoint]), Timing(), 0.0)
    for name, value in fields.items():
        setattr(made.row, name, value)
    return made


def test_what_was_rehearsed_of_each_rank_is_shown(coordinator: CoordinatorMetrics) -> None:
    known = {
        2: pb.Rehearsal(done=1, version=50, steps=4),
        3: pb.Rehearsal(done=2, version=60, difference="rng"),
    }
    samples = coordinator.samples([job(60, inexact_since=50, rehearsals=known)])
    assert samples["swift_coordinator_exact"] == {("a",): 0}
    assert samples["swift_coordinator_rehearsed_version"] == {("a", "2"): 50, ("a", "3"): 60}
    assert samples["swift_coordinator_rehearsed_steps"] == {("a", "2"): 4, ("a", "3"): 0}
    assert samples["swift_coordinator_rehearsal_differs"] == {("a", "2"): 0, ("a", "3"): 1}


def recoveries(metrics: CoordinatorMetrics) -> tuple[dict[Any, Any], list[tuple[float, float]]]:
    samples = metrics.samples([])
    times = [known.read() for known in samples["swift_coordinator_recovery_seconds"].values()]  # type: ignore[union-attr]
    return dict(samples["swift_coordinator_recoveries_total"]), [(b[-1][1], total) for b, total in times]


def test_a_recovery_lasts_from_the_first_loss_to_running_whatever_superseded_it(
    coordinator: CoordinatorMetrics, clock: FakeClock
) -> None:
    def enter(state: State, plan: Plan | None = None) -> None:
        coordinator.after_durable(row(plan=plan), m.Persist(entered=state))

    enter(State.FORMING)
    enter(State.RUNNING)  # the job's beginning is none
    assert recoveries(coordinator) == ({}, [])
    enter(State.FENCING)
    clock.now += 3
    enter(State.PLANNING)
    enter(State.FENCING)  # another loss
    clock.now += 4
    enter(State.RECOVERING)
    coordinator.after_durable(row(), m.Persist())
    enter(State.RUNNING, plan_of(Strategy.KEEP, Strategy.REPLAY))
    assert recoveries(coordinator) == ({("a", "REPLAY"): 1}, [(1, 7.0)])
    enter(State.FENCING)
    clock.now += 1
    enter(State.RUNNING, plan_of(Strategy.KEEP, Strategy.REPLICA))
    assert recoveries(coordinator) == ({("a", "REPLAY"): 1, ("a", "REPLICA"): 1}, [(2, 8.0)])


def test_a_coordinator_that_began_in_the_middle_counts_the_recovery_and_not_its_time(
    coordinator: CoordinatorMetrics,
) -> None:
    coordinator.after_durable(row(plan=plan_of(Strategy.UNDO)), m.Persist(entered=State.RUNNING))
    assert recoveries(coordinator) == ({("a", "UNDO"): 1}, [])


def test_a_checkpoints_age_begins_when_it_is_complete(
    coordinator: CoordinatorMetrics, clock: FakeClock
) -> None:
    def age() -> float:
        return float(coordinator.samples([job(5)])["swift_coordinator_checkpoint_age_seconds"]["a",])  # type: ignore[arg-type]

    clock.now += 10
    assert age() == 10  # of one that is older than this process: at least so old
    coordinator.after_durable(row([0]), m.Persist())
    assert age() == 10
    clock.now += 5
    coordinator.after_durable(row([0, 5]), m.Persist())
    assert age() == 0
    clock.now += 2
    coordinator.after_durable(row([0, 5]), m.Persist())
    assert age() == 2
    assert not coordinator.samples([job(None)])["swift_coordinator_checkpoint_age_seconds"]


# -- a rank -------------------------------------------------------------------------------------------


def test_a_rank_counts_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr("swift_ft.train.metrics.events.now", clock)
    done = counts() | {"version": 7, "records": 5, "something_new": 1}
    metrics = trainer.TrainerMetrics("a", 2, lambda: done)

    def step(seconds: float, replay: bool) -> None:
        events.emit("step_begin", rank=2, step=0, replay=replay)
        clock.now += seconds
        events.emit("step_end", rank=2, step=0, replay=replay)

    events.emit("resumed", rank=2, generation=1, version=0)
    step(0.5, False)
    events.emit("step_begin", rank=2, step=1, replay=False)
    clock.now += 1
    events.emit("notice", rank=2, generation=2)
    clock.now += 1
    events.emit("notice", rank=2, generation=3)
    step(9.0, True)
    events.emit("resumed", rank=2, generation=3, version=1)
    step(0.25, False)
    metrics.stop()
    step(1.0, False)
    samples = metrics.samples()
    values = {name: found[()] for name, found in samples.items()}
    assert (values["swift_trainer_steps_total"], values["swift_trainer_replayed_steps_total"]) == (2, 1)
    assert values["swift_trainer_recoveries_total"] == 1
    step_s, recovery_s = values["swift_trainer_step_seconds"], values["swift_trainer_recovery_seconds"]
    assert isinstance(step_s, Distribution)
    assert isinstance(recovery_s, Distribution)
    assert step_s.read()[1] == 0.75
    assert recovery_s.read()[1] == 10.0
    assert (values["swift_trainer_version"], values["swift_trainer_logged_records_total"]) == (7, 5)


@contextmanager
def free_behind_a_taken_port() -> Iterator[int]:
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            first.listen()
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            second.close()
            yield port
            return


def counts() -> dict[str, float]:
    return dict.fromkeys(trainer._COUNTED.values(), 0.0)


def test_ranks_of_one_machine_take_ports_side_by_side_and_a_taken_one_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(trainer.ENV_METRICS_DIR, str(tmp_path))
    heard: list[tuple[str, Any]] = []
    end = events.listen(lambda event, fields: heard.append((event, fields)))
    with free_behind_a_taken_port() as port:
        close_0 = trainer.serve_metrics(f"127.0.0.1:{port}", "a", 0, 0, counts)
        close_1 = trainer.serve_metrics(f"127.0.0.1:{port}", "a", 1, 1, counts)
    end()
    assert heard[0][0] == "metrics_not_shown"
    assert not (tmp_path / "a-rank0.json").exists()
    assert heard[1] == ("metrics", {"address": f"127.0.0.1:{port + 1}"})
    (target,) = json.loads((tmp_path / "a-rank1.json").read_text())
    assert target == {"targets": [f"127.0.0.1:{port + 1}"], "labels": {"job": "a", "rank": "1"}}
    assert scrape(f"127.0.0.1:{port + 1}").value("swift_trainer_info", job="a", rank="1") == 1
    close_0()
    close_1()


@pytest.mark.parametrize("listen", ["0.0.0.0:9", "nonsense"])
def test_a_sessions_bad_address_is_refused_at_once(listen: str) -> None:
    with pytest.raises(UsageError, match="metrics_listen"):
        SessionConfig(metrics_listen=listen)
