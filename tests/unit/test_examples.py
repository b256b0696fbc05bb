"""The examples for operators: every flag that they use exists, every metric is shown, every alert is explained."""

import argparse
import configparser
import contextlib
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from swift_ft import cli, cli_parser
from swift_ft.tokens import Authority, Role
from swift_ft.tools import completion
from swift_ft.train.metrics import FAMILIES as TRAINER
from swift_ft_services.coordinator.metrics import FAMILIES as COORDINATOR
from swift_ft_services.logserver.metrics import FAMILIES as LOG
from tests.unit.security.world import Keys
from tests.unit.test_documents import ROOT, help_of

SYSTEMD = ROOT / "examples" / "systemd"
UNITS = sorted(path for path in SYSTEMD.glob("*.service") if "@" not in path.name)
TOKEN = SYSTEMD / "swift-token@.service"
CONTAINERFILE = ROOT / "examples" / "container" / "Containerfile"
COMPOSE = ROOT / "examples" / "container" / "compose.yaml"
ALERTS = ROOT / "examples" / "prometheus" / "alerts.yaml"
DASHBOARD = ROOT / "examples" / "grafana" / "swift.json"
KUBERNETES = ROOT / "examples" / "kubernetes"
OPERATION = ROOT / "docs" / "operation.md"


def flags_of(command: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]*", help_of(command)))


def check_flags(words: list[str]) -> None:
    """`words` begin with the command of swift-ft."""
    known = flags_of(words[0])
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert used
    assert used <= known, used - known


class Unit(configparser.RawConfigParser):
    """A unit file, as far as it has each key once."""

    def __init__(self, path: Path) -> None:
        super().__init__(strict=True, delimiters=("=",), comment_prefixes=("#", ";"), interpolation=None)
        self.optionxform = str  # type: ignore[assignment, method-assign]
        self.read_string(path.read_text())


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_a_command_that_there_is(path: Path) -> None:
    unit = Unit(path)
    service = unit["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program == "/opt/swift/bin/swift-ft"
    check_flags(words)
    assert words[words.index("--listen") + 1] == "${SWIFT_LISTEN}"
    # All that it names comes from systemd, or has a default that the environment file may replace.
    defaults = dict(word.split("=", 1) for word in shlex.split(service["Environment"]))
    named = set(re.findall(r"\$\{(\w+)\}", service["ExecStart"]))
    assert named <= defaults.keys() | {"STATE_DIRECTORY", "RUNTIME_DIRECTORY"}
    for name in ("SWIFT_LISTEN", "SWIFT_METRICS"):
        host, port = cli_parser.host_and_port(defaults[name], name)
        assert cli_parser.is_loopback(host)
        assert port > 0
    environment_file = path.with_suffix(".env")
    assert service["EnvironmentFile"] == f"-/etc/swift/{environment_file.name}"
    assert environment_of(environment_file) == defaults
    assert (service["Restart"], service["ProtectSystem"], service["NoNewPrivileges"]) == (
        *("on-failure", "strict", "yes"),
    )
    assert int(service["LimitNOFILE"]) >= 8192
    assert unit["Install"]["WantedBy"] == "multi-user.target"


def environment_of(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_a_token_is_renewed_by_a_timer_for_the_user_who_needs_it(tmp_path: Path) -> None:
    """Its command is run as it stands there, with files of this test."""
    service, timer = Unit(TOKEN)["Service"], Unit(TOKEN.with_suffix(".timer"))
    assert service["Type"] == "oneshot"
    assert "--renew" not in service["ExecStart"], "the timer does that"
    assert service["RuntimeDirectoryPreserve"] == "yes", "or the token goes with the process that wrote it"
    assert "CAP_CHOWN" in service["CapabilityBoundingSet"].split()
    assert service["EnvironmentFile"] == "-/etc/swift/swift-token@%i.env"
    defaults = dict(word.split("=", 1) for word in shlex.split(service["Environment"]))
    example = environment_of(TOKEN.with_suffix(".env"))
    assert example == defaults | {"SWIFT_JOB": "run42"}
    every = re.fullmatch(r"\*:0/(\d+)", timer["Timer"]["OnCalendar"])
    assert every is not None
    assert 2 * int(every[1]) <= 60 * float(defaults["SWIFT_HOURS"]) / 2, "one turn may be missed"
    assert timer["Timer"]["OnActiveSec"] == "0"
    assert timer["Install"]["WantedBy"] == "timers.target"

    keys, out = Keys(tmp_path / "keys"), tmp_path / "run42.token"
    me = pwd.getpwuid(os.geteuid())
    given = example | {"SWIFT_SIGNING_KEY": str(keys.signing), "SWIFT_OWNER": me.pw_name}
    given["RUNTIME_DIRECTORY"] = str(tmp_path)
    program, *words = shlex.split(service["ExecStart"].replace("%i", "run42"))
    assert program == "/opt/swift/bin/swift-ft"
    words = [re.sub(r"\$\{(\w+)\}", lambda found: given[found[1]], word) for word in words]
    subprocess.run([sys.executable, "-m", "swift_ft.cli", *words], cwd=ROOT, timeout=60, check=True)
    grant = Authority(keys.verifying).grant(out.read_text().strip())
    assert (grant.job, grant.roles) == ("run42", {Role.WRITER, Role.REPLAYER})
    assert (out.stat().st_uid, stat.S_IMODE(out.stat().st_mode)) == (me.pw_uid, 0o600)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("path", [*UNITS, TOKEN, TOKEN.with_suffix(".timer")], ids=lambda path: path.name)
def test_systemd_finds_nothing_to_complain_about(path: Path, tmp_path: Path) -> None:
    """With a program in the place of the one that is not installed here."""
    for unit in {path, path.with_suffix(".service")}:  # a timer wants to see what it starts
        text = unit.read_text().replace("/opt/swift/bin/swift-ft", "/bin/true")
        text = re.sub(r"^(User|Group)=.*$", r"\1=root", text, flags=re.MULTILINE)
        (tmp_path / unit.name.replace("@", "@run42")).write_text(text)
    copy = tmp_path / path.name.replace("@", "@run42")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "SYSTEMD_COLORS": "0"},
    )
    about_it = [line for line in done.stderr.splitlines() if copy.name in line]
    assert about_it == []
    assert done.returncode == 0, done.stderr


def instructions() -> list[tuple[str, str]]:
    text = CONTAINERFILE.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def test_the_container_copies_what_there_is_and_runs_a_command_that_there_is() -> None:
    steps = instructions()
    assert {name for name, _ in steps} <= {
        *("FROM", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "STOPSIGNAL", "ENTRYPOINT", "CMD"),
    }
    for name, rest in steps:
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
    last = dict(steps)
    assert last["USER"] == "swift"
    assert json.loads(last["ENTRYPOINT"]) == ["/opt/swift/bin/swift-ft"]
    check_flags(json.loads(last["CMD"]))
    assert last["STOPSIGNAL"] == "SIGTERM"


def test_the_container_takes_nothing_from_the_network_but_by_its_hash() -> None:
    """Each pip either asks for hashes or asks nobody, and what the second kind needs is all there by then."""
    pips = [
        shlex.split(command.partition(" -m ")[2] if " -m pip" in command else command)
        for name, rest in instructions()
        if name == "RUN"
        for command in rest.split("&&")
        if re.search(r"\bpip\b", command)
    ]
    assert len(pips) >= 2
    for words in pips:
        assert ("--require-hashes" in words) != ("--no-index" in words), words
    fetched, installed = pips
    assert fetched[fetched.index("-r") + 1] == "requirements.hashed.txt"
    assert fetched[fetched.index("-d") + 1] == installed[installed.index("--find-links") + 1]
    hashed = (ROOT / "requirements.hashed.txt").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for requirement in (*project["project"]["dependencies"], *project["build-system"]["requires"]):
        package = re.split(r"[^\w-]", requirement)[0].replace("-", "[-_]")
        assert re.search(rf"^{package}==", hashed, re.MULTILINE | re.IGNORECASE), requirement


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load(COMPOSE.read_text()))


@pytest.mark.parametrize("name", ["logserver", "coordinator"])
def test_compose_starts_a_command_that_there_is(name: str) -> None:
    content = compose()
    service = content["services"][name]
    assert service["command"][0] == name
    check_flags(service["command"])
    health = service["healthcheck"]["test"]
    assert health[:2] == ["CMD", "/opt/swift/bin/swift-ft"]
    check_flags(health[2:])
    flags = dict(word.split("=", 1) for word in service["command"][1:])
    host, _ = cli_parser.host_and_port(flags["--listen"], "--listen")
    assert cli_parser.is_loopback(host)
    assert flags["--listen"] in health
    (volume,) = service["volumes"]
    source, target = volume.split(":")
    assert source in content["volumes"]
    assert flags["--directory"].startswith(f"{target}/")
    build = service.get("build")
    if build is not None:
        context = (COMPOSE.parent / build["context"]).resolve()
        assert context == ROOT
        assert (context / build["dockerfile"]) == CONTAINERFILE


def manifests(kind: str) -> list[dict[str, Any]]:
    """`scripts/cluster kubernetes` has the schemas, and runs them."""
    texts = [path.read_text() for path in sorted(KUBERNETES.glob("*.yaml"))]
    found = [each for text in texts for each in yaml.safe_load_all(text) if each["kind"] == kind]
    assert found, kind
    return found


def parsed(words: list[str]) -> argparse.Namespace:
    """By the parser of the command, which ends the process if it does not take them."""
    program, *rest = words
    assert program == "/opt/swift/bin/swift-ft"
    return completion.parser(cli._parsers()).parse_args(rest)


def served() -> dict[str, dict[str, Any]]:
    """Address → the pod's specification, of each pod of a service."""
    found = {}
    for each in manifests("StatefulSet"):
        name, spec = each["metadata"]["name"], each["spec"]
        (service,) = [one for one in manifests("Service") if one["metadata"]["name"] == spec["serviceName"]]
        labels = spec["template"]["metadata"]["labels"]
        assert labels == spec["selector"]["matchLabels"] == service["spec"]["selector"]
        (port,) = service["spec"]["ports"]
        for number in range(spec["replicas"]):
            found[f"{name}-{number}.{spec['serviceName']}:{port['port']}"] = spec["template"]["spec"]
    return found


def test_kubernetes_starts_services_by_commands_that_there_are() -> None:
    text = (KUBERNETES / "services.yaml").read_text()
    (line,) = re.findall(r"^#  +swift-ft (credentials init .*)$", text, re.MULTILINE)
    named = parsed(["/opt/swift/bin/swift-ft", *line.split()]).hosts
    logs = []
    for address, spec in served().items():
        host, _, port = address.partition(":")
        (container,) = spec["containers"]
        options = parsed(container["command"])
        assert options.listen == f"$(POD_IP):{port}"
        assert container["ports"] == [{"name": "grpc", "containerPort": int(port)}]
        assert host in named.split(",")
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert str(options.directory).startswith(f"{mounts['state']}/")
        assert {"name": "SWIFT_CREDENTIALS", "value": mounts["credentials"]} in container["env"]
        shell, flag, probe = container["readinessProbe"]["exec"]["command"]
        assert (shell, flag) == ("sh", "-c")
        _, *words = probe.replace("$HOSTNAME", host.partition(".")[0]).split()
        asked = parsed(words)
        assert [*asked.server, *asked.coordinator] == [address]
        if container["name"] == "log":
            logs.append(address)
    (coordinator,) = [each for each in manifests("StatefulSet") if each["metadata"]["name"] == "coordinator"]
    options = parsed(coordinator["spec"]["template"]["spec"]["containers"][0]["command"])
    assert options.log_servers == ",".join(logs)
    assert options.copies <= len(logs)


def test_kubernetes_starts_a_job_with_spare_pods_and_the_time_for_its_checkpoint() -> None:
    (jobset,) = manifests("JobSet")
    (jobs,) = jobset["spec"]["replicatedJobs"]
    job = jobs["template"]["spec"]
    spec = job["template"]["spec"]
    (container,) = spec["containers"]
    options = parsed(container["command"])
    assert options.coordinator in served()
    assert job["parallelism"] == job["completions"] > int(options.nnodes)
    assert job["completionMode"] == "Indexed"  # or there is no successPolicy
    assert job["successPolicy"] == {"rules": [{"succeededCount": int(options.nnodes)}]}
    codes = {rule["action"]: rule.get("onExitCodes", {}) for rule in job["podFailurePolicy"]["rules"]}
    assert {action: each["values"] for action, each in codes.items()} == {"Ignore": [3], "FailJob": [1]}
    assert {each["containerName"] for each in codes.values()} == {container["name"]}
    assert spec["terminationGracePeriodSeconds"] > options.sigterm_checkpoint_s + 5
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert options.checkpoint_dir == mounts["checkpoints"]
    assert {"name": "SWIFT_CREDENTIALS", "value": mounts["credentials"]} in container["env"]
    (claim,) = manifests("PersistentVolumeClaim")
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert volumes["checkpoints"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert volumes.keys() == mounts.keys()
    for budget in manifests("PodDisruptionBudget"):
        labels = budget["spec"]["selector"]["matchLabels"]
        if labels == job["template"]["metadata"]["labels"]:
            assert budget["spec"]["minAvailable"] == int(options.nnodes)
        else:
            assert labels in [each["spec"]["selector"]["matchLabels"] for each in manifests("StatefulSet")]


STUB = """\
#!/bin/bash
case $(basename "$0") in
scontrol) echo "$@" >> "$SAID"; [ "$1" = --oneliner ] && echo "Node NodeAddr=10.0.0.1 Port=6818" || echo m ;;
srun) while [ "${1#--}" != "$1" ]; do shift; done; echo $$ > "$TASK"; exec "$@" ;;
swift-ft) exec %(python)s "$0.py" "$@" ;;
esac
"""
STUB_SWIFT = """\
import json, os, signal, sys
said, what = os.environ["SAID"], sys.argv[1]
def told(*_):
    with open(said, "a") as file:
        print("told", what, file=file)
    if what == "run":
        os.kill(rank, signal.SIGKILL)
    sys.exit(143)
signal.signal(signal.SIGTERM, told)
if what == "run" and not (rank := os.fork()):
    what = "rank"
with open(f"{said}.{what}.new", "w") as here:
    json.dump(sys.argv[1:], here)
os.rename(f"{said}.{what}.new", f"{said}.{what}")
while True:
    signal.pause()
"""


@pytest.mark.parametrize("whom", ["the task", "all processes of the step"])
def test_slurms_signal_before_a_time_limit_is_for_the_launcher(whom: str, tmp_path: Path) -> None:
    """Slurm signals the children of its own processes (proctrack/cgroup), or all descendants (proctrack/linuxproc)."""
    script, places = ROOT / "examples" / "slurm" / "train.sbatch", tmp_path / "bin"
    places.mkdir()
    for name in ("scontrol", "sinfo", "srun", "swift-ft"):
        (places / name).write_text(STUB % {"python": sys.executable})
        (places / name).chmod(0o755)
    (places / "swift-ft.py").write_text(STUB_SWIFT)
    said, task = tmp_path / "said", tmp_path / "task"
    (tmp_path / "coordinator-7-1").mkdir()
    given = {"SAID": str(said), "TASK": str(task), "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    given |= {"SLURMD_NODENAME": "m", "SLURM_JOB_NAME": "run42", "SLURM_RESTART_COUNT": "1"}
    given["PATH"] = f"{places}:{os.environ['PATH']}"
    begun = [tmp_path / f"said.{what}" for what in ("coordinator", "logserver", "run", "rank")]
    found = re.search(r"^#SBATCH --signal=([A-Z]+)@(\d+)\b", script.read_text(), re.MULTILINE)
    assert found is not None
    with subprocess.Popen(["bash", script, "train.py"], env=given, cwd=tmp_path) as batch:
        try:
            deadline = time.monotonic() + 60
            while not all(path.exists() for path in begun):
                assert time.monotonic() < deadline, "it does not start"
                assert batch.poll() is None
                time.sleep(0.02)
            step = psutil.Process(int(task.read_text()))
            signalled = [step, *step.children(recursive=True)] if whom != "the task" else [step]
            for process in reversed(signalled):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.Signals[f"SIG{found[1]}"])
            assert batch.wait(60) == 128 + signal.SIGTERM
        finally:
            if batch.poll() is None:
                for process in [*psutil.Process(batch.pid).children(recursive=True), batch]:
                    process.kill()
    told = [line for line in said.read_text().splitlines() if line.startswith(("told ", "requeue "))]
    assert told[0] == "told run"
    assert "requeue 7" in told
    assert (tmp_path / "coordinator-7-2").is_dir(), "the next start goes on with its state"
    words = [json.loads(path.read_text()) for path in begun[:3]]
    coordinator, server, run = (parsed(["/opt/swift/bin/swift-ft", *each]) for each in words)
    assert coordinator.log_servers == f"m={server.listen}" == "m=10.0.0.1:7301"
    assert int(found[2]) > run.sigterm_checkpoint_s + 5, "the time in which ranks end"
    assert (run.job, run.from_checkpoints) == ("run42", run.checkpoint_dir)


def test_the_example_for_ray_uses_flags_that_there_are() -> None:
    """`scripts/cluster ray` runs it: Ray is not installed here."""
    text = (ROOT / "examples" / "ray" / "train.py").read_text()
    own = set(re.findall(r'add_argument\("(--[a-z-]+)"', text))
    used = set(re.findall(r'"(--[a-z-]+)"', text)) - own - {"--pdeathsig"}
    known = {flag for name in ("run", "logserver", "coordinator", "logs") for flag in flags_of(name)}
    assert {"--nnodes", "--log-servers"} <= used <= known


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


SHOWN = {family.name: family for family in (*LOG, *COORDINATOR, *TRAINER)}


def check_expression(expression: str) -> set[str]:
    """Returns the metrics; each is there, and is asked as its kind can be."""
    names = set(re.findall(r"(?<![\w{,])swift_\w+", expression))
    for name in names:
        plain = name.removesuffix("_bucket")
        assert plain in SHOWN, expression
        assert (plain != name) == (SHOWN[plain].kind == "histogram"), expression
        if SHOWN[plain].kind == "states":
            wanted = re.findall(rf'{name}=~?"([^"]+)"', expression)
            assert set("|".join(wanted).split("|")) <= {*SHOWN[plain].states, ""}, expression
        grows = SHOWN[plain].kind in ("counter", "histogram")
        assert grows == bool(re.search(rf"(rate|increase)\({name}(\{{[^}}]*\}})?\[", expression)), expression
    return {name.removesuffix("_bucket") for name in names}


def test_alerts_look_at_metrics_that_are_shown() -> None:
    for rule in rules():
        assert check_expression(rule["expr"]) or rule["expr"].startswith("up{"), rule
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith((".", "}}."))


def test_the_dashboard_looks_at_metrics_and_labels_that_are_shown() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in panels:
        for target in panel["targets"]:
            families = [SHOWN[name] for name in check_expression(target["expr"])]
            assert families, panel
            labels = {"instance", *(label for family in families for label in (*family.labels, family.name))}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels, panel
            assert "$job" not in target["expr"] or all("job" in family.labels for family in families), panel


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_takes_the_alerts() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_explained_and_no_other() -> None:
    explained = re.findall(r"^\| `(Swift\w+)` \| [^|]+ \| [^|]+ \|$", OPERATION.read_text(), re.MULTILINE)
    assert sorted(explained) == sorted(rule["alert"] for rule in rules())


def test_only_known_labels_and_base_units() -> None:
    """Job, rank, reason and strategy: few values each. No step, no microbatch, no stream."""
    bounded = {"job", "rank", "reason", "strategy"}
    units = ("_seconds", "_bytes", "_total", "_info")
    countable = re.compile(
        r"_(records|sessions|streams|readers|segments|ranks|groups|servers|suspicions|generation|version|size|state|alarm|wanted|step|steps|waits|exact|differs)$"
    )
    for family in (*LOG, *COORDINATOR, *TRAINER):
        assert set(family.labels) <= bounded, family
        assert family.name.endswith(units) or countable.search(family.name), family
        assert (family.kind == "counter") == family.name.endswith("_total"), family
        assert family.help.endswith("."), family
