"""Several log servers, end to end: one is lost for good, alone and together with a rank, with one copy and with two."""

import re
from pathlib import Path

import pytest

from tests.integration.drill_world import drill, kills, passed

pytestmark = pytest.mark.timeout(300)
RANK = "rank=2,step=8,microbatch=2,phase=backward"


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("twins")


@pytest.mark.parametrize("copies", ["1", "2"])
def test_a_lost_log_server_costs_nobody_its_state(copies: str, twins: Path, tmp_path: Path) -> None:
    specs = kills("log=0,step=3")
    # Steps that take so long that it is given up while training goes on.
    flags = ["--log-servers", "2", "--copies", copies, "--model", "default", "--steps", "40"]
    flags += ["--checkpoint-every", "35"]
    report = passed(drill(*flags, *specs, twins=twins, at=tmp_path))
    (recovery,) = report["recoveries"]
    kept = set(recovery["strategy"].values()) == {"keep"}
    if copies == "1" and not kept:
        # A rank was still in a step that the others had finished, and what it needs of it went with the server.
        assert set(recovery["strategy"].values()) == {"checkpoint"}
        needed = re.search(r"step (\d+) is needed \(log server \S+ is lost", recovery["plan_reason"])
        assert needed is not None, recovery["plan_reason"]
        assert int(needed[1]) == recovery["steps_lost"]
    else:
        assert kept, recovery["plan_reason"]
    assert recovery["target_version"] < 35
    (lost,) = report["log"]["lost"]
    assert "is lost" in lost
    assert report["log"]["moved"]
    gone = lost.split()[2]
    assert all(gone in move["from"] and gone not in move["to"] for move in report["log"]["moved"])
    assert all(len(servers) == int(copies) for servers in report["log"]["placement"].values())
    early = [event for event in report["timeline"] if event["event"] == "checkpoint_asked"]
    assert bool(early) == (copies == "1" and kept), "the log has a gap until there is a checkpoint"


def test_fault_37_with_two_copies_the_second_one_is_replayed(twins: Path, tmp_path: Path) -> None:
    flags = ["--log-servers", "2", "--copies", "2"]
    for server in "01":
        place = tmp_path / server
        place.mkdir()
        report = passed(drill(*flags, *kills(RANK, f"log={server},step=8"), twins=twins, at=place))
        assert report["strategy"]["2"] == "replay"
        assert report["log"]["verified_sends"] > 0
        assert report["log"]["lost"]


def test_fault_37_with_one_copy_everybody_restores_the_checkpoint_with_the_reason(
    twins: Path, tmp_path: Path
) -> None:
    """Each server keeps two ranks' streams, and rank 2 needs those of ranks 1 and 3."""
    reasons = []
    for server in "01":
        place = tmp_path / server
        place.mkdir()
        report = passed(
            drill("--log-servers", "2", *kills(RANK, f"log={server},step=8"), twins=twins, at=place)
        )
        placed, gone = report["log"]["placement"], report["log"]["lost"][0].split()[2]
        needed = placed["1"] + placed["3"]
        assert (report["strategy"]["2"] == "checkpoint") == (gone in needed)
        reasons.append(report["reason"])
    assert any("cannot replay stage 2" in reason and "is lost" in reason for reason in reasons)


def test_a_log_server_is_lost_while_a_rank_replays_from_it(twins: Path, tmp_path: Path) -> None:
    flags = ["--log-servers", "2", "--copies", "2"]
    for server in "01":
        place = tmp_path / server
        place.mkdir()
        report = passed(drill(*flags, *kills(RANK, f"log={server},phase=replay"), twins=twins, at=place))
        assert report["strategy"]["2"] in ("replay", "catch_up")
        assert "checkpoint" not in report["strategy"].values()
