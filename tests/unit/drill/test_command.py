"""Flags to a checked configuration, and back to the command that repeats it."""

import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_ft import fault_grammar
from swift_ft.errors import UsageError
from swift_ft.lab.command_line import until_stopped
from swift_ft.lab.drill import command, report, run
from swift_ft.lab.drill.command import parse
from swift_ft.lab.drill.options import DEFAULT_KILL

SHRINK = "--stages 1 --replicas 4 --steps 12 --checkpoint-every 5 --microbatches 4 --strategy shrink"
KILL = "--kill rank=2,step=5,microbatch=3"
THREE = "--stages 1 --replicas 3 --steps 4 --checkpoint-every 2 --microbatches 1 --model tiny"
LOSSY = f"{THREE} --strategy lossy-forward --allow-inexact"
CUT = "--kill rank=2,step=1,phase=reduce"
TWO_COPIES = "--log-servers 2 --copies 2"
HYBRID = "--stages 2 --replicas 2"
RESTORE = "--strategy checkpoint"
KILL_1 = "--kill rank=1"


def test_the_default_drill() -> None:
    config = parse([])
    assert [str(fault) for fault in config.faults] == [DEFAULT_KILL]
    assert config.topology.ranks == 4
    assert config.topology.steps == 30


@pytest.mark.parametrize(
    ("arguments", "kill"),
    [
        ("--stages 2", "rank=1,step=17,microbatch=3,phase=backward"),
        ("--steps 10", "rank=2,step=5,microbatch=3,phase=backward"),
        ("--steps 1", "rank=2,step=0,microbatch=3,phase=backward"),
        ("--stages 2 --microbatches 2", "rank=1,step=17,microbatch=1,phase=backward"),
        ("--checkpoint-every 17", "rank=2,step=16,microbatch=3,phase=backward"),
        ("--checkpoint-every 1", "rank=2,step=16,microbatch=3,phase=backward"),
    ],
)
def test_a_smaller_drill_has_a_default_kill_as_well(arguments: str, kill: str) -> None:
    assert [str(fault) for fault in parse(arguments.split()).faults] == [kill]


def test_rerun_is_a_command_of_this_program() -> None:
    arguments = "--stages 2 --steps 20 --schedule ZBV --seed 7 --strategy Replay --spares 2 --model tiny"
    config = parse([*arguments.split(), "--kill", "rank=1,step=3", "--kill", "service=logserver,step=2"])
    words = shlex.split(config.rerun())
    assert words[:2] == ["swift-ft", "drill"]
    again = parse(words[2:])
    assert again == config
    assert again.topology.schedule == "zbv"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("--strategy replica", "add --replicas 2"),
        ("--updates wait_free", "add --replicas 2"),
        ("--data-parallel ddp", "add --replicas 2"),
        ("--reduction ordered", "add --replicas 2"),
        ("--undo arithmetic", "add --updates wait_free"),
        ("--replicas 2 --undo arithmetic", "add --updates wait_free"),
        ("--replicas 2 --updates wait_free --data-parallel ddp", "leave out --updates wait_free"),
        ("--replicas 2 --data-parallel ddp --reduction fast", "leave out --reduction fast"),
        ("--replicas 2 --data-parallel ddp --schedule zbv", "use --data-parallel session"),
        ("--replicas 2 --data-parallel ddp --schedule InterleavedZeroBubble", "use --data-parallel session"),
        ("--optimizer adafactor", "adamw, sgd, amsgrad"),
        ("--replicas 2 --updates sometimes", "after_backward, wait_free"),
        ("--stages 1", "at least 2, or 1 with --replicas"),
        ("--log-servers 0", "--log-servers must be 1 to 16"),
        ("--copies 2", "--copies must be 1 to 1"),
        ("--log-servers 2 --copies 0", "--copies must be 1 to 2"),
        (f"{TWO_COPIES} --kill rank=2,step=8 --kill corrupt=log,step=8", "another copy: leave --copies out"),
        (f"{THREE} --strategy lossy-forward {CUT}", "add --allow-inexact"),
        (
            f"{LOSSY} --lost-shard redistribute {CUT}",
            "nobody computes the batches of a lost rank; leave it out",
        ),
        (f"{LOSSY} --kill rank=1,phase=finish", "nothing finishes unless another --kill"),
        (f"{THREE} --strategy shrink {CUT} --kill rank=1,phase=finish", "--strategy shrink finishes nothing"),
        (
            "--stages 2 --replicas 2 --strategy lossy-forward --allow-inexact --kill rank=1,step=3",
            "give --stages 1",
        ),
        (f"{LOSSY} {CUT} --reduction fast", "leave it out"),
        ("--stages 2 --replicas 2 --strategy shrink --lost-shard drop", "would have nothing to do"),
        ("--stages 4 --strategy shrink --grow step=20", "has moved, and is there"),
        ("--stages 4 --strategy rollback", "leave out what drops or takes back"),
        (
            "--stages 2 --replicas 2 --strategy shrink --kill rank=0,step=5 --kill rank=3,step=6",
            "every pipeline loses a rank; leave one whole",
        ),
        ("--stages 1 --strategy shrink", "--replicas 2 or more"),
        (
            "--strategy adaptive --stages 2 --replicas 2 --exact-gradients off",
            "--exact-gradients off is not exact",
        ),
        ("--stages 2 --replicas 2 --adaptive-memory 2", "--adaptive-memory needs --strategy adaptive"),
        (
            "--stages 1 --replicas 2 --lost-shard reroute",
            "it is for pipelines; use --lost-shard redistribute",
        ),
        ("--strategy replay --lost-shard drop", "with --strategy replay: a lost rank comes back"),
        ("--replicas 1 --lost-shard redistribute", "nobody else holds a lost rank's state"),
        (
            "--stages 1 --replicas 2 --lost-shard redistribute --grow step=9",
            "a process that comes takes the lost rank's place",
        ),
        ("--grow step=20", "--grow step=20 needs --strategy shrink"),
        (f"{SHRINK} {KILL} --lost-shard drop", "add --allow-inexact"),
        (f"{SHRINK} {KILL} --lost-shard keep", "one of redistribute, reroute, drop"),
        (f"{SHRINK} {KILL} --grow 8", "write step=N"),
        (f"{SHRINK} {KILL} --grow step=4", "comes later"),
        (f"{SHRINK} {KILL} --grow step=11", "at most 10"),
        (f"{SHRINK} {KILL} --updates wait_free", "leave it out"),
        (f"{SHRINK} {KILL} --reduction fast", "leave it out"),
        (f"{SHRINK} {KILL} --kill rank=2,step=8", "killed twice"),
        (f"{SHRINK} {KILL} --kill rank=0,step=6 --kill rank=1,step=7 --kill rank=3,step=8", "leave one"),
        (f"{SHRINK} --kill service=logserver,step=3 --grow step=5", "no rank is lost"),
        (
            "--stages 2 --strategy replay --snapshot-every 5 --kill rank=1,step=3",
            "--snapshot-every 5 needs --strategy snapshot or auto",
        ),
        ("--stages 4 --helpers 2 --groups 0-1,2,3 --kill rank=1,step=3", "is a recovery group by itself"),
        ("--stages 2 --strategy snapshot --snapshot-every -1 --kill rank=1,step=3", "must be 0 to"),
        ("--stages 2 --kill rank=1,step=3,phase=snapshot", "there is no phase snapshot"),
        ("--stages 2 --strategy snapshot --kill rank=1,phase=copy", "nothing copies unless another --kill"),
        # one option alone
        ("--steps x", "--steps"),
        ("--step 3", "--step"),
        ("positional", "positional"),
        ("--seed -1", "must be 0 to"),
        ("--spares -1", "must be 0 to"),
        ("--model gpt", "one of tiny, default, paced"),
        ("--strategy hope", "one of"),
        ("--rehearse sometimes", "one of start, always, off"),
        ("--kill rank=2", "step is missing"),
        # the shape
        ("--replicas 65", "make 260 ranks"),
        ("--stages 300 --microbatches 300", "make 300 ranks"),
        ("--stages 0 --replicas 2", "--stages must be 1 to"),
        ("--replicas 0", "--replicas must be 1 to"),
        ("--stages 1 --replicas 2 --schedule zbv", "use 1f1b or gpipe"),
        ("--steps 0", "--steps must be 1 to"),
        ("--checkpoint-every 0", "--checkpoint-every must be 1 to"),
        ("--schedule 1f2b", "1f1b, gpipe, interleaved1f1b, interleavedzerobubble, zbv, dualpipev"),
        ("--microbatches 3", "must be 4 or more"),
        ("--schedule dualpipev --microbatches 7", "must be 8 or more"),
        ("--schedule interleaved1f1b --microbatches 9", "multiple of 2"),
        # faults that the shape cannot have
        ("--kill rank=4,step=3", "rank must be 0 to 3"),
        ("--kill rank=2,step=30", "step must be 0 to 29"),
        ("--kill rank=2,step=3,microbatch=8", "microbatch must be 0 to 7"),
        (
            "--kill rank=2,step=3,phase=reduce",
            "phases here: forward, backward, optimizer, idle, save, replay",
        ),
        ("--kill rank=2,step=17,phase=save", "no checkpoint is written behind that step"),
        ("--kill rank=2,phase=replay", "nothing replays"),
        ("--kill service=logserver,step=30", "step must be 0 to 29"),
        ("--log-servers 2 --kill log=2,step=3", "log must be 0 to 1"),
        ("--log-servers 2 --kill log=1,step=30", "step must be 0 to 29"),
        ("--log-servers 2 --kill log=1,phase=replay", "nothing replays"),
        ("--log-servers 2 --kill log=1,step=3 --kill log=0,step=9", "no log server would be left"),
        ("--kill service=coordinator,state=recovering", "kill a rank as well"),
        ("--kill corrupt=log,step=17", "no rank is killed at that step"),
        ("--kill rank=2,step=20 --kill corrupt=log,step=20", "no multiple of 10"),
        ("--kill rank=2,step=17 --kill corrupt=log,step=17,stream=s2.F", "only the streams s1.F, s3.B"),
        (f"{HYBRID} --kill rank=4,step=3", "rank must be 0 to 3"),
        (
            f"{HYBRID} --kill rank=3,step=3,phase=update",
            "phases here: forward, backward, reduce, optimizer, idle, save, replay, copy",
        ),
        (f"{HYBRID} --kill rank=1,phase=copy", "nothing copies"),
        (f"{HYBRID} --kill rank=1,phase=copy --kill rank=2,phase=copy", "nothing copies"),
        (
            f"{HYBRID} --strategy replay {KILL_1},step=3 {KILL_1},phase=copy",
            "--strategy replay copies nothing",
        ),
        (f"{HYBRID} --strategy replica {KILL_1},step=3 {KILL_1},phase=replay", "replica replays nothing"),
        (f"{HYBRID} --strategy checkpoint {KILL_1},step=3 {KILL_1},phase=copy", "checkpoint copies nothing"),
        (f"{HYBRID} {KILL_1},step=7 --kill corrupt=log,step=7", "add --strategy replay"),
        (f"{HYBRID} {KILL_1},step=7 --kill corrupt=copy,rank=2", "rank 2 is given no state"),
        (f"{HYBRID} --strategy replay {KILL_1},step=7 --kill corrupt=copy,rank=1", "nothing is copied with"),
        (
            f"{HYBRID} --strategy replay {KILL_1},step=7 --kill corrupt=log,step=7,stream=s1.B",
            "only the streams s1c1.B",
        ),
        (
            f"--stages 1 --replicas 2 --strategy replay {KILL_1},step=7 --kill corrupt=log,step=7",
            "reads no stream",
        ),
        # where all restore a checkpoint
        (f"{RESTORE} {KILL_1},step=17 --kill rank=2,phase=replay", "--strategy checkpoint replays nothing"),
        (f"{RESTORE} {KILL_1},step=17 --kill corrupt=log,step=17", "--strategy checkpoint never reads"),
        (f"{RESTORE} {KILL_1},step=17 --kill corrupt=checkpoint,rank=4,step=17", "rank must be 0 to 3"),
        (f"{RESTORE} {KILL_1},step=17 --kill corrupt=checkpoint,rank=1,step=30", "step must be 0 to 29"),
        (f"{RESTORE} {KILL_1},step=17 --kill corrupt=checkpoint,rank=1,step=16", "no rank is killed at that"),
        (f"{RESTORE} {KILL_1},step=20 --kill corrupt=checkpoint,rank=1,step=20", "no multiple of it"),
        (f"{RESTORE} {KILL_1},step=7 --kill corrupt=checkpoint,rank=1,step=7", "one before it"),
        (f"{KILL_1},step=17 --kill corrupt=checkpoint,rank=3,step=17", "only with --strategy checkpoint"),
        ("--stages 2 --strategy snapshot --kill rank=1,step=3 --kill rank=0,phase=replay", "replays nothing"),
        (
            "--stages 2 --strategy snapshot --kill rank=1,step=3 --kill corrupt=log,step=3",
            "never reads the log",
        ),
    ],
)
def test_what_cannot_go_together_is_refused_in_one_line(arguments: str, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(arguments.split())
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        "--stages 2 --replicas 2 --steps 40 --updates wait-free --undo arithmetic --optimizer SGD "
        "--reduction ordered --seed 5 --kill rank=3,step=9,phase=update",
        "--stages 2 --strategy snapshot --snapshot-every 2 --kill rank=1,step=4,phase=snapshot "
        "--kill rank=0,phase=copy --kill corrupt=copy,rank=1",
        f"{SHRINK} {KILL}",
        f"{SHRINK} {KILL} --lost-shard redistribute",
        f"{SHRINK} {KILL} --grow step=8",
        "--stages 4 --helpers 2 --groups 0-1,2,3 --kill rank=1,step=3 --kill rank=2,step=3",
        "--stages 4 --helpers 2 --groups 0-3 --kill service=logserver,step=3",
        f"{TWO_COPIES} --kill log=1,step=5",
        "--log-servers 2 --kill rank=2,step=8 --kill corrupt=log,step=8",
        "--kill rank=0,step=0 --kill rank=3,step=29,phase=idle",
        "--kill rank=0,step=9,phase=save --kill rank=3,step=29,phase=save",
        "--kill rank=2,step=17 --kill rank=2,phase=replay",
        "--kill rank=2,step=17 --kill service=coordinator,state=recovering",
        "--kill service=coordinator,state=running",
        "--log-servers 2 --kill log=1,step=29",
        "--log-servers 2 --kill rank=2,step=17 --kill log=1,phase=replay",
        "--kill rank=2,step=17 --kill corrupt=log,step=17,stream=s3.B",
        f"{HYBRID} --kill rank=3,step=3,phase=reduce {KILL_1},step=3 --kill rank=2,phase=copy",
        f"{HYBRID} --updates wait_free --kill rank=0,step=3,phase=update",
        f"{HYBRID} --strategy replay --kill rank=3,step=7 --kill corrupt=log,step=7",
        f"{HYBRID} --kill rank=3,step=7 --kill rank=0,phase=replay",
        f"{HYBRID} --strategy replica --kill rank=3,step=7 --kill rank=0,phase=copy",
        f"{RESTORE} {KILL_1},step=17 --kill corrupt=checkpoint,rank=3,step=17",
    ],
)
def test_rerun_is_the_same_drill(arguments: str) -> None:
    config = parse(arguments.split())
    assert parse(shlex.split(config.rerun())[2:]) == config


def test_the_twin_does_not_depend_on_how_a_failure_is_met() -> None:
    words = ["--stages", "2", "--replicas", "2", "--updates", "wait_free", "--kill", "rank=0,step=3"]
    plain = parse(words)
    assert parse([*words, "--undo", "arithmetic", "--strategy", "replay"]).identity() == plain.identity()
    for other in ("--optimizer sgd", "--reduction ordered"):
        assert parse([*words, *other.split()]).identity() != plain.identity()
    assert parse([*words, "--updates", "after_backward"]).identity() != plain.identity()


def test_paths_are_checked_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--json"):
        command.check_paths(parse(["--json", str(tmp_path)]))
    with pytest.raises(UsageError, match="--html"):
        command.check_paths(parse(["--html", str(tmp_path / "no" / "page.html")]))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--directory"):
        command.check_paths(parse(["--directory", str(tmp_path / "file")]))
    with pytest.raises(UsageError, match="--twin"):
        command.check_paths(parse(["--twin", str(tmp_path)]))


def test_a_device_that_is_not_here_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank divided by the number of devices, 0: a traceback, after the services had started."""
    monkeypatch.setattr(command, "drill", lambda config: 0)
    assert command.main(["--device", "banana"]) == 2
    assert "swift: --device banana: torch finds" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk took the outcome of the whole drill."""
    found = {"verdict": report.PASS}
    monkeypatch.setattr(run.FaultedRun, "run", lambda *_: None)
    monkeypatch.setattr(report, "build", lambda *_: found)
    monkeypatch.setattr(command, "show", lambda result: print(result["verdict"]))
    assert command.main(["--model", "tiny", "--json", "/dev/full"]) == 3
    shown = capsys.readouterr()
    assert shown.out == "PASS\n"
    assert shown.err == "swift: cannot write /dev/full: No space left on device; give another place\n"


def test_help_begins_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == command.DESCRIPTION
    for phase in fault_grammar.PHASES:
        assert any(phase in line for line in rest)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """`until_stopped` sets handlers of the whole process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_under_nohup_a_terminal_that_goes_away_ends_nothing() -> None:
    def hung_up() -> int:
        signal.raise_signal(signal.SIGHUP)
        return 0

    assert until_stopped("drill", hung_up) == 128 + signal.SIGHUP
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert until_stopped("drill", hung_up) == 0


def test_a_pipe_that_nobody_reads_is_left_to_whoever_called() -> None:
    """It was an error of the environment: one line, and exit code 3."""

    def unread() -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        until_stopped("drill", unread)
