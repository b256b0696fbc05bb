"""Settings of a session, values that must be equal on all ranks, and a rank's environment from `swift-ft run`."""

import os
import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from swift_ft import device
from swift_ft.cli_parser import checkpoint_place, metrics_address
from swift_ft.errors import UsageError
from swift_ft.log.codec import NAMES as CODECS
from swift_ft.log.protocol import Fsync
from swift_ft.log.record import WHEN_FULL
from swift_ft.planner import Assignment, quickest
from swift_ft.planner.groups import RecoveryGroups
from swift_ft.planner.settings import (
    LOST_SHARDS,
    QUICKEST,
    SETTINGS,
    Setting,
    lost_shard_problem,
    reroutes,
)
from swift_ft.planner.types import Strategy
from swift_ft.state import MODES as CHECKPOINT_MODES
from swift_ft.state import kernels
from swift_ft.text import check_name, scheme_of

# Values that must be equal on all ranks for bit-identical results.
#
# Measured: another thread count, CPU capability, oneDNN limit or torch build gives other bits; a fresh process
# with the same values gives the same ones. oneDNN and MKL also choose their kernels by the CPU's model, and so does the
# C library for `exp` and `sin`. The coordinator compares the values at join and names the differing ones.

# Environment variables by which libraries choose their kernels, or the precision of these.
ENVIRONMENT = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_CPU_ISA_HINTS",
    "DNNL_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_DYNAMIC",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_DYNAMIC",
    "ATEN_CPU_CAPABILITY",
    "GLIBC_TUNABLES",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "PYTORCH_TUNABLEOP_ENABLED",
    "PYTORCH_TUNABLEOP_TUNING",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
)
_MODEL = ("vendor_id", "cpu family", "model", "model name", "stepping")
# The fields of an ARM CPU.
_ARM = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision")


def determinism_fingerprint(undo: str) -> dict[str, str]:
    """Returns the values to compare. `undo` is the undo mode: an arithmetic undo's bits depend on whether steps can be
    computed backwards."""
    computed = "kernels.cpp" if kernels.library() is not None else "copies"
    return {
        **({"undo": computed} if undo == "arithmetic" else {}),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_model": cpu_model(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "onednn": str(torch.backends.mkldnn.enabled),
        "default_dtype": str(torch.get_default_dtype()),
        **{name.lower(): os.environ.get(name, "") for name in ENVIRONMENT},
        **device.facts(),
    }


def device_problems(facts: Mapping[str, str]) -> list[str]:
    """Returns what lets a CUDA device compute other bits in another process, each with its remedy. `facts`: a
    fingerprint. Nothing is known of other devices. Not seen: what a script autotunes by itself (`triton.autotune`,
    ``torch.compile(mode="max-autotune")``)."""
    if "cuda" not in facts:
        return []
    wrong = {
        "kernels may add in another order each time: torch.use_deterministic_algorithms(True) (warn_only=True if an "
        "operation has no other kernel)": facts["deterministic_algorithms"] != "True",
        "cuBLAS may split sums in another way: CUBLAS_WORKSPACE_CONFIG=:4096:8": facts[
            "cublas_workspace_config"
        ]
        not in CUBLAS_WORKSPACES,
        "cuDNN chooses kernels by time: torch.backends.cudnn.benchmark = False": facts["cudnn_benchmark"]
        == "True",
        "TunableOp chooses kernels by time: PYTORCH_TUNABLEOP_TUNING=0": facts["tunable_op"] == "True",
        "torch.compile chooses kernels by time: TORCHINDUCTOR_MAX_AUTOTUNE=0": facts["max_autotune"]
        == "True",
    }
    return [problem for problem, holds in wrong.items() if holds]


CUBLAS_WORKSPACES = (":4096:8", ":16:8")
"""Those with which cuBLAS promises the same bits. `swift-ft run` gives ranks the first, before they use a device."""


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns vendor, family, model and stepping of this machine's CPUs; several, joined by "; ", if they differ."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return platform.processor() or "unknown"
    models: set[str] = set()
    for cpu in text.split("\n\n"):
        fields = {
            name.strip(): value.strip()
            for name, _, value in (line.partition(":") for line in cpu.splitlines())
        }
        words = [fields[name] for name in (*_MODEL, *_ARM) if name in fields]
        if words:
            models.add(" ".join(words))
    return "; ".join(sorted(models)) or "unknown"


# Settings of a session, and the subset that must be equal on all ranks of a job.

_CHOICES: dict[str, tuple[str, ...]] = {
    "checkpoint_mode": CHECKPOINT_MODES,
    "strategy": tuple(SETTINGS),
    "lost_shard": ("", *LOST_SHARDS, QUICKEST),
    "updates": ("after_backward", "wait_free"),
    "undo": ("exact", "arithmetic", "preimage"),
    "reduction": ("auto", "ordered", "fast"),
    "codec": tuple(CODECS),
    "log_fsync": ("", *Fsync),
    "log_when_full": WHEN_FULL,
    "rehearse": ("start", "always", "off"),
    "non_finite_loss": ("warn", "fail", "ignore"),
}
_LEAST = {
    "checkpoint_every": 1,
    "adaptive_memory": 1,
    "snapshot_every": 0,
    "replicas": 1,
    "shards": 1,
    "tensor_parallel": 1,
    "bucket_bytes": 1,
    "log_queue_bytes": 1 << 20,
    "helpers": 0,
}
_ADAPTIVE = {
    "exact_gradients": True,
    "split_backward": True,
    "adaptive_memory": 1.0,
    "staggered": False,
}
"""Settings of strategy "adaptive", with their defaults."""
_AGREED = (
    *(
        "seed",
        "checkpoint_every",
        "strategy",
        "groups",
        "replicas",
        "shards",
        "tensor_parallel",
        "updates",
        "undo",
    ),
    *("reduction", "bucket_bytes", "helpers", "last_checkpoint", "require_exact", *_ADAPTIVE),
)
"""Settings that must be equal on all ranks, besides those in `SessionConfig.agreed`."""
_UNSAID: dict[str, object] = {"tensor_parallel": 1, "require_exact": False, "snapshot_every": 0}
"""Settings that are agreed on only if they have other values than these, their defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionConfig:
    """Settings of one rank's session; those in `agreed` must be equal on all ranks."""

    seed: int = 0
    """Root of all randomness in steps: of torch, `random` and numpy, inside and outside of the stages."""
    checkpoint_every: int = 100
    """Optimizer steps between two checkpoints. The log holds the steps since the newest complete one."""
    checkpoint_mode: str = "async"
    """When training goes on after a checkpoint: "async" (once the state is copied in memory; the copy is written while
    training goes on), or "sync" (once this rank's part is durable)."""
    strategy: str = "auto"
    """How a lost rank's state is restored: "auto" (from a replica, else from the log, else all ranks from the
    checkpoint), "replica", "replay", "checkpoint", "shrink" (the others go on without the lost rank, until a
    replacement arrives; jobs without shards; docs/strategies.md), "adaptive" (as "shrink", for pipelines with replicas:
    the peers of a lost rank share its microbatches), "rollback" (as "shrink", but the interrupted step is always taken
    back and done again), "lossy-forward" (for replicas of a whole model: as "shrink", but a step that was interrupted
    in the reduction of its gradients is finished with the remaining ranks' gradients; not exact: `allow_inexact`),
    "snapshot" (all ranks go back to the newest copies of their states in host memory: each rank keeps its own and
    another rank's), "reinit" (as "checkpoint", but the training function begins again in every process:
    `swift_ft.reinit`)."""
    lost_shard: str = ""
    """How a lost rank's batches are handled, with "shrink" and "rollback", and with "auto" if no process takes the lost
    rank's place (empty: then the job ends or waits). "redistribute" (the default of the first two): the others compute
    them, and the job stays exact. "reroute" (with "auto", for pipelines): the lost rank's peers share them, as with
    "adaptive". "quickest" (with "auto"): "reroute" for pipelines, else "redistribute". "drop": no rank computes them;
    the mean is over the remaining ranks, the learning rate stays unchanged, and the job is not exact (`allow_inexact`).
    With "lossy-forward" they are always dropped."""
    exact_gradients: bool = True
    """With "adaptive": gradients of other ranks' microbatches are kept separately and added in the order of origins
    (data-parallel ranks). False: they are added to a rank's own, which saves memory and messages, and is not exact
    (`allow_inexact`)."""
    split_backward: bool = True
    """With "adaptive": while ranks are missing, weight gradients are computed after input gradients, in gaps where no
    rank waits for them, if a trial in the first step gives the same bits. The trial costs one step at the start."""
    adaptive_memory: float = 1.0
    """With "adaptive": a rank may hold this many times the activations that the schedule holds at a time, while other
    ranks are missing. From 2 on it hardly ever waits."""
    staggered: bool = False
    """With "adaptive": a rank begins the next step once its own stage has stepped. The results of other stages (the
    vote over the step, the norm of `Session.clip_grad_norm_`) arrive in the next step; if the norm demands clipping,
    the step is taken back and done again. Each rank keeps up to two copies of its state (docs/adaptive.md)."""
    snapshot_every: int = 0
    """Optimizer steps between two copies of the state in host memory, for strategy="snapshot" (0: 10), and for "auto",
    which goes back to them where that takes less time than a replay (0: no copies)."""
    allow_inexact: bool = False
    """Allows strategies, and settings of a CUDA device, whose results differ in bits from a run without failures."""
    groups: str = ""
    """Recovery groups, such as "0-1,2-3": runs of stages that fail and recover together. Only tensors that pass between
    groups are logged. Empty: every rank is its own group."""
    replicas: int = 1
    """Number D of data-parallel replicas of every stage. rank = ((pipeline rank * D + replica) * shards + shard) *
    tensor_parallel + tensor rank."""
    shards: int = 1
    """Number of ranks that share one replica's state (FSDP2 on `session.mesh`)."""
    tensor_parallel: int = 1
    """Number of ranks that compute the same batch together, each with a part of every layer."""
    updates: str = "after_backward"
    """When the optimizer updates a bucket of parameters: "after_backward", or "wait_free" (as soon as it is
    reduced)."""
    undo: str = "exact"
    """How a wait-free step is taken back: "exact" (keeps about a byte per element of a parameter and its
    state), "arithmetic" (keeps nothing, not exact), "preimage" (keeps a copy of the buckets in flight)."""
    reduction: str = "auto"
    """Order in which gradients are summed: "fast" (the backend's), "ordered" (by `dp_rank`), "auto" (ordered from 3
    ranks on)."""
    bucket_bytes: int = 25 << 20
    """Bytes of gradients that are reduced and applied together."""
    codec: str = "none"
    """Codec of this rank's log streams: "none", "lz4" (for zeros after ReLU) or "bitshuffle" (for floats)."""
    log_fsync: str = ""
    """When a record of this rank counts as durable: "always" (after fdatasync), "interval" or "never" (after the
    write). Empty: the log server's own setting."""
    log_queue_bytes: int = 256 << 20
    """Bytes of shared memory for unacknowledged log records. A larger record is refused."""
    log_when_full: str = "block"
    """Behaviour when that memory is full: "block" (training waits for the log), or "drop" (training never waits).
    With "drop", steps that were not logged are declared so, and a checkpoint is made soon. A failure before it is
    complete costs the steps since the previous one."""
    helpers: int = 3
    """Maximum number of other ranks that help to replay each lost stage, if trainers call `Session.help_replay`. A
    recovery group of several stages is replayed without help."""
    last_checkpoint: bool = True
    """Saves a checkpoint of the version at which the run ends. With it the job can be started again with more steps,
    and a rank that is lost after the end can be restored. False: the trainer saves its final state itself."""
    rehearse: str = "off"
    """When recoveries are rehearsed: a process that holds no rank repeats some of a rank's steps, from a checkpoint and
    the log, and compares them with the rank's results. "start" (each rank twice, after its first checkpoints), "always"
    (then one rank after the other, as long as the job runs), "off". `Session.from_env` takes "start" if `swift-ft run`
    keeps a spare, else "off". Differences are named, and the job is not exact from there on (docs/exactness.md)."""
    require_exact: bool = False
    """Fails the job once it is known to be not exact, instead of going on."""
    non_finite_loss: str = "warn"
    """Reaction to a loss that is nan or infinite: "warn" (a message at the first one), "fail" (the job ends, and may be
    started again from its newest checkpoint), "ignore"."""
    metrics_listen: str = ""
    """HOST:PORT (loopback) on which this rank serves Prometheus metrics. The local rank is added to a port other than
    0. Empty: the value of SWIFT_METRICS_LISTEN; without that, metrics are off."""
    suspicion_timeout_s: float = 30.0
    """Seconds that a rank waits for a failure to be announced after a communication error. If the coordinator answers
    and announces none by then, the error is raised as the trainer's own. Time in which the coordinator does not answer
    does not count."""

    replay_stall_s: float = 180.0
    """Seconds without progress after which a replay is given up and a checkpoint restored. (The trainer then waits for
    something that the session does not know.)"""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(f"{name}={value!r}; give one of {', '.join(filter(None, allowed))}")
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:
                raise UsageError(f"{name}={getattr(self, name)}; give at least {least}")
        if self.snapshot_every and Strategy.SNAPSHOT not in self.setting.permits:
            raise UsageError(
                f"snapshot_every={self.snapshot_every} with strategy={self.strategy!r}: nobody goes back to snapshots; "
                f"use strategy='snapshot' or 'auto'"
            )
        try:
            object.__setattr__(self, "groups", str(RecoveryGroups.parse(self.groups)))
        except ValueError as error:
            raise UsageError(str(error)) from None
        if self.tensor_parallel > 1:
            for name, value in (("updates", "wait_free"), ("staggered", True)):
                if getattr(self, name) == value:
                    raise UsageError(
                        f"{name}={value!r} with tensor_parallel={self.tensor_parallel}: gradients of layers that are "
                        "split over ranks are complete only when a backward has ended; leave it out"
                    )
        if self.updates == "wait_free" and self.replicas * self.shards == 1:
            raise UsageError(
                "updates='wait_free' needs replicas: without them nothing is reduced; leave it out"
            )
        self._check_shrink()
        for name, usual in _ADAPTIVE.items():
            if getattr(self, name) != usual and not self.reroutes and self.lost_shard != QUICKEST:
                raise UsageError(
                    f"{name}={getattr(self, name)} with strategy={self.strategy!r}: it is for strategy='adaptive', and "
                    "for 'auto' with lost_shard='reroute'"
                )
        if self.staggered and not self.setting.staggers:
            raise UsageError(
                f"staggered=True with strategy={self.strategy!r}: only strategy='adaptive' takes whole steps back; "
                "leave it out"
            )
        metrics_address(self.metrics_listen, insecure=False, flag="metrics_listen")
        for name in ("suspicion_timeout_s", "replay_stall_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name}={getattr(self, name)}; give more than 0")

    def _check_shrink(self) -> None:
        if problem := lost_shard_problem(self.strategy, self.lost_shard):
            raise UsageError(f"lost_shard={self.lost_shard!r} with strategy={self.strategy!r}: {problem}")
        if not self.shrinks:
            return
        moves = bool(self.setting.without_replicas) and not self.drops and self.tensor_parallel == 1
        if self.shards > 1 or (self.replicas == 1 and not moves):
            raise UsageError(
                f"strategy={self.strategy!r} with replicas={self.replicas} and shards={self.shards}: others go on for "
                "a lost rank if they hold all of its state, and FSDP2 does not average gradients itself; give at least "
                "2 replicas, without shards"
            )
        if self.tensor_parallel > 1 and self.drops:
            raise UsageError(
                f"tensor_parallel={self.tensor_parallel} with batches that are dropped: leave lost_shard out, or take "
                "strategy='shrink'"
            )
        inexact = {
            "exact_gradients=False": (not self.exact_gradients, "leave it out"),
            f"strategy={self.strategy!r}": (self.finishes_cut_steps, "use strategy='rollback'"),
            "lost_shard='drop'": (self.lost_shard == "drop", "use lost_shard='redistribute'"),
        }
        for what, (chosen, instead) in inexact.items():
            if chosen and not self.allow_inexact:
                raise UsageError(
                    f"{what} does not lead to the bits of a run that never failed: say allow_inexact=True "
                    f"(--allow-inexact), or {instead}"
                )
        if self.snapshot_every:
            raise UsageError(
                f"lost_shard={self.lost_shard!r} with snapshot_every={self.snapshot_every}: a rank that is not there "
                "keeps no snapshot; leave one out"
            )
        if self.redistributes and self.updates == "wait_free":
            raise UsageError(
                "lost_shard='redistribute' with updates='wait_free': gradients are applied before those of a lost rank "
                "are computed; use updates='after_backward'"
            )
        if self.redistributes and self.reduction == "fast" and self.replicas > 2:
            raise UsageError(
                "lost_shard='redistribute' with reduction='fast': the sum would have another order with fewer ranks; "
                "use reduction='ordered'"
            )

    @property
    def setting(self) -> Setting:
        """The setting that `strategy` names."""
        return SETTINGS[self.strategy]

    @property
    def steps_to_snapshot(self) -> int:
        """Steps between two snapshots; 0 if none are taken."""
        return self.snapshot_every or self.setting.snapshot_every

    @property
    def shrinks(self) -> bool:
        """True if the job goes on without a lost rank; with "auto", if no other process takes its place."""
        return self.setting.shrinks or bool(self.lost_shard)

    @property
    def redistributes(self) -> bool:
        """True if other ranks compute the batches of a lost rank."""
        return self.shrinks and not self.drops and self.replicas > 1

    @property
    def reroutes(self) -> bool:
        """True if a lost rank's peers share its microbatches, within the common step."""
        return reroutes(self.strategy, self.lost_shard)

    @property
    def drops(self) -> bool:
        """True if no rank computes the batches of a lost rank."""
        return self.finishes_cut_steps or (self.shrinks and self.lost_shard == "drop")

    @property
    def finishes_cut_steps(self) -> bool:
        """True if a step whose reduction a loss cuts short is finished with the remaining ranks' gradients."""
        return Strategy.LOSSY_FORWARD in self.setting.permits

    def not_shared(self, problem: str, instead: str = "") -> UsageError:
        """Returns the error for a setting that does not go with `lost_shard` or the strategy. `instead` names an
        alternative."""
        way, usual = "lost_shard='redistribute'", "use lost_shard='drop'"
        if self.reroutes:
            way, usual = "lost_shard='reroute'", "use lost_shard='redistribute'"
        if self.setting.reroutes:
            way, usual = f"strategy={self.strategy!r}", "use strategy='shrink'"
        return UsageError(f"{way} {problem}; {instead or usual}")

    def agreed(self) -> dict[str, str]:
        """Returns the settings that must be equal on all ranks, as text. The coordinator compares them at each join.

        Some are left out at their defaults: jobs and checkpoints of earlier versions have none of these.
        """
        values = {name: getattr(self, name) for name in _AGREED} | {"snapshot_every": self.steps_to_snapshot}
        unsaid = _UNSAID if self.reroutes else _UNSAID | _ADAPTIVE
        agreed = {name: str(value) for name, value in values.items() if value != unsaid.get(name)}
        if self.shrinks:
            agreed["lost_shard"] = "drop" if self.drops else "reroute" if self.reroutes else "redistribute"
        return agreed


ENV_CHECKPOINT_DIR = "SWIFT_CHECKPOINT_DIR"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Identity of this process and its job, from its environment variables."""

    rank: int
    """Number of the process's slot."""
    world_size: int
    coordinator: str
    """host:port"""
    job: str
    incarnation: str


def _command() -> str:
    """Returns the command that starts this process's script as `swift-ft run` would; by what torchrun has set."""
    ranks, machines = os.environ.get("LOCAL_WORLD_SIZE", "N"), os.environ.get("GROUP_WORLD_SIZE", "1")
    flags = ["--standalone"]
    if machines != "1":
        flags = f"--coordinator HOST:PORT --job NAME --checkpoint-dir DIR --nnodes {machines}".split()
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    script = [sys.argv[0]] if main is None else ["-m", main.name]
    return shlex.join(["swift-ft", "run", *flags, "--nproc-per-node", ranks, *script, *sys.argv[1:]])


def place_from_environment() -> Place:
    """Reads the environment. Raises UsageError if this process was not started by ``swift-ft run``."""
    try:
        place = Place(
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            coordinator=os.environ["SWIFT_COORDINATOR"],
            job=os.environ["SWIFT_JOB"],
            incarnation=os.environ["SWIFT_INCARNATION"],
        )
    except KeyError as error:
        raise UsageError(f"{error.args[0]} is not set: start the script with `{_command()}`") from None
    check_name("job", place.job)  # it becomes part of a path
    return place


def checkpoint_directory(job: str) -> str:
    """Returns the job's own folder (or prefix) in the place of `--checkpoint-dir`, which jobs may share. Raises
    UsageError."""
    checkpoints = os.environ.get(ENV_CHECKPOINT_DIR, "")
    if not checkpoints:
        raise UsageError(
            "the job has no directory for checkpoints: name it with `swift-ft run --checkpoint-dir DIR`"
        )
    return f"{checkpoint_place(checkpoints)}/{job}"


def lines_directory(checkpoint_dir: str) -> Path:
    """Returns the directory of a job's lines of metrics: beside its checkpoints, or, since no object is appended to, in
    the working directory."""
    return Path(f"swift-{checkpoint_dir.rpartition('/')[2]}" if scheme_of(checkpoint_dir) else checkpoint_dir)


def fitted(config: SessionConfig, world_size: int) -> tuple[SessionConfig, Assignment]:
    """Returns the settings, with choices that depend on the number of ranks resolved, and the assignment of the full
    world. Raises UsageError if `config` does not fit the number of ranks."""
    try:
        assignment = Assignment.grid(
            world_size, replicas=config.replicas, shards=config.shards, tensor=config.tensor_parallel
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    if config.lost_shard == QUICKEST:
        config = replace(config, lost_shard=quickest(assignment.stage_groups, config.replicas))
    if config.shrinks and world_size == 1:
        raise UsageError(f"strategy={config.strategy!r} with one rank: nobody is left to go on without it")
    if config.finishes_cut_steps and assignment.stage_groups > 1:
        raise UsageError(
            f"strategy={config.strategy!r} with {assignment.stage_groups} pipeline ranks: only replicas of a whole "
            "model finish a step so; use strategy='rollback'"
        )
    if config.drops and assignment.stage_groups > 1:
        raise UsageError(
            f"lost_shard='drop' with {assignment.stage_groups} pipeline ranks: the other ranks of a lost one's "
            "pipeline would have nothing to do; use lost_shard='redistribute'"
        )
    if config.steps_to_snapshot and world_size == 1:
        raise UsageError(
            f"strategy={config.strategy!r} with snapshots and one rank: no other one can keep a copy of its state; "
            "start more ranks, or use "
            "strategy='checkpoint'"
        )
    return config, assignment
