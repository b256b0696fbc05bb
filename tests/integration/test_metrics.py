"""Prometheus metrics of real processes: their numbers, and that docs/operation.md lists exactly what they show."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import Divergence, LogUnavailable, RecordCorrupt, SequenceConflict
from swift_ft.log import admin
from swift_ft.log.reader import LogReader
from swift_ft.log.record import RecordKey
from tests.integration.coordinator_world import Coordinator, FakeMember
from tests.integration.forked import ForkedCluster
from tests.integration.logserver_world import JOB, REPOSITORY, LogServer
from tests.integration.scraping import Scrape, answer, scrape
from tests.log_client import LogWriter
from tests.patience import eventually
from tests.unit.log.clients import following, reading

TIMEOUT_S = 30.0
TRAINING_TIMEOUT_S = 150.0
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \| ([^|]+) \|$", re.MULTILINE)
TYPES = {"states": "gauge", "info": "gauge"}


def documented(section: str) -> dict[str, tuple[str, set[str]]]:
    """Metric -> (type, labels), of the table under that heading."""
    text = (REPOSITORY / "docs" / "operation.md").read_text()
    _, heading, rest = text.partition(f"\n### {section}\n")
    assert heading, section
    table = re.split(r"\n##", rest)[0]
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in ROW.findall(table)}


def compare(shown: Scrape, section: str) -> None:
    """As many, of the same types, with the same labels where there is something to see."""
    wanted = documented(section) | documented("Every process")
    assert wanted.keys() == shown.types.keys()
    for name, (kind, labels) in wanted.items():
        assert shown.types[name] == TYPES.get(kind, kind), name
        known = shown.labels.get(name)
        assert known is None or known == labels, name
        if kind == "counter":
            assert name.endswith("_total"), name


def with_samples(shown: Scrape) -> set[str]:
    return {name for name in shown.types if name in shown.labels}


def put(writer: LogWriter, step: int, size: int = 20_000, fill: int = 0) -> None:
    writer.append("s0.F", RecordKey(step, 0, 0), "uint8", (size,), bytes([fill]) * size)


# -- the log server -----------------------------------------------------------------------------------


class Metered(LogServer):
    """A log server that shows metrics on a free port."""

    def __init__(self, directory: Path, *flags: str, file_bytes_max: int = 0) -> None:
        self.metrics_file = directory.with_suffix(".metrics")
        super().__init__(
            directory,
            *("--metrics-listen", "127.0.0.1:0", "--metrics-address-file", str(self.metrics_file)),
            *flags,
            file_bytes_max=file_bytes_max,
        )

    def scrape(self) -> Scrape:
        return scrape(self.metrics_file.read_text().strip())


def test_the_log_server_counts_what_it_does_and_the_table_lists_it(tmp_path: Path) -> None:
    with Metered(tmp_path / "log", "--segment-bytes", "100000") as server:
        server.fence(1)
        writer = LogWriter([server.address], JOB, 1)
        for step in range(12):
            put(writer, step)
            writer.flush(TIMEOUT_S)
        shown = server.scrape()
        job = {"job": JOB}
        assert shown.value("swift_log_appended_records_total", **job) == 12
        held = shown.value("swift_log_held_bytes", **job)
        assert 12 * 20_000 < held < 12 * 21_000
        assert shown.value("swift_log_appended_bytes_total", **job) == held
        assert shown.value("swift_log_commit_seconds_count") == 12  # each was waited for
        assert shown.value("swift_log_sync_seconds_count") >= 12
        assert 0 < shown.value("swift_log_sync_seconds_sum") < TIMEOUT_S
        assert shown.value("swift_log_state", swift_log_state="serving") == 1
        assert shown.value("swift_log_generation", **job) == 1
        assert shown.value("swift_log_sessions") == 1
        assert shown.value("swift_log_credit_granted_bytes") == 64 << 20
        assert shown.value("swift_log_credit_used_bytes") == 0
        assert shown.value("swift_log_queued_records") == 0
        assert 0 < shown.value("swift_log_disk_free_bytes") <= shown.value("swift_log_disk_size_bytes")
        # Somebody reads step 0, so that a trim has to wait.
        reader = LogReader([server.address], JOB)
        cursor = reader.follow("s0.F", 0)
        cursor.get(RecordKey(0, 0, 0), TIMEOUT_S, lambda: False)
        assert admin.trim(server.address, JOB, 6, TIMEOUT_S) == 0
        shown = server.scrape()
        assert shown.value("swift_log_readers", **job) == 1
        assert shown.value("swift_log_trim_waits", **job) == 1
        cursor.close()
        eventually(lambda: server.scrape().value("swift_log_trimmed_below_step", **job) == 6)
        shown = server.scrape()
        assert shown.value("swift_log_held_records", **job) == 6
        assert shown.value("swift_log_readers", **job) == 0
        reader.close()
        writer.close()
        eventually(lambda: server.scrape().value("swift_log_sessions") == 0)
        # A writer that lost its mind, and one that was fenced.
        zombie = LogWriter([server.address], JOB, 1)
        put(zombie, 12)
        zombie.flush(TIMEOUT_S)
        put(zombie, 12, fill=1)
        with pytest.raises(Divergence):
            zombie.flush(TIMEOUT_S)
        zombie.close(0.0)
        stale = LogWriter([server.address], JOB, 7)
        put(stale, 20)
        eventually(lambda: "is not granted" in stale.sending.links[server.address].core.trouble)
        stale.sending.patience_s = 0.5
        with pytest.raises(LogUnavailable, match="is not granted"):
            stale.flush(TIMEOUT_S)
        stale.close(0.0)
        admin.reset(server.address, JOB, 1, TIMEOUT_S)
        shown = server.scrape()
        assert shown.value("swift_log_refusals_total", reason="generation-not-granted") >= 1
        compare(shown, "Log server")


def test_quotas_marks_alarms_and_what_is_given_up_show(tmp_path: Path) -> None:
    flags = ["--quota-bytes", "1000000", "--job-quota-bytes", "300000"]
    flags += ["--high-water", "0.8", "--low-water", "0.5"]
    job = {"job": JOB}
    with Metered(tmp_path / "log", *flags) as server:
        server.fence(1)

        def alarm() -> set[str]:
            shown = server.scrape()
            return {
                f"{family}={state}"
                for family in ("swift_log_alarm", "swift_log_job_alarm")
                for state in ("none", "high", "full")
                if shown.get(family, **(job if "job" in family else {}), **{family: state}) == 1
            }

        writer = LogWriter([server.address], JOB, 1, patience_s=1.0)
        for step in range(11):
            put(writer, step)
        writer.flush(TIMEOUT_S)
        shown = server.scrape()
        assert shown.value("swift_log_quota_bytes") == shown.value("swift_log_limit_bytes") == 1_000_000
        assert shown.value("swift_log_high_mark_bytes") == 800_000
        assert shown.value("swift_log_job_quota_bytes", **job) == 300_000
        assert alarm() == {"swift_log_alarm=none", "swift_log_job_alarm=none"}
        for step in range(11, 13):
            put(writer, step)
        writer.flush(TIMEOUT_S)
        eventually(lambda: alarm() == {"swift_log_alarm=none", "swift_log_job_alarm=high"})
        for step in range(13, 20):
            put(writer, step)
        with pytest.raises(LogUnavailable, match="quota is full"):
            writer.flush(TIMEOUT_S)
        eventually(lambda: alarm() == {"swift_log_alarm=none", "swift_log_job_alarm=full"})
        shown = server.scrape()
        held = shown.value("swift_log_held_bytes", **job)
        assert 240_000 < held <= 300_000
        assert shown.value("swift_log_used_bytes") == held
        writer.close(0.0)
        admin.trim(server.address, JOB, 10, TIMEOUT_S)
        eventually(lambda: alarm() == {"swift_log_alarm=none", "swift_log_job_alarm=none"})
        shown = server.scrape()
        assert 0 < shown.value("swift_log_held_bytes", **job) < held
        admin.drop(server.address, JOB, TIMEOUT_S, force=True)
        shown = server.scrape()
        assert shown.value("swift_log_used_bytes") == 0
        compare(shown, "Log server")


def test_a_full_disk_shows(tmp_path: Path) -> None:
    with Metered(tmp_path / "log", file_bytes_max=1 << 20) as server:
        server.fence(1)
        writer = LogWriter([server.address], JOB, 1, patience_s=2.0)
        for step in range(80):
            put(writer, step)
        with pytest.raises(LogUnavailable, match="no space left"):
            writer.flush(TIMEOUT_S)
        shown = server.scrape()
        assert shown.value("swift_log_state", swift_log_state="full") == 1
        assert shown.value("swift_log_alarm", swift_log_alarm="full") == 1
        assert answer(server.metrics_file.read_text().strip(), "/healthz") == (503, "it is full\n")
        assert shown.value("swift_log_state", swift_log_state="serving") == 0
        assert shown.value("swift_log_refusals_total", reason="disk-full") >= 1
        assert shown.value("swift_log_commit_failures_total", reason="StorageFull") >= 1
        writer.close(0.0)


def test_quarantines_and_damage_show(tmp_path: Path) -> None:
    with Metered(tmp_path / "log") as server:
        server.fence(1)
        writer = LogWriter([server.address], JOB, 1)
        put(writer, 0)
        put(writer, 1)
        writer.close()
        # A process that does not know the stream sends other bytes under its first sequence.
        rogue = LogWriter([server.address], JOB, 1)
        link = rogue.sending.links[server.address]
        put(rogue, 5)
        rogue.flush(TIMEOUT_S)
        stream = link.core._streams["s0.F"]
        with link._cond:
            stream.next_sequence = stream.acked = 0
        put(rogue, 6, fill=3)
        with pytest.raises(SequenceConflict):
            rogue.flush(TIMEOUT_S)
        rogue.close(0.0)
        shown = server.scrape()
        assert shown.value("swift_log_quarantines_total", job=JOB) == 1
        assert shown.value("swift_log_corrupt_streams", job=JOB) == 1
        assert shown.value("swift_log_refusals_total", reason="conflict") >= 1
        server.stop()
        (path,) = server.segments("s0.F")
        data = bytearray(path.read_bytes())
        data[8000] ^= 1
        path.write_bytes(data)
        server.metrics_file.unlink()
        server.start()
        with reading(server.address) as reader, following(reader, "s0.F", 0) as cursor:
            with pytest.raises(RecordCorrupt):
                cursor.get(RecordKey(0, 0, 0), TIMEOUT_S, lambda: False)
        assert server.scrape().value("swift_log_damage_found_total", job=JOB) >= 1


def test_it_listens_for_scrapes_only_where_it_was_asked_to(tmp_path: Path) -> None:
    def listens(server: LogServer) -> set[str]:
        assert server.process is not None
        connections = psutil.Process(server.process.pid).net_connections("inet")
        listening = [one.laddr for one in connections if one.status == psutil.CONN_LISTEN]
        return {f"{address.ip.removeprefix('::ffff:')}:{address.port}" for address in listening}

    with LogServer(tmp_path / "log") as plain:
        assert listens(plain) == {plain.address}
    with Metered(tmp_path / "metered") as metered:
        assert listens(metered) == {metered.address, metered.metrics_file.read_text().strip()}


# -- the coordinator ----------------------------------------------------------------------------------


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    flags = ["--metrics-listen", "127.0.0.1:0", "--metrics-address-file", str(tmp_path / "shown")]
    flags += ["--heartbeat-s", "0.2", "--lease-s", "4"]  # one that ends is waited for
    coordinator = Coordinator(tmp_path / "meta", *flags).start()
    yield coordinator
    assert coordinator.stop() == 0


def test_the_coordinator_counts_what_it_does_and_the_table_lists_it(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    def shown() -> Scrape:
        return scrape((tmp_path / "shown").read_text().strip())

    def state() -> str:
        now = shown()
        (found,) = [
            dict(labels)["swift_coordinator_job_state"]
            for (sample, labels), value in now.values.items()
            if sample == "swift_coordinator_job_state" and value == 1
        ]
        return found

    members = [FakeMember(coordinator.address, "a", rank, 2).start() for rank in range(2)]
    job = {"job": "a"}
    try:
        eventually(lambda: state() == "RUNNING")
        now = shown()
        assert now.value("swift_coordinator_generation", **job) == 1
        assert now.value("swift_coordinator_live_ranks", **job) == 2
        assert now.value("swift_coordinator_world_size", **job) == 2
        assert now.value("swift_coordinator_checkpoint_version", **job) == 0
        assert now.value("swift_coordinator_checkpoint_age_seconds", **job) < TIMEOUT_S
        assert now.get("swift_coordinator_recovery_seconds_count", **job) == 0
        assert answer((tmp_path / "shown").read_text().strip(), "/healthz") == (200, "ok\n")
        members[1].kill()
        members[1].report_exit()
        eventually(lambda: state() == "PLANNING")
        assert shown().value("swift_coordinator_live_ranks", **job) == 1
        members[1] = FakeMember(coordinator.address, "a", 1, 2).start()
        eventually(lambda: state() == "RUNNING")
        now = shown()
        assert now.value("swift_coordinator_generation", **job) == 2
        assert now.value("swift_coordinator_recoveries_total", **job, strategy="REPLAY") == 1
        assert now.value("swift_coordinator_recovery_seconds_count", **job) == 1
        assert 0 < now.value("swift_coordinator_recovery_seconds_sum", **job) < TIMEOUT_S
        assert now.value("swift_coordinator_fenced_ranks_total", **job) == 1
        assert now.get("swift_coordinator_early_checkpoints_total", **job) == 0
        for _ in range(2):  # the second one changes nothing
            members[0].client.call(
                pb.AskCheckpointRequest(generation=2, after_version=1_000_000, reason="made up")
            )
        eventually(lambda: shown().get("swift_coordinator_early_checkpoints_total", **job) == 1)
        members[0].silent.set()
        eventually(lambda: shown().get("swift_coordinator_lease_expiries_total", **job) == 1)
        members[0].silent.clear()  # too late: the lease is gone, and the next renewal is refused
        eventually(lambda: shown().get("swift_coordinator_refusals_total", reason="fenced") >= 1)
        compare(shown(), "Coordinator")
    finally:
        for member in members:
            member.kill()


# -- the ranks ----------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
def test_ranks_count_what_they_do_and_the_table_lists_it(tmp_path: Path) -> None:
    """Rank 1 dies in step 6; its replacement replays what came since the checkpoint and shows metrics of its own."""
    found, go = tmp_path / "found", tmp_path / "go"
    found.mkdir()
    fault = {"id": "f0", "rank": 1, "step": 6, "phase": "forward", "microbatch": 0}
    with ForkedCluster(
        tmp_path,
        ranks=2,
        spares=1,
        trainer=[str(REPOSITORY / "tests/integration/trainers/metered.py")],
        trainer_arguments=["10", str(go)],
        faults=json.dumps([fault]),
        settings={"SWIFT_METRICS_LISTEN": "127.0.0.1:0", "SWIFT_METRICS_DIR": str(found)},
    ) as cluster:

        def shown(rank: int) -> Scrape | None:
            assert cluster.poll() is None, cluster.output_tail()
            path = found / f"drill-rank{rank}.json"
            if not path.exists():
                return None
            (target,) = json.loads(path.read_text())
            assert target["labels"] == {"job": "drill", "rank": str(rank)}
            try:
                return scrape(target["targets"][0])
            except OSError:
                return None  # of the one that was killed

        def at_the_end(rank: int) -> bool:
            now = shown(rank)
            steps = [
                e for e in events.read(tmp_path / "events") if e["event"] == "step_end" and e["step"] == 8
            ]
            counted = rank in {step["rank"] for step in steps}  # the version comes before the step is counted
            return counted and now is not None and now.value("swift_trainer_version") == 9

        for rank in (0, 1):
            eventually(lambda rank=rank: at_the_end(rank), timeout_s=TRAINING_TIMEOUT_S)
        survivor, replacement = shown(0), shown(1)
        assert survivor is not None
        assert replacement is not None
        (plan,) = [event for event in events.read(tmp_path / "events") if event["event"] == "plan"]
        for now in (survivor, replacement):
            assert now.value("swift_trainer_generation") == plan["generation"]
            assert now.value("swift_trainer_recoveries_total") == 1
            assert now.value("swift_trainer_step_seconds_count") == now.value("swift_trainer_steps_total")
            compare(now, "Trainers")
            assert with_samples(now) == now.types.keys()
        assert survivor.value("swift_trainer_steps_total") == 9
        assert survivor.value("swift_trainer_replayed_steps_total") == 0
        assert survivor.value("swift_trainer_recovery_seconds_count") == 1
        assert replacement.value("swift_trainer_steps_total") == 3
        begins_at = plan["ranks"][1]["from_version"]  # at checkpoint 4, if it was complete when rank 1 died
        assert begins_at in (0, 4)
        assert replacement.value("swift_trainer_replayed_steps_total") == 6 - begins_at
        assert replacement.value("swift_trainer_verified_records_total") > 0
        assert survivor.value("swift_trainer_logged_bytes_total") >= 9 * 2 * 2 * 4 * 4
        assert survivor.value("swift_trainer_info", job="drill", rank="0") == 1
        go.touch()
        eventually(lambda: cluster.poll() is not None, timeout_s=TRAINING_TIMEOUT_S)
        assert cluster.poll() == 0, cluster.output_tail()
