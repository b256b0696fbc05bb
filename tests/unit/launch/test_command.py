"""Flags -> LaunchPlan: what is taken, what is refused, and with which words."""

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from swift_ft.errors import UsageError
from swift_ft.launch import command, run
from swift_ft.launch.command import PRELOAD_DEFAULT, Meeting, make_parser, make_plan
from swift_ft.launch.decisions import Outcome
from swift_ft.launch.ranks import Std
from swift_ft.launch.rendezvous import Terms
from swift_ft.text import NAME_PATTERN

COORDINATOR = "--coordinator=127.0.0.1:5000"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a script; the environment comes back as it was."""
    for name in ("SWIFT_COORDINATOR", "PET_MAX_RESTARTS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


def test_defaults() -> None:
    plan = make_plan([COORDINATOR, "train.py", "--lr", "1"])
    assert plan.meeting is Meeting.ALONE
    assert (plan.spare_count, plan.config.replacements, plan.config.max_restarts) == (1, 100, None)
    assert plan.grace_s == 5.0
    assert (plan.job.script, plan.job.args, plan.job.module) == ("train.py", ["--lr", "1"], False)
    assert NAME_PATTERN.fullmatch(plan.job.name)
    assert plan.output.file(0, Std.OUT, "stdout.log") is None
    assert {signal.SIGINT, signal.SIGTERM} <= set(plan.config.signals)


def test_torchruns_flags_pass_through() -> None:
    flags = ["--nnodes=2:4", "--nproc_per_node=3", "--rdzv-backend=c10d", "--rdzv-endpoint=host:29400"]
    flags += ["--rdzv-id=Big/Run", "--rdzv-conf=timeout=60", "--role=trainer", "--monitor-interval=0.5"]
    plan = make_plan([COORDINATOR, *flags, "--max-restarts=7", "-m", "json.tool", "x"])
    config = plan.config
    assert plan.meeting is Meeting.COORDINATOR
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 4, 3)
    assert (config.run_id, config.timeout_s) == ("Big/Run", 60)
    assert (config.role, config.monitor_interval) == ("trainer", 0.5)
    assert config.max_restarts == config.replacements == 7
    assert (plan.job.name, plan.job.module, plan.job.script) == ("Big~Run", True, "json.tool")
    assert plan.job.sys_path0() == os.getcwd()


def test_static_rendezvous_keeps_rank_and_address() -> None:
    flags = ["--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=1234", "--job=j"]
    plan = make_plan([COORDINATOR, *flags, "train.py"])
    config = plan.config
    assert plan.meeting is Meeting.NUMBERED
    assert (config.endpoint, config.node_rank) == (("10.0.0.1", 1234), 1)


@pytest.mark.parametrize(
    ("flags", "meeting"),
    [
        (["--nnodes=2", "--job=j"], Meeting.COORDINATOR),
        (["--nnodes=2", "--job=j", "--rdzv-backend=c10d"], Meeting.COORDINATOR),
        (["--nnodes=1:2", "--rdzv-id=j"], Meeting.COORDINATOR),
        (["--nnodes=2", "--job=j", "--node-rank=0"], Meeting.NUMBERED),
        (["--nnodes=2", "--job=j", "--master-addr=a01"], Meeting.NUMBERED),  # torchrun's node 0
        (["--nnodes=2", "--job=j", "--rdzv-endpoint=a01:1"], Meeting.NUMBERED),
        (["--nnodes=1", "--node-rank=0"], Meeting.ALONE),
        (["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"], Meeting.ALONE),
    ],
)
def test_how_machines_know_of_each_other(flags: list[str], meeting: Meeting) -> None:
    assert make_plan([COORDINATOR, *flags, "train.py"]).meeting is meeting


def test_numbers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NODE_RANK", "1")
    monkeypatch.setenv("PET_MASTER_ADDR", "a01")
    plan = make_plan([COORDINATOR, "--nnodes=2", "--job=j", "train.py"])
    assert plan.meeting is Meeting.NUMBERED
    assert (plan.config.node_rank, plan.config.endpoint) == (1, ("a01", 29500))


def test_a_switch_in_the_environment_that_is_no_number_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_STANDALONE", "true")
    assert command.main(["train.py"]) == 2
    assert capsys.readouterr().err == "swift: run: PET_STANDALONE=true: 0 or 1\n"


def test_an_endpoint_that_nobody_needs_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--nnodes=2", "--job=j", "--rdzv-backend=c10d", "--rdzv-endpoint=a01:29400"]
    flags += ["--rdzv-conf=join_timeout=60,keep_alive_interval=1,is_host=1"]
    plan = make_plan([COORDINATOR, *flags, "train.py"])
    assert plan.meeting is Meeting.COORDINATOR
    said = capfd.readouterr().err
    assert said == "swift: machines meet at the coordinator: nobody needs --rdzv-endpoint a01:29400\n"
    make_plan([COORDINATOR, *flags[:3], "--node-rank=0", "--master-addr=a01", "train.py"])
    words = "nobody needs --node-rank 0, --master-addr a01"
    assert capfd.readouterr().err == f"swift: machines meet at the coordinator: {words}\n"
    make_plan([COORDINATOR, *flags[:3], "train.py"])
    assert capfd.readouterr().err == ""
    assert plan.terms == Terms(join_timeout=60, keep_alive_interval=1)


def test_threads_are_one_each_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for nproc, given, found in (("2", None, "1"), ("1", None, None), ("2", "6", "6")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        make_plan([COORDINATOR, f"--nproc-per-node={nproc}", "train.py"])
        assert os.environ.get("OMP_NUM_THREADS") == found


def test_coordinator_and_restarts_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFT_COORDINATOR", "10.0.0.9:7")
    monkeypatch.setenv("SWIFT_INSECURE", "1")
    monkeypatch.setenv("PET_MAX_RESTARTS", "4")
    plan = make_plan(["train.py"])
    assert (plan.job.coordinator, plan.config.max_restarts) == ("10.0.0.9:7", 4)


def test_the_start_method_is_fork_unless_flag_or_environment_say_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert make_plan([COORDINATOR, "train.py"]).fork
    assert not make_plan([COORDINATOR, "--start-method=spawn", "train.py"]).fork
    monkeypatch.setenv("PET_START_METHOD", "spawn")
    assert not make_plan([COORDINATOR, "train.py"]).fork
    monkeypatch.setenv("PET_START_METHOD", "forkserver")
    with pytest.raises(UsageError, match="--start-method forkserver: fork or spawn"):
        make_plan([COORDINATOR, "train.py"])


def test_output_goes_where_the_flags_say(tmp_path: Path) -> None:
    flags = ["--nproc-per-node=3", "--log-dir=logs", "--redirects=0:3,1:2", "--local-ranks-filter=0,1"]
    plan = make_plan([COORDINATOR, *flags, "--rdzv-id=team/run", "train.py"])
    found = {
        (rank, stream.name): plan.output.file(rank, stream, "f")
        for rank in range(3)
        for stream in (Std.OUT, Std.ERR)
    }
    run_dir = plan.output.run_dir
    assert run_dir is not None
    assert run_dir.parent.resolve() == tmp_path / "logs"
    assert run_dir.name.startswith("team~run_")
    assert found == {
        (0, "OUT"): str(run_dir / "attempt_0" / "0" / "f"),
        (0, "ERR"): str(run_dir / "attempt_0" / "0" / "f"),
        (1, "OUT"): None,
        (1, "ERR"): str(run_dir / "attempt_0" / "1" / "f"),
        (2, "OUT"): os.devnull,
        (2, "ERR"): os.devnull,
    }


REFUSED = {
    "--from-version=3": "--from-version 3: name the job as well, with --from-job",
    "--from-job=j --from-version=-1": "--from_version: -1: 0 or more",
    "--from-job=J!": "job name 'J!' is not allowed",
    "--job=j --from-job=j": "--from-job j: a job goes on from its own checkpoints",
    "--strategy=lossy-forward --lost-shard=redistribute": (
        "--lost-shard redistribute with --strategy lossy-forward: nobody computes the batches"
    ),
    "--strategy=replica --lost-shard=drop": "--lost-shard drop with --strategy replica: a lost rank comes back",
    "--standalone": "--standalone starts a coordinator of its own",
    "--nproc-per-node=many": "--nproc-per-node many: 1 or more, or auto, cpu, gpu or xpu",
    "--nproc-per-node=0": "--nproc-per-node 0",
    "--nnodes=a:b": "--nnodes a:b",
    "--nnodes=3:2 --job=j": "--nnodes 3:2: a number of machines, or MIN:MAX",
    "--nnodes=2 --job=j --node-rank=2": "--node-rank 2: 0 to 1",
    "--nnodes=2 --job=j --node-rank=-1": "--node-rank -1: 0 to 1",
    "--nnodes=2": "--job NAME or --rdzv-id ID",
    "--spares=-1": "--spares: -1: 0 or more",
    "--max-restarts=-1": "max-restarts",
    "--preload=json,no_such.thing": "--preload no_such.thing: there is no such",
    "--monitor-interval=0": "--monitor-interval 0",
    "--monitor-interval=1e12": "at most 604800",
    "--job=Über": "job name 'Über' is not allowed",
    "--redirects=9": "--redirects 9: 0 to 3, or ",
    "--local-ranks-filter=x": "--local-ranks-filter x: numbers",
    "--log-dir=train.py/logs": "name a directory that can be written",
    "--signals-to-handle=SIGWHAT": "no signal 'SIGWHAT'",
    "--signals-to-handle=SIGTERM,SIGKILL": "can handle SIGKILL",
    "--signals-to-handle=SIGSTOP": "can handle SIGSTOP",
    "--shutdown-timeout=-1": "--shutdown_timeout: -1: 0 to 604800",
    "--nnodes=2 --job=j --master-port=99999": "0 to 65535",
    "--rdzv-conf=nonsense": "nonsense",
    "--rdzv-conf=timeout=soon": "--rdzv-conf timeout=soon: 0.01 to 604800",
    "--rdzv-conf=timeout=inf": "--rdzv-conf timeout=inf",
    "--rdzv-conf=timeout=-1": "--rdzv-conf timeout=-1",
    "--rdzv-conf=join_timeout=soon": "join_timeout=soon: 0.01 to 3600",
    "--rdzv-backend=etcd --nnodes=2 --job=j": "--rdzv-backend etcd",
    "--nnodes=2 --job=j --rdzv-conf=last_call_timeout=-1": "last_call_timeout=-1: 0.01 to 3600",
    "--no-python": "not supported: --no-python",
    "--start-method=forkserver": "invalid choice: 'forkserver'",
    "--tee=3": "not supported: --tee",
    "--numa-binding=node": "not supported: --numa-binding",
    "--no-such-flag": "--no-such-flag",
}
"""Flags before the script -> what is said of them."""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        *(([COORDINATOR, *flags.split(), "train.py"], words) for flags, words in REFUSED.items()),
        (["train.py"], "--coordinator HOST:PORT is needed"),
        (["--coordinator=here", "train.py"], "'here' is not HOST:PORT"),
        (["--coordinator=http://127.0.0.1:7702", "train.py"], "'http://127.0.0.1:7702' is not HOST:PORT"),
        (["--standalone", "--failures=rank=0,step=1", "train.py"], "leave --standalone out"),
        (["--coordinator=127.0.0.1:99999", "train.py"], "'127.0.0.1:99999' is not HOST:PORT"),
        (["--coordinator=meta:7300", "train.py"], "meta:7300 is not loopback and SWIFT_TLS_CA is not set"),
        ([COORDINATOR], "SCRIPT"),
        ([COORDINATOR, "missing.py"], "there is no such script"),
        ([COORDINATOR, "-m", "no_such_module.main"], "no module named no_such_module"),
        ([COORDINATOR, "--rdzv-id=big run", "train.py"], "give another one with --job"),
        ([COORDINATOR, f"--shutdown-timeout={10**12}", "train.py"], "0 to 604800"),
    ],
)
def test_bad_flags_get_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError) as refused:
        make_plan(flags)
    assert words in str(refused.value)
    assert command.main(flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("swift: run: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "words"),
    [("SWIFT_TLS_CA", "No such file or directory"), ("SWIFT_TOKEN_FILE", "users other than its owner")],
)
def test_credentials_that_are_badly_kept_get_one_line(
    variable: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "kept"
    if variable == "SWIFT_TOKEN_FILE":
        path.write_text("token")
        path.chmod(0o644)
    monkeypatch.setenv(variable, str(path))
    assert command.main([COORDINATOR, "train.py"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"swift: run: --coordinator: {variable} {path}: {words}")
    assert err.count("\n") == 1


def test_a_job_may_have_capitals_and_a_slash() -> None:
    plan = make_plan([COORDINATOR, "--job=Team/Run-7", "--from-job=Team/Run-6", "train.py"])
    assert (plan.job.name, plan.job.from_job) == ("Team~Run-7", "Team~Run-6")
    for name in ("../x", "/x", "x y", "", ".x", "a\0"):
        with pytest.raises(
            UsageError, match=r"^run: argument --job: job name .* is not allowed: 1 to 64 letters"
        ):
            make_plan([COORDINATOR, f"--job={name}", "train.py"])


def test_a_job_without_a_name_gets_one_that_is_printed_and_can_be_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def runs(plan: command.LaunchPlan) -> Outcome:
        ran.append(plan.job.name)
        return Outcome(exit_code=0)

    monkeypatch.setattr(run, "run", runs)
    for _ in range(2):
        command.main([COORDINATOR, "train.py"])
        assert re.fullmatch("train-[a-z2-9]{6}", ran[-1])
        assert capsys.readouterr().err == f"swift: this is job {ran[-1]} (--job gives it another name)\n"
    assert len(set(ran)) == 2
    command.main([COORDINATOR, "--rdzv-id=Big-Run", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "train.py"])
    assert "this is job Big-Run (--job" in capsys.readouterr().err
    command.main([COORDINATOR, "--job=My/Run", "train.py"])
    assert "this is job My~Run (a / in a name is written ~, " in capsys.readouterr().err
    command.main([COORDINATOR, "--job=mine", "train.py"])
    assert capsys.readouterr().err == ""


def test_preload_adds_to_what_is_imported_anyway() -> None:
    base = PRELOAD_DEFAULT
    for flags, found in (
        ([], base),
        (["--preload", "numpy"], f"{base},numpy"),
        (["--preload=json,glob", "--preload=csv"], f"{base},json,glob,csv"),
        (["--preload-only=json"], "json"),
        (["--preload-only=json", "--preload=csv"], "json,csv"),
    ):
        assert make_plan([COORDINATOR, *flags, "train.py"]).preload == found


def test_the_job_to_begin_with_is_told_to_the_ranks() -> None:
    plan = make_plan([COORDINATOR, "--job=k", "--from-job=j", "--from-version=10", "train.py"])
    assert (plan.job.from_job, plan.job.from_version) == ("j", 10)
    plan = make_plan([COORDINATOR, "train.py"])
    assert (plan.job.from_job, plan.job.from_version) == ("", None)


def test_spares_can_import_what_they_are_told_to() -> None:
    for name in PRELOAD_DEFAULT.split(","):
        importlib.import_module(name)


def test_every_flag_of_torchruns_is_there_and_begins_with_the_same_value() -> None:
    ours = {action.dest: action for action in make_parser()._actions}
    theirs = {action.dest: action for action in get_args_parser()._actions}
    assert set(theirs) <= set(ours)
    for dest, action in theirs.items():
        assert set(action.option_strings) <= set(ours[dest].option_strings)
        assert action.nargs == ours[dest].nargs or dest == "training_script_args"
    own = {"max_restarts", "start_method", "node_rank", "master_addr"}  # None: not given
    parsed = vars(make_parser().parse_args(["x.py"]))
    for dest, value in vars(get_args_parser().parse_args(["x.py"])).items():
        assert (
            dest in own or parsed[dest] == value or not (parsed[dest] or value) or value in ("0", "null")
        ), dest


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--help"], 0),
        (["--no-such-flag"], 2),
        (["train.py"], 2),
        ([COORDINATOR, "--rdzv-conf=nonsense", "train.py"], 2),
        (["--coordinator=meta:7300", "train.py"], 2),
        (["--standalone", "--nproc-per-node=x", "train.py"], 2),
    ],
)
def test_help_and_usage_errors_take_half_a_second_at_most(flags: list[str], code: int) -> None:
    """Of a core: a machine with other work takes longer."""
    command = [sys.executable, "-X", "importtime", "-m", "swift_ft.launch", *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        imported = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == code
    assert "swift_ft.launch.command" in imported
    assert " torch" not in imported
    assert used.ru_utime + used.ru_stime < 0.5


def test_swifts_own_flags_come_first_in_groups() -> None:
    text = make_parser().format_help()
    titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert titles[2:] == [
        "the job",
        "recovery",
        "checkpoints",
        "processes and places",
        "going on with --strategy adaptive, or auto with --lost-shard reroute",
        "torchrun's flags",
        "torchrun's flags that are refused, with the way to go",
    ]
    assert text.startswith("Starts the ranks of a training job")
    assert {"--spares", "--rdzv-backend"} <= set(re.findall(r"^ +(--[a-z-]+)", text, re.MULTILINE))
    assert "--max_restarts" not in text


def test_standalone_needs_no_coordinator_and_is_named_after_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFT_COORDINATOR", "10.0.0.9:7")
    plan = make_plan(["--standalone", "train.py"])
    assert plan.standalone is not None
    assert (plan.meeting, plan.job.name, plan.job.coordinator) == (Meeting.ALONE, "train", "")
    assert plan.standalone.directory == Path("swift-train")
    assert plan.job.checkpoint_dir == str(tmp_path / "swift-train" / "checkpoints")
    plan = make_plan(["--standalone", "--job=run7", "--checkpoint-dir=c", "train.py"])
    assert plan.standalone is not None
    assert plan.standalone.directory == Path("swift-run7")
    assert plan.job.checkpoint_dir == str(tmp_path / "c")
    assert not list(tmp_path.glob("swift-*"))


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("no-such-check --now", " no-such-check --now: there is no such command"),
        ("train.py", " train.py: there is no such command"),
        ("./train.py", " ./train.py: it is not executable"),
        (" ", ": name a command"),
        ("sh -c 'x", " sh -c 'x: No closing quotation"),
        ("true", "-s 0: seconds, more than 0"),
    ],
)
def test_a_health_check_that_cannot_be_run_is_refused(command: str, complaint: str) -> None:
    flags = ["--health-check", command, *(["--health-check-s", "0"] if command == "true" else [])]
    with pytest.raises(UsageError) as refused:
        make_plan([COORDINATOR, *flags, "train.py"])
    assert str(refused.value) == f"run: --health-check{complaint}"


def test_a_health_check_is_a_command() -> None:
    check = make_plan([COORDINATOR, "--health-check", "true --fast 'a b'", "train.py"]).health_check
    assert check is not None
    assert check.words == ("true", "--fast", "a b")
    assert check.limit_s == 30
    assert make_plan([COORDINATOR, "train.py"]).health_check is None
