"""From what ranks have measured to what the planner takes, and to its command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.plan.command import main
from swift_ft.lab.plan.command import parse as options_of
from swift_ft.lab.plan.model import CostModel
from swift_ft.lab.plan.profile import Profile, parse
from swift_ft.lab.plan.running_job import profile_of

STAGES = 4
JOB = ["--coordinator", "h:1", "--job", "j"]
CONFIG = {"checkpoint_every": "10", "helpers": "2", "replicas": "1", "shards": "1"}


def rank(
    stage: int, *, stages: tuple[pb.StageMeasured, ...] | None = None, **changes: Any
) -> pb.RankMeasured:
    sent = [pb.Sent(destination=stage - 1, bytes=10 * stage)] if stage else []
    sent += [pb.Sent(destination=stage + 1, bytes=100 + stage)] if stage + 1 < STAGES else []
    own = pb.StageMeasured(
        stage=stage, forward_s=0.1 + stage, backward_s=0.2, sent=tuple(sent), gradient_bytes=7 + stage
    )
    return pb.RankMeasured(
        **{
            "step": 9,
            "steps": 4,
            "microbatches": 4,
            "step_s": 20.0 + stage,
            "update_s": 0.5,
            "stages": stages or (own,),
            "other_bytes": 3,
            "checkpoint_bytes": 1000 * (stage + 1),
            "checkpoint_s": 2.0,
            "checkpoint_stall_s": 0.25,
            **changes,
        }
    )


def reply(ranks: dict[int, pb.RankMeasured], hosts: str = "aabb", **config: str) -> pb.MeasurementsReply:
    return pb.MeasurementsReply(
        world_size=STAGES,
        config={**CONFIG, **config},
        ranks=[
            pb.RankMeasurement(rank=number, host=hosts[number], measured=said)
            for number, said in ranks.items()
        ],
    )


def whole(**changes: Any) -> dict[int, pb.RankMeasured]:
    return {number: rank(number, **changes) for number in range(STAGES)}


def made(
    ranks: dict[int, pb.RankMeasured] | None = None, hosts: str = "aabb", flags: str = ""
) -> tuple[Profile, str]:
    profile, assumed = profile_of("j", reply(ranks or whole(), hosts), options_of([*JOB, *flags.split()]))
    return profile, "; ".join(assumed)


def test_what_was_measured_is_the_profile() -> None:
    profile, _ = made()
    assert profile.forward_s == (0.1, 1.1, 2.1, 3.1)
    assert profile.forward_bytes == (100, 101, 102)
    assert profile.backward_bytes == (10, 20, 30)
    assert (profile.other_bytes, profile.microbatches, profile.step_s) == (12, 4, 21.5)
    assert profile.machine_of_stage == (0, 0, 1, 1)
    assert (profile.checkpoint_interval_steps, profile.checkpoint_bytes) == (10, (1000, 2000, 3000, 4000))
    assert profile.checkpoint_bytes_per_s == (3000 / 2 + 7000 / 2) / 2
    assert profile.checkpoint_stall_s == 0.25
    assert CostModel(profile).bytes_per_step((1,)) == 101 + 20 + 12
    assert parse(json.dumps(profile.document())) == profile


def test_ranks_may_run_the_stages_in_any_order() -> None:
    turned = {3 - number: said for number, said in whole().items()}
    profile, _ = made(turned, "bbaa")
    assert profile.forward_bytes == (100, 101, 102)
    assert profile.machine_of_stage == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("flags", "changes", "field", "value", "said"),
    [
        ("", {}, "machine_mtbf_s", (2592000.0,) * 2, "failures.machine_mtbf_s 2.592e+06 (--machine-mtbf)"),
        ("--machine-mtbf 5", {}, "machine_mtbf_s", (5.0, 5.0), ""),
        ("", {}, "log_read_bytes_per_s", 1e9, "(--log-read-rate; nothing was replayed)"),
        ("--log-read-rate 5", {}, "log_read_bytes_per_s", 5.0, ""),
        ("", {"log_read_bytes": 100, "log_read_wait_s": 0.5}, "log_read_bytes_per_s", 200.0, ""),
        ("", {"log_read_bytes": 100, "log_read_wait_s": 0.0}, "log_read_bytes_per_s", 1e18, ""),
        ("", {}, "log_write_bytes_per_s", 1e9, "(--log-write-rate; nothing was logged)"),
        (
            "",
            {"log_write_bytes_per_s": 7.0},
            "log_write_bytes_per_s",
            1e9,
            "it took 14, and nobody waited for it",
        ),
        ("", {"log_write_bytes_per_s": 9e9}, "log_write_bytes_per_s", 18e9, "nobody waited for it"),
        ("", {"log_write_bytes_per_s": 7.0, "log_full": True}, "log_write_bytes_per_s", 14.0, ""),
        ("--machine-per-rank", {}, "machine_of_stage", (0, 1, 2, 3), ""),
        ("", {}, "copies_max", 1, "nobody helps a replay (else --network-rate)"),
        ("--fixed 3", {}, "fixed_s", 3.0, ""),
    ],
)
def test_what_is_assumed_is_said(
    flags: str, changes: dict[str, Any], field: str, value: object, said: str
) -> None:
    profile, assumed = made(whole(**changes), flags=flags)
    assert getattr(profile, field) == value
    assert said in assumed
    if not said and field != "machine_of_stage":
        assert field not in assumed.replace("failures.", "").replace("log.", "log_")


def test_one_rank_that_has_replayed_does_not_stand_for_the_log() -> None:
    """Some read nothing but a few results of collectives: their waits are no rate."""
    ranks = whole()
    ranks[1] = rank(1, log_read_bytes=4, log_read_wait_s=0.5)
    ranks[2] = rank(2, log_read_bytes=996, log_read_wait_s=0.5)
    assert made(ranks)[0].log_read_bytes_per_s == 1000.0


def test_helpers_are_counted_where_the_network_is_known() -> None:
    profile, assumed = made(flags="--network-rate 1GB")
    assert (profile.copies_max, profile.gradient_bytes) == (3, (7, 8, 9, 10))
    assert "helps" not in assumed


def test_what_skips_a_stage_crosses_two_boundaries() -> None:
    ranks = whole()
    sent = (*ranks[0].stages[0].sent, pb.Sent(destination=2, bytes=1000))
    ranks[0] = rank(0, stages=(pb.StageMeasured(stage=0, forward_s=1.0, backward_s=1.0, sent=sent),))
    profile, assumed = made(ranks)
    assert profile.forward_bytes == (1100, 1101, 102)
    assert "what stage 0 sends to stage 2 counts at every boundary in between" in assumed


def test_a_single_machine_is_named() -> None:
    profile, assumed = made(hosts="aaaa")
    assert profile.machines == 1
    assert "all ranks are on a, one machine (else --machine-per-rank)" in assumed


TWO = (
    pb.StageMeasured(stage=0, forward_s=1.0, backward_s=1.0),
    pb.StageMeasured(stage=7, forward_s=1.0, backward_s=1.0),
)


@pytest.mark.parametrize(
    ("ranks", "hosts", "config", "error", "words"),
    [
        ({}, "aabb", {}, ServiceError, "ranks 0, 1, 2, 3 measured no step yet"),
        ({0: rank(0), 1: rank(1), 3: rank(3)}, "aabb", {}, ServiceError, "rank 2 measured no step yet"),
        (whole(checkpoint_s=None), "aabb", {}, ServiceError, "has saved no checkpoint yet"),
        ({**whole(), 1: rank(1, microbatches=3)}, "aabb", {}, ServiceError, "ranks count 3, 4 microbatches"),
        ({**whole(), 1: rank(2)}, "aabb", {}, ServiceError, "stages [0, 2, 2, 3] were measured"),
        (whole(), "abab", {}, UsageError, "machine a are no neighbours; give --machine-per-rank"),
        (whole(), "aabb", {"replicas": "2"}, UsageError, "2 data-parallel ranks to a stage"),
        (whole(stages=TWO), "aabb", {}, UsageError, "rank 0 runs 2 stages"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    ranks: dict[int, pb.RankMeasured], hosts: str, config: dict[str, str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as raised:
        profile_of("j", reply(ranks, hosts, **config), options_of(JOB))
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


# --- the command ---


def asked(ranks: dict[int, pb.RankMeasured]) -> Callable[[str, str], pb.MeasurementsReply]:
    """The answer of a coordinator."""

    def ask(coordinator: str, job: str) -> pb.MeasurementsReply:
        assert (coordinator, job) == ("h:1", "j")
        return reply(ranks)

    return ask


def test_a_running_job_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "profile.json"
    words = [*JOB, "--machine-per-rank", "--machine-mtbf", "86400", "--log-read-rate", "2MB"]
    assert main([*words, "--save-profile", str(saved), "--storage-cap", "1.3kB"], asked(whole())) == 0
    shown = capsys.readouterr().out
    assert "assumed: log.write_bytes_per_s 1e+09" in shown
    assert "mtbf" not in shown
    assert 'for the session: groups="' in shown
    profile = parse(saved.read_bytes())
    assert (profile.machines, profile.machine_mtbf_s[0], profile.log_read_bytes_per_s) == (4, 86400.0, 2e6)
    assert profile.source.startswith("measured by the job's ranks; assumed: ")
    # What was saved is what was planned with.
    capsys.readouterr()
    assert main([str(saved), "--storage-cap", "1.3kB"]) == 0
    assert capsys.readouterr().out == shown[shown.index("j: 4 stages") :]


def test_nothing_measured_yet_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "profile.json"
    assert main([*JOB, "--save-profile", str(saved)], asked({})) == 3
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "swift: job j: ranks 0, 1, 2, 3 measured no step yet; ask again later\n"
    assert not saved.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a PROFILE, or --coordinator HOST:PORT and --job NAME"),
        (["p.json", *JOB], "give PROFILE (p.json) or --coordinator, not both"),
        (JOB[:2], "--coordinator needs --job NAME"),
        (JOB[2:], "--job is for a running job"),
        (["p.json", "--machine-mtbf", "5"], "--machine-mtbf is for a running job"),
        (["p.json", "--machine-per-rank"], "--machine-per-rank is for a running job"),
        ([*JOB, "--log-read-rate", "much"], "--log-read-rate: much: write bytes"),
        ([*JOB, "--fixed", "soon"], "--fixed: soon: write a time"),
        ([*JOB, "--machine-mtbf", "0"], "failures.machine_mtbf_s[0]: must be from"),
        ([*JOB, "--save-profile", "/no/such/place"], "--save-profile /no/such/place: give a file"),
    ],
)
def test_what_is_wrong_with_the_command_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments, asked(whole())) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert len(shown.err.splitlines()) == 1
