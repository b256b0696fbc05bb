"""Kubernetes: examples/kubernetes by the schemas, and its containers as they stand there, killed and moved.

There is no kubelet here. What it would do is done by hand: a pod has an address, a host name, a root, mounts and
processes of its own, its user, its environment, and secrets as links to files of 0440. A successor has another address.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.cluster.rows import Row, row
from tests.cluster.watched import Watched
from tests.frameworks.environment import ROOT, Unavailable, ensure
from tests.integration.namespaces import Network, impossible

FOLDER = ROOT / "examples" / "kubernetes"
PINS = ("kubernetes-validate==1.37.0",)
JOBSET = ROOT / ".cluster" / "kubernetes" / "jobset.yaml"
JOBSET_URL = (
    "https://raw.githubusercontent.com/kubernetes-sigs/jobset/v0.12.0/config/components/crd/bases/"
    "jobset.x-k8s.io_jobsets.yaml"
)
STEPS = 400
TIMEOUT_S = 600.0
MACHINES = 12
"""Addresses: each start of a pod has one of its own."""
TRAINING = 2
AWAY_S = 10.0
"""Until a pod that has gone runs elsewhere: its clients have asked for its address meanwhile, and found the old one."""
FOUND_S = 20.0
"""With gRPC's default for names the job runs again after 27 s, else after 5 s."""
TRAINER = f"""\
import runpy, sys
sys.argv[1:] = "--stages 2 --model tiny --microbatches 4 --steps {STEPS}".split()
runpy.run_module("swift_ft.lab.drill.trainer", run_name="__main__", alter_sys=True)
"""
_CONTAINER = r"""
set -e
layers=$1 environment=$2 directory=$3 read_only=$4 uid=$5 gid=$6 group=$7
echo "$8" > /proc/sys/kernel/hostname
shift 8
mount --make-rprivate /
mount -t tmpfs layers "$layers"
root=$layers/root
mkdir "$layers/upper" "$layers/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$layers/upper,workdir=$layers/work" "$root"
mkdir -p "$root/opt"
ln -s "$environment" "$root/opt/swift"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
while [ "$1" != -- ]; do
    case $1 in
    open) chmod a+rx "$root$2" ;;
    memory) mount -t tmpfs memory "$root$2" ;;
    *) if [ -d "$1" ]; then mkdir -p "$root$2"; else touch "$root$2"; fi
       mount --bind "$1" "$root$2" ;;
    esac
    shift 2
done
shift
if [ "$read_only" = True ]; then mount -o remount,bind,ro "$root"; fi
exec chroot "$root" setpriv --reuid "$uid" --regid "$gid" --groups "$group" --no-new-privs \
    --bounding-set=-all --inh-caps=-all env -i -C "$directory" "$@"
"""


def cases(only: str) -> Iterator[Row]:
    words = "The manifests are what the schemas say"
    if only in words:
        yield schemas(words)
    if why := impossible():
        raise Unavailable(why)
    with tempfile.TemporaryDirectory(prefix="swift-kubernetes-") as name:
        place = Path(name)
        place.chmod(0o755)
        wanted: dict[str, Any] = {}
        for number, case in enumerate((lost_node, cut_off, evicted, services, all_deleted, renewed)):
            words = (case.__doc__ or "").rstrip(".")
            if only not in words:
                continue
            if not wanted:
                with Site(place / "twin") as site:
                    site.train()
                    wanted = site.digests()
            with Site(place / str(number)) as site:
                site.train()
                site.until_step(20)
                try:
                    figures = case(site)
                    yield row(words, "" if site.digests() == wanted else "other bits", **figures)
                except AssertionError as error:
                    yield row(words, " ".join(f"{error}".split()))


def lost_node(site: "Site") -> dict[str, Any]:
    """A node with a pod that trains is lost: the spare pod takes its place."""
    lost = site.training()[-1]
    began = time.monotonic()
    site.kill(lost)
    site.until(lambda: len(site.trace("script_start")) > TRAINING, "the spare pod")
    took_s = time.monotonic() - began
    site.start(lost)
    return {"seconds_until_its_rank_begins": round(took_s, 1)}


def cut_off(site: "Site") -> dict[str, Any]:
    """A pod that trains is cut off until the spare pod has its place: it ends, and the job goes on."""
    lost = site.training()[-1]
    site.network.isolate(site.machine(lost))
    site.until(lambda: len(site.trace("script_start")) > TRAINING, "the spare pod")
    site.network.rejoin(site.machine(lost))
    code = site.ended(lost)
    assert code in site.ignored, f"exit code {code} counts against backoffLimit"
    site.start(lost)
    return {"exit_code": code}


def evicted(site: "Site") -> dict[str, Any]:
    """A pod that trains is evicted: a checkpoint, and the spare pod takes its place."""
    leaving = site.training()[0]
    code, took_s = site.delete(leaving)
    saved = max(each["version"] for each in site.trace("checkpoint_durable"))
    site.start(leaving)
    site.until(lambda: len(site.trace("script_start")) > TRAINING, "the spare pod")
    return {"exit_code": code, "seconds_to_end": round(took_s, 1), "saved_version": saved}


def services(site: "Site") -> dict[str, Any]:
    """A log server and the coordinator come back at other addresses, and a rank is lost meanwhile."""
    site.delete("log-0")
    time.sleep(AWAY_S)
    site.start("log-0")
    site.kill("coordinator-0")
    site.kill_rank(1)
    time.sleep(AWAY_S)
    began = time.monotonic()
    site.start("coordinator-0")
    site.until(lambda: len(site.trace("script_start")) > TRAINING, "the rank")
    site.until(lambda: site.ran(after=began), "the job to run again")
    took_s = site.ran(after=began)[0] - began
    assert took_s < FOUND_S, f"the coordinator was found after {took_s:.1f} s"
    lost = [each["server"] for each in site.trace("log_server_lost")]
    assert not lost, f"given up: {lost}"
    site.until_ready("log-0", "coordinator-0")
    return {"seconds_until_the_job_runs": round(took_s, 1)}


def all_deleted(site: "Site") -> dict[str, Any]:
    """The JobSet is deleted and created again: it goes on at the checkpoint that SIGTERM has asked for."""
    pods = site.trainers()
    for pod in pods:
        site.terminate(pod)
    codes = [site.ended(pod) for pod in pods]
    saved = max(each["version"] for each in site.trace("checkpoint_durable"))
    site.train()
    return {"exit_codes": codes, "saved_version": saved}


def renewed(site: "Site") -> dict[str, Any]:
    """Secrets are replaced, by those of another signing key, and a rank is lost."""
    for known in (site.place / "credentials" / "authority" / "verifying").iterdir():
        for path in (site.place / "credentials").rglob(known.name):
            path.unlink()
    site.credentials()
    site.kill_rank(0)
    site.until(lambda: len(site.trace("script_start")) > TRAINING, "the rank")
    return {}


# --- what Kubernetes does ---


def documents() -> list[dict[str, Any]]:
    return [each for path in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]


def schemas(words: str) -> Row:
    python = ensure("kubernetes", PINS)
    resources = documents()
    sets = [each for each in resources if each["kind"] == "JobSet"]
    resources = [each for each in resources if each["kind"] != "JobSet"]
    for each in sets:  # whose jobs are those of Kubernetes
        for job in each["spec"]["replicatedJobs"]:
            named = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
            resources.append(named | job["template"])
    check = "import json, sys, kubernetes_validate as k\n"
    check += "for each in json.load(sys.stdin): print(k.validate(each, '1.37', strict=True))"
    done = subprocess.run(
        [python, "-c", check], input=json.dumps(resources), capture_output=True, text=True, check=False
    )
    if done.returncode:
        return row(words, _verdict(done.stderr))
    if not JOBSET.exists():
        JOBSET.parent.mkdir(parents=True, exist_ok=True)
        try:
            with urllib.request.urlopen(JOBSET_URL, timeout=20) as reply:
                JOBSET.write_bytes(reply.read())
        except OSError as error:
            raise Unavailable(
                f"the schema of JobSet cannot be had ({JOBSET_URL} for {JOBSET}): {error}"
            ) from None
    crd = yaml.safe_load(JOBSET.read_text())
    schema = next(each["schema"] for each in crd["spec"]["versions"] if each["name"] == "v1alpha2")
    check = "import json, sys, jsonschema\n"
    check += "schema, each = json.load(sys.stdin); jsonschema.validate(each, schema)"
    for each in sets:
        given = json.dumps([_closed(schema["openAPIV3Schema"]), each])
        done = subprocess.run([python, "-c", check], input=given, capture_output=True, text=True, check=False)
        if done.returncode:
            return row(words, _verdict(done.stderr))
    return row(words, resources=len(resources), jobsets=len(sets), Kubernetes="1.37")


def _verdict(said: str) -> str:
    lines = [line for line in said.splitlines() if "Error: " in line]
    return " ".join(lines[-1:] or said.splitlines()[-1:])[:300]


def _closed(schema: Any) -> Any:
    """Returns the schema of a custom resource, by which a field that it does not name is an error."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
    if schema.get("type") == "object" and schema.get("properties") and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


class Site(Watched):
    """(context manager) The pods, each with its secrets and volumes."""

    limit_s = TIMEOUT_S

    def __init__(self, place: Path) -> None:
        self.place = place
        self._stack = contextlib.ExitStack()
        self._templates: dict[str, tuple[str, dict[str, Any]]] = {}
        self._claims: dict[str, list[str]] = {}
        self.ignored: list[int] = []
        """Exit codes of a pod's that its Job does not count."""
        self._where: dict[str, str] = {}
        """Pod → its machine. A pod that has gone keeps it until its successor starts."""
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for each in documents():
            name, spec = each["metadata"]["name"], each["spec"]
            if each["kind"] == "StatefulSet":
                for number in range(spec["replicas"]):
                    pod = f"{name}-{number}"
                    self._templates[pod] = (f"{pod}.{spec['serviceName']}", spec["template"])
                    self._claims[pod] = [claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]]
            if each["kind"] == "JobSet":
                (jobs,) = spec["replicatedJobs"]
                rules = jobs["template"]["spec"]["podFailurePolicy"]["rules"]
                (self.ignored,) = [
                    rule["onExitCodes"]["values"]
                    for rule in rules
                    if rule["action"] == "Ignore" and "onExitCodes" in rule
                ]
                for number in range(jobs["template"]["spec"]["parallelism"]):
                    pod = f"{name}-{jobs['name']}-0-{number}"
                    self._templates[pod] = ("", jobs["template"]["spec"]["template"])

    def __enter__(self) -> "Site":
        self.place.mkdir()
        self.network = Network(*(f"n{number}" for number in range(MACHINES)))
        self._stack.callback(self.network.close)
        self._free = [f"n{number}" for number in range(MACHINES)]
        self._stack.callback(lambda: [self._end(pod) for pod in [*self._processes]])
        with contextlib.ExitStack() as unless_it_starts:
            unless_it_starts.push(self._stack)
            self._folder("app").joinpath("train.py").write_text(TRAINER)
            self.credentials()
            for pod in self._services():
                self.start(pod)
            self.until_ready(*self._services())
            unless_it_starts.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _services(self) -> list[str]:
        return [pod for pod, (address, _) in self._templates.items() if address]

    def trainers(self) -> list[str]:
        return [pod for pod, (address, _) in self._templates.items() if not address]

    def train(self) -> None:
        for pod in self.trainers():
            self.start(pod)

    def _folder(self, name: str, group: int = 0) -> Path:
        """A volume, which belongs to root and the pod's group, as the kubelet makes it."""
        folder = self.place / name
        if not folder.exists():
            folder.mkdir(parents=True)
            os.chown(folder, 0, group)
            folder.chmod(0o2775)
        return folder

    def credentials(self) -> None:
        """As the head of services.yaml says, and as the kubelet mounts secrets and changes them."""
        text = (FOLDER / "services.yaml").read_text()
        (line,) = re.findall(r"^# +(swift-ft credentials init .*)$", text, re.MULTILINE)
        _, *words = line.split()
        command = [sys.executable, "-m", "swift_ft.cli", *words]
        subprocess.run(command, cwd=self.place, check=True, capture_output=True)
        for secret in ("services", "ranks"):
            folder = self._folder(f"swift-{secret}")
            data = folder / f"..{time.monotonic_ns()}"
            shutil.copytree(self.place / "credentials" / secret, data)
            data.chmod(0o755)
            for path in data.iterdir():
                os.chown(path, 0, 7300)
                path.chmod(0o440)
                with contextlib.suppress(FileExistsError):
                    (folder / path.name).symlink_to(f"..data/{path.name}")
            (folder / "..new").symlink_to(data.name)
            (folder / "..new").rename(folder / "..data")

    def start(self, pod: str) -> None:
        machine = self._free.pop(0)
        self._where[pod] = machine
        address, template = self._templates[pod]
        if address:
            self._say_names()
        hosts = self.place / f"hosts-{machine}"
        hosts.write_text(self._hosts(machine, pod))
        layers = self.place / f"layers-{machine}"
        layers.mkdir()
        spec, container = template["spec"], template["spec"]["containers"][0]
        user, confined = spec["securityContext"], container.get("securityContext", {})
        mounts = [str(hosts), "/etc/hosts", os.devnull, "/etc/resolv.conf"]
        for folder in (ROOT / ".venv", ROOT, Path(sys.base_prefix), Path(sys.executable).resolve().parent):
            for parent in reversed([folder, *folder.parents][:-1]):
                mounts += ["open", str(parent)]
        mounts += [str(self._folder("app")), "/app"]
        for name in ("trace", "digests"):
            own = f"{name}/{machine}" if name == "trace" else name
            mounts += [str(self._folder(own, user["fsGroup"])), f"/{name}"]
        for mount in container["volumeMounts"]:
            mounts += [self._volume(pod, mount["name"], spec["volumes"], user["fsGroup"]), mount["mountPath"]]
        words = [str(layers), str(ROOT / ".venv"), container.get("workingDir", "/")]
        words += [str(confined.get("readOnlyRootFilesystem", False))]
        words += [str(user[name]) for name in ("runAsUser", "runAsGroup", "fsGroup")]
        command = self._expanded(pod, container["command"])
        inside = self.network.inside(machine)
        beside = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", _CONTAINER, "container"]
        with (self.place / f"{pod}.out").open("ab") as output:
            process = subprocess.Popen(
                [*inside, *beside, *words, pod, *mounts, "--", *self._environment(pod), *command],
                stdout=output,
                stderr=output,
            )
        self._processes[pod] = process
        self.until(lambda: process.poll() is not None or psutil.Process(process.pid).children(), pod)

    def _volume(self, pod: str, name: str, volumes: Sequence[Mapping[str, Any]], group: int) -> str:
        if name in self._claims.get(pod, ()):
            return str(self._folder(f"{name}-{pod}", group))
        (volume,) = [each for each in volumes if each["name"] == name]
        if "secret" in volume:
            return str(self.place / volume["secret"]["secretName"])
        if "persistentVolumeClaim" in volume:
            return str(self._folder(volume["persistentVolumeClaim"]["claimName"], group))
        assert volume["emptyDir"]["medium"] == "Memory"
        return "memory"

    def _environment(self, pod: str) -> list[str]:
        container = self._templates[pod][1]["spec"]["containers"][0]
        given = {"PATH": os.defpath, "HOSTNAME": pod, "OMP_NUM_THREADS": "1"}
        given |= {"SWIFT_EVENTS": "/trace", "SWIFT_DIGESTS": "/digests"}
        for each in container["env"]:
            path = each["valueFrom"]["fieldRef"]["fieldPath"] if "valueFrom" in each else ""
            assert path in ("", "status.podIP")
            given[each["name"]] = self.network.host(self._where[pod]) if path else each["value"]
        return [f"{name}={value}" for name, value in given.items()]

    def _expanded(self, pod: str, words: Sequence[str]) -> list[str]:
        known = dict(each.split("=", 1) for each in self._environment(pod))
        return [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word) for word in words]

    def _hosts(self, machine: str, pod: str) -> str:
        names = {self._templates[each][0]: where for each, where in self._where.items()} | {pod: machine}
        lines = [f"{self.network.host(where)} {name}\n" for name, where in names.items() if name]
        return "127.0.0.1 localhost\n" + "".join(lines)

    def _say_names(self) -> None:
        """As the cluster's DNS would."""
        for pod, machine in self._where.items():
            if (hosts := self.place / f"hosts-{machine}").exists():
                hosts.write_text(self._hosts(machine, pod))

    def _first(self, pod: str) -> psutil.Process:
        assert self._processes[pod].poll() is None, f"{pod} has ended: {self.output()}"
        (first,) = psutil.Process(self._processes[pod].pid).children()
        return first

    def until_ready(self, *pods: str) -> None:
        for pod in pods:
            self.until(lambda pod=pod: self._is_ready(pod), pod)  # type: ignore[misc]

    def _is_ready(self, pod: str) -> bool:
        """By the probe that stands in the manifest."""
        spec = self._templates[pod][1]["spec"]
        user, (container,) = spec["securityContext"], spec["containers"]
        there = ["nsenter", f"--target={self._first(pod).pid}"]
        there += ["--mount", "--net", "--uts", "--pid", "--root", "--wd"]
        there += ["setpriv", f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}"]
        there += [f"--groups={user['fsGroup']}", "env", "-i", *self._environment(pod)]
        probe = container["readinessProbe"]
        done = subprocess.run(
            [*there, *probe["exec"]["command"]],
            capture_output=True,
            check=False,
            timeout=3 * probe["timeoutSeconds"],
        )
        return done.returncode == 0

    def machine(self, pod: str) -> str:
        return self._where[pod]

    def terminate(self, pod: str) -> None:
        self._first(pod).terminate()

    def ended(self, pod: str) -> int:
        """Waits, for as long as the kubelet would. Returns the exit code."""
        grace_s = self._templates[pod][1]["spec"]["terminationGracePeriodSeconds"]
        try:
            return self._processes[pod].wait(grace_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{pod} has not ended within {grace_s} s: {self.output()}") from None

    def delete(self, pod: str) -> tuple[int, float]:
        """SIGTERM, and time. Returns the exit code and how long it took."""
        began = time.monotonic()
        self.terminate(pod)
        return self.ended(pod), time.monotonic() - began

    def kill(self, pod: str) -> None:
        """With its node."""
        self.network.isolate(self._where[pod])
        self._end(pod)

    def _end(self, pod: str) -> None:
        process = self._processes.pop(pod)
        for child in psutil.Process(process.pid).children() if process.poll() is None else ():
            child.kill()
        process.wait(20)

    def kill_rank(self, rank: int) -> None:
        for pod in self.trainers():
            for process in self._first(pod).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.name() == f"swift-rank{rank}":
                        process.kill()
                        return
        raise AssertionError(f"there is no rank {rank}: {self.output()}")

    # --- what is said ---

    def training(self) -> list[str]:
        """Pods on which ranks are, in the ranks' order."""
        of = {machine: pod for pod, machine in self._where.items()}
        begun = {each["who"]: of[each["machine"]] for each in self.trace("script_start")}
        return [begun[who] for who in sorted(begun)]

    def trace(self, event: str) -> list[dict[str, Any]]:
        """Pods have numbers of processes of their own, so also traces."""
        found = []
        for path in (self.place / "trace").glob("*/*.jsonl"):
            for line in path.read_text(errors="replace").splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    if (each := json.loads(line)).get("event") == event:
                        found.append(each | {"machine": path.parent.name})
        return sorted(found, key=lambda each: each["t"])

    def ran(self, after: float) -> list[float]:
        """Returns the times at which the job has begun to run since then; it may have ended meanwhile."""
        return [each["t"] for each in self.trace("state") if each["t"] > after and each["state"] == "RUNNING"]

    def output(self) -> str:
        outputs = sorted(self.place.glob("*.out"))
        return " | ".join(f"{path.stem}: {path.read_text(errors='replace')[-600:]}" for path in outputs)

    def digests(self) -> dict[str, Any]:
        """Waits for the end of the job, with which all its pods end."""
        for pod in self.trainers():
            try:
                code = self._processes[pod].wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{pod} does not end: {self.output()}") from None
            assert code == 0, f"{pod} has ended with {code}: {self.output()}"
        found = sorted((self.place / "digests").glob(f"*-v{STEPS}.json"))
        assert len(found) == TRAINING, self.output()
        return {path.name: json.loads(path.read_text()) for path in found}
