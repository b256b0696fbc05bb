"""What the command takes, and what it refuses in one line."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from swift_ft.fault_grammar import RankFault
from swift_ft.lab.determinism import command


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def test_what_follows_the_script_is_the_scripts(script: str) -> None:
    config = command.parse(["--nproc-per-node", "2", script, "--json", "x", "{run}/c"])
    assert list(config.arguments) == ["--json", "x", "{run}/c"]
    assert (config.ranks, config.json_path, config.own_checkpoints, config.replaces) == (2, None, False, True)


def test_a_kill_is_in_the_update_unless_it_says_otherwise(script: str) -> None:
    assert command.parse(["--kill", "rank=0,step=3", script]).kill == RankFault(
        rank=0, step=3, phase="optimizer"
    )
    given = command.parse(["--kill", "rank=0,step=3,phase=idle", script]).kill
    assert given == RankFault(rank=0, step=3, phase="idle")


def test_who_shares_a_lost_ranks_batches_needs_no_replacement(script: str) -> None:
    assert not command.parse(["--strategy", "shrink", script]).replaces
    assert not command.parse(["--strategy", "auto", "--lost-shard", "reroute", script]).replaces
    assert command.parse(["--strategy", "checkpoint", script]).replaces


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent.py"], "absent.py: there is no such script"),
        (["--nproc-per-node", "0", "SCRIPT"], "--nproc-per-node 0: 1 or more"),
        (["--patience-s", "0", "SCRIPT"], "--patience-s 0: seconds, more than 0"),
        (["--kill", "rank=1,step=2", "SCRIPT"], "there are ranks 0 to 0"),
        (["--kill", "rank=0", "SCRIPT"], "step is missing"),
        (["--kill", "service=logserver,step=2", "SCRIPT"], "--kill"),
        (["--kill", "rank=0,phase=replay", "SCRIPT"], "write rank=R,step=S"),
        (["--own-checkpoints", "--kill", "rank=0,step=2,phase=idle", "SCRIPT"], "write rank=R,step=S"),
        (["--own-checkpoints", "--strategy", "replay", "SCRIPT"], "--strategy is for scripts with a session"),
        (["--own-checkpoints", "--snapshot-every", "2", "SCRIPT"], "--snapshot-every is for scripts"),
        (["--strategy", "fly", "SCRIPT"], "--strategy"),
        # They promise no bits.
        (["--strategy", "lossy-forward", "SCRIPT"], "--strategy"),
        (["--lost-shard", "drop", "SCRIPT"], "--lost-shard"),
        (["--json", "/no/such/place.json", "SCRIPT"], "give a file in a directory that exists"),
        (["--directory", "PLACE", "SCRIPT"], "not empty; give a new one"),
        ([], "TRAIN_SCRIPT"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], message: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"SCRIPT": script, "PLACE": str(Path(script).parent)}
    assert command.main([place.get(word, word) for word in words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert message in told.err


def test_a_verdict_that_cannot_be_written_is_shown(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "verify", lambda _: SimpleNamespace(exit_code=0))
    monkeypatch.setattr(command, "as_json", lambda _: {})
    monkeypatch.setattr(command, "verdict_lines", lambda _: ["EQUAL"])
    assert command.main(["--json", "/dev/full", script]) == 3
    shown = capsys.readouterr()
    assert shown.out == "EQUAL\n"
    assert shown.err == "swift: cannot write /dev/full: No space left on device; give another place\n"
