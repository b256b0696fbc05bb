"""Settings of a session: what ranks agree on, what is refused, and what is said without `swift-ft run`."""

import re
import sys
from typing import Any

import pytest

from swift_ft.errors import UsageError
from swift_ft.train.config import SessionConfig
from swift_ft.train.session import Session


def test_all_ranks_agree_on_groups_however_they_are_written() -> None:
    one, other = SessionConfig(groups=" 0-1, 2-2"), SessionConfig(groups="0-1,2")
    assert one.agreed() == other.agreed()
    assert one.agreed()["groups"] == "0-1,2"
    assert one.agreed() != SessionConfig(groups="0,1-2").agreed()
    assert SessionConfig().agreed()["groups"] == ""


def test_what_a_job_of_before_has_not_agreed_on_is_left_out_at_its_default() -> None:
    usual = SessionConfig().agreed()
    assert not {"tensor_parallel", "require_exact", "snapshot_every", "staggered"} & usual.keys()
    assert SessionConfig(require_exact=True).agreed() == usual | {"require_exact": "True"}


SHRINK, AUTO = {"strategy": "shrink"}, {"lost_shard": "redistribute"}
LOSSY = {"strategy": "lossy-forward", "replicas": 2}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"groups": "0,2"}, "2 does not begin at 1"),
    ({"checkpoint_mode": "later"}, "checkpoint_mode='later'; give one of async, sync"),
    ({"non_finite_loss": "stop"}, "non_finite_loss='stop'; give one of warn, fail, ignore"),
    ({"log_when_full": "wait"}, "log_when_full='wait'; give one of block, drop"),
    ({"log_when_full": ""}, "log_when_full=''; give one of block, drop"),
    ({"strategy": "snapshot", "snapshot_every": -1}, "snapshot_every=-1"),
    ({"strategy": "replay", "snapshot_every": 5}, "nobody goes back to snapshots"),
    (LOSSY, "allow_inexact=True"),
    (LOSSY | AUTO | {"allow_inexact": True}, "nobody computes the batches of a lost rank; leave it out"),
    (SHRINK | {"replicas": 1, "lost_shard": "drop"}, "give at least 2 replicas, without shards"),
    (SHRINK | {"replicas": 2, "shards": 2}, "give at least 2 replicas, without shards"),
    (SHRINK | {"replicas": 2, "lost_shard": "drop"}, "say allow_inexact=True"),
    (
        SHRINK | {"replicas": 2, "lost_shard": "some"},
        "lost_shard='some'; give one of redistribute, reroute, drop, quickest",
    ),
    (SHRINK | {"replicas": 2, "updates": "wait_free"}, "use updates='after_backward'"),
    (SHRINK | {"replicas": 3, "reduction": "fast"}, "use reduction='ordered'"),
    (
        SHRINK | {"replicas": 2, "lost_shard": "reroute"},
        "one rank computes a lost one's batch; leave it out, or use adaptive",
    ),
    (
        SHRINK | {"replicas": 2, "lost_shard": "quickest"},
        "lost_shard='quickest' with strategy='shrink': only auto chooses",
    ),
    (AUTO | {"replicas": 1}, "replicas=1 and shards=1: others go on"),
    (AUTO | {"replicas": 2, "shards": 2}, "without shards"),
    (AUTO | {"replicas": 2, "lost_shard": "drop"}, "say allow_inexact=True"),
    (AUTO | {"replicas": 2, "updates": "wait_free"}, "use updates='after_backward'"),
    (AUTO | {"replicas": 2, "snapshot_every": 4}, "keeps no snapshot; leave one out"),
    (
        AUTO | {"replicas": 2, "adaptive_memory": 2.0},
        "it is for strategy='adaptive', and for 'auto' with lost_shard='reroute'",
    ),
    *(
        (
            {"strategy": strategy, "replicas": 2, "lost_shard": lost_shard, "allow_inexact": True},
            f"lost_shard='{lost_shard}' with strategy='{strategy}': a lost rank comes",
        )
        for strategy in ("replay", "snapshot")
        for lost_shard in ("redistribute", "drop")
    ),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=str)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        SessionConfig(**given)


@pytest.mark.parametrize(
    ("machines", "command"),
    [
        ("1", "swift-ft run --standalone --nproc-per-node 4 train.py --name 'a b'"),
        (
            "2",
            "swift-ft run --coordinator HOST:PORT --job NAME --checkpoint-dir DIR --nnodes 2 --nproc-per-node 4 "
            "train.py --name 'a b'",
        ),
    ],
)
def test_a_session_under_torchrun_names_the_command_that_it_needs(
    machines: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": machines}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SWIFT_COORDINATOR", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--name", "a b"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    with pytest.raises(UsageError) as refused:
        Session.from_env()
    assert str(refused.value) == f"SWIFT_COORDINATOR is not set: start the script with `{command}`"


# -- what the environment says of the job, before it becomes a part of a path --------------------------


ENVIRONMENT = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "SWIFT_COORDINATOR": "127.0.0.1:1",
    "SWIFT_JOB": "j",
    "SWIFT_INCARNATION": "i",
}


@pytest.mark.parametrize("job", ["../up", "/abs", "a/b", "", ".", "..", "x\n", "x" * 65])
def test_a_job_name_cannot_leave_the_checkpoints(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (ENVIRONMENT | {"SWIFT_JOB": job, "SWIFT_CHECKPOINT_DIR": "/nowhere"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="is not allowed"):
        Session.from_env()


def test_a_job_without_a_directory_for_checkpoints_is_told_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SWIFT_CHECKPOINT_DIR", raising=False)
    with pytest.raises(UsageError, match="swift-ft run --checkpoint-dir DIR"):
        Session.from_env()
