"""What a session is told about recovery groups, and what it says where `swift-ft run` has not started it."""

import sys

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


def test_groups_that_are_none_are_bad_input() -> None:
    with pytest.raises(UsageError, match="2 does not begin at 1"):
        SessionConfig(groups="0,2")


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
