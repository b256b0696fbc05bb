"""Durations of recoveries and overheads, each with its source, and published failure data.

All strategies share the parts of a recovery, so that none is modelled on a smaller machine. Each figure can be given
(`--set NAME=VALUE`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from swift_ft.errors import UsageError

DAY_S = 86400.0
RESTART_S = 4.45 * 60
"""TrainMover (OSDI 2026, arXiv 2412.12636): a restart of 8,192 GPUs. Loading the checkpoint takes 35 % of it, building
NCCL's groups 24.5 %, start and warm-up 40.4 %."""
RESTART_RANKS = 8192
_RESTART = "TrainMover (OSDI 2026), a restart of 8,192 GPUs in 4.45 min"
_RECOVERY = "swift-ft bench recovery (docs/benchmarks.md)"
VALUE_MAX = 1e15


@dataclass(frozen=True, slots=True)
class Figure:
    """One parameter of the model."""

    value: float
    words: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    ranks: int
    per_1000_node_days: float
    source: str

    @property
    def mtbf_s(self) -> float:
        """Mean time between two faults of a node."""
        return 1000 * DAY_S / self.per_1000_node_days


PRESETS: Mapping[str, Preset] = {
    "llama3": Preset(
        ranks=16384,
        per_1000_node_days=1000 * 419 / (54 * 16384 / 8),
        source="The Llama 3 Herd of Models (arXiv 2407.21783), section 3.3.4: 419 unexpected interruptions in 54 days "
        "on 16,384 GPUs",
    ),
    "infinitehbd": Preset(
        ranks=3200,
        per_1000_node_days=1000 * 584 / (400 * 349),
        source="InfiniteHBD-Trace (github.com/stepfun-ai/InfiniteHBD-Trace): 584 faults of 400 servers in 349 days, 97 "
        "of them found by stress tests",
    ),
    "rsc-1": Preset(
        ranks=16384,
        per_1000_node_days=6.50,
        source="Kokolis et al. (arXiv 2410.21680): RSC-1, 6.50 failures in 1,000 node-days",
    ),
    "rsc-2": Preset(
        ranks=8192,
        per_1000_node_days=2.34,
        source="Kokolis et al. (arXiv 2410.21680): RSC-2, 2.34 failures in 1,000 node-days",
    ),
}

FIGURES = {
    "step_s": Figure(
        6 * 405e9 * 16.8e6 / (16384 * 400e12),
        "an optimizer step",
        "Llama 3 405B, table 4: 6 * 405e9 * 16.8e6 tokens / (16,384 GPUs * 400 TFLOPS)",
    ),
    "detect_s": Figure(
        10.0,
        "until a lost node is known",
        "the lease of swift-ft coordinator: 10 heartbeats of 1 s; a process that ends is known at once",
    ),
    "start_s": Figure(
        0.404 * RESTART_S, "to start and warm up new processes on all nodes", f"40.4 % of {_RESTART}"
    ),
    "restart_s_per_rank": Figure(
        (600 - RESTART_S) / (100_000 - RESTART_RANKS),
        f"more of a restart, for each rank beyond {RESTART_RANKS:,}",
        "between those 4.45 min and 10 min at 100,000 GPUs (FT-HSDP, arXiv 2602.00277)",
    ),
    "rebuild_s": Figure(
        0.245 * RESTART_S, "to build process groups, whatever the strategy", f"24.5 % of {_RESTART}"
    ),
    "load_s": Figure(
        0.35 * RESTART_S, "to load a checkpoint, or one node's part of it", f"35 % of {_RESTART}"
    ),
    "coordinate_s_per_rank": Figure(
        2.3 / 1024,
        "of a generation at swift's coordinator",
        "swift-ft bench coordinator: 2.3 s for 1,024 members; not measured beyond, taken in proportion",
    ),
    "reinit_s": Figure(
        0.99 - 0.89,
        "to begin the training function again",
        f"{_RECOVERY}: reinit 0.99 s, checkpoint 0.89 s, of a small model",
    ),
    "state_bytes": Figure(
        405e9 * 14 / 128,
        "of a rank: weights and optimizer",
        "Llama 3 405B on 128 ranks, 14 bytes a parameter (weights in bf16; weights and two moments in float32)",
    ),
    "copy_bytes_per_s": Figure(
        0.91 * 50e9,
        "of a state, to another rank or to host memory",
        "0.91 of a raw socket (docs/benchmarks.md), of 400 Gb/s (Llama 3, section 3.3.1)",
    ),
    "save_s": Figure(
        1.3 * 6 * 405e9 * 16.8e6 / (16384 * 400e12),
        "that a checkpoint costs training",
        "1.3 steps, swift-ft bench checkpoint, async (docs/benchmarks.md)",
    ),
    "behind_s": Figure(
        3600.0,
        "or the best interval if that is longer: between checkpoints, where another way comes first",
        "assumed: what is lost if that way fails; --checkpoint-every has your own",
    ),
    "snapshot_s": Figure(
        2 * 405e9 * 14 / 128 / (0.91 * 50e9),
        "that a snapshot costs training",
        "state_bytes, copied and then passed to the partner at copy_bytes_per_s; training waits for both",
    ),
    "session_s_per_step": Figure(
        (7.2 - 4.3) / 1000, "that a session adds to a step", f"{_RECOVERY}: 7.2 ms beside torchrun's 4.3 ms"
    ),
    "log_share": Figure(
        0.008,
        "that logging adds to a step, as a share of it",
        "docs/benchmarks.md, logging of large steps: 1.008 (0.983 to 1.025) of the step",
    ),
    "helpers": Figure(
        3.0, "ranks that share a replay with its owner", "the default of swift_ft.SessionConfig"
    ),
    "repair_s": Figure(
        132.84 * 3600,
        "until a lost node is back, on average",
        "InfiniteHBD-Trace: the mean outage is 132.8 h, the median 20.4 h",
    ),
}
"""Name, which ends with the unit -> default."""
_POSITIVE = ("step_s", "copy_bytes_per_s", "repair_s", "behind_s")
SAVE_STEPS = 1.3


def check(name: str, value: float, flag: str) -> None:
    """Raises UsageError, prefixed by `flag`, if there is no such figure or the value is invalid."""
    if name not in FIGURES:
        raise UsageError(f"{flag}: there is no figure {name}; there are {', '.join(FIGURES)}")
    least = "more than 0" if name in _POSITIVE else "0"
    if not 0 <= value <= VALUE_MAX or (value == 0 and name in _POSITIVE):
        raise UsageError(f"{flag}: {name} is {value:g}; give {least}, at most {VALUE_MAX:g}")


def resolve(given: Mapping[str, tuple[float, str]]) -> dict[str, Figure]:
    """Returns all figures by name. `given`: value and source of those that differ from the default.

    Unless given, two follow from others: a checkpoint costs 1.3 steps, and a snapshot two copies of the state.
    """
    figures = dict(FIGURES)
    for name, (value, source) in given.items():
        figures[name] = replace(figures[name], value=value, source=source)
    if "save_s" not in given:
        figures["save_s"] = replace(figures["save_s"], value=SAVE_STEPS * figures["step_s"].value)
    if "snapshot_s" not in given:
        copy_s = figures["state_bytes"].value / figures["copy_bytes_per_s"].value
        figures["snapshot_s"] = replace(figures["snapshot_s"], value=2 * copy_s)
    return figures
