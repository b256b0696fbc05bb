"""The table of all options of `swift-ft drill`.

The command's flags and help, the trainer's flags, the configuration's defaults, the checks of single values, and the
command that reproduces a drill come from this table. A new option is an entry here and a field of `DrillConfig`.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from swift_ft.errors import UsageError
from swift_ft.lab.drill.topology import MODELS, SCHEDULES
from swift_ft.launch.decisions import CHECKS_MAX
from swift_ft.planner import STRATEGIES
from swift_ft.planner.settings import LOST_SHARDS, QUICKEST
from swift_ft.state import MODES as CHECKPOINT_MODES

IMPLEMENTATIONS = ("for-loop", "foreach", "fused")
# name -> torch's implementations of it; the project's own optimizers have none
OPTIMIZERS = {
    "adamw": IMPLEMENTATIONS,
    "sgd": IMPLEMENTATIONS,
    "amsgrad": IMPLEMENTATIONS,
    "adam": IMPLEMENTATIONS,
    "adagrad": IMPLEMENTATIONS,
    "rmsprop": ("for-loop", "foreach"),
    "adadelta": ("for-loop", "foreach"),
    "nadam": ("for-loop", "foreach"),
    "radam": ("for-loop", "foreach"),
    "lamb": (),
    "lion": (),
}
DEFAULT_KILL = "rank=2,step=17,microbatch=3,phase=backward"


class Reach(Enum):
    """Processes that an option is passed to."""

    DRILL = auto()
    """The drill alone."""
    RUN = auto()
    """The trainer of the run with faults as well: recovery settings, which change no bit of the twin."""
    BOTH = auto()
    """The trainers of both runs: their digests are comparable only if the option is the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of the drill's command line, and its effect on the run."""

    name: str
    """The flag without the leading dashes."""
    help: str = ""
    metavar: str = "NAME"
    """Empty: the option is a switch."""
    kind: type = str
    default: Any = ""
    """The default. Help does not show "" and None."""
    known: tuple[str, ...] = ()
    """Valid values; case, and - for _, do not matter."""
    bounds: tuple[float, float] | None = None
    several: bool = False
    """The option may be given several times."""
    field: str = ""
    """Field of `DrillConfig` or `Topology`, if it differs from the name with underscores."""
    reach: Reach = Reach.DRILL
    updates: bool = False
    """The option is in the help's group "updates": from gradients to parameters, and back."""

    @property
    def attribute(self) -> str:
        return self.field or self.name.replace("-", "_")

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Adds the flag, with a help that lists known values and the default."""
        flag = f"--{self.name}"
        description = ": ".join(filter(None, [self.help, ", ".join(self.known)]))
        if not self.metavar:
            parser.add_argument(flag, action="store_true", help=description)
        elif self.several:
            parser.add_argument(flag, action="append", default=[], metavar=self.metavar, help=description)
        else:
            shown = description if self.default in ("", None) else f"{description} (default %(default)s)"
            parser.add_argument(flag, type=self.kind, default=self.default, metavar=self.metavar, help=shown)

    def value(self, given: Any) -> Any:
        """Returns the given value in the table's spelling."""
        if not self.known:
            return given
        return next((known for known in self.known if _plain(known) == _plain(given)), given)

    def check(self, value: Any) -> None:
        """Raises UsageError for a value that is invalid whatever the other options are."""
        if self.known and value != self.default and value not in self.known:
            raise UsageError(f"unknown --{self.name} {value!r}: one of {', '.join(self.known)}")
        if self.bounds is not None:
            least, most = self.bounds
            if not least <= value <= most:
                raise UsageError(f"--{self.name} must be {least:g} to {_power(int(most))}, not {value}")

    def words(self, value: Any) -> list[str]:
        """Returns the command-line words for this value."""
        if not self.metavar:
            return [f"--{self.name}"] if value else []
        values = value if self.several else [value]
        return [word for each in values if str(each) for word in (f"--{self.name}", str(each))]


def _plain(word: str) -> str:
    return word.lower().replace("_", "-")


def _power(number: int) -> str:
    return "2**63 - 1" if number == 2**63 - 1 else str(number)


OPTIONS = (
    Option(
        name="stages",
        metavar="P",
        help="ranks in a pipeline",
        kind=int,
        default=4,
        field="pipeline_ranks",
        reach=Reach.BOTH,
    ),
    Option(
        name="replicas", metavar="D", help="replicas of every stage", kind=int, default=1, reach=Reach.BOTH
    ),
    Option(name="steps", metavar="N", help="optimizer steps", kind=int, default=30, reach=Reach.BOTH),
    Option(
        name="microbatches",
        metavar="M",
        help="microbatches per step and replica",
        kind=int,
        default=8,
        reach=Reach.BOTH,
    ),
    Option(name="schedule", default="1f1b", known=tuple(SCHEDULES), reach=Reach.BOTH),
    Option(
        name="kill",
        metavar="SPEC",
        help=f"a fault, see below (default: {DEFAULT_KILL})",
        several=True,
        field="faults",
    ),
    Option(
        name="random-kills",
        metavar="N",
        help="kill this many ranks, at coordinates that --seed decides",
        kind=int,
        default=None,
    ),
    Option(
        name="strategy",
        default="auto",
        known=STRATEGIES,
        reach=Reach.RUN,
    ),
    Option(
        name="checkpoint-mode",
        help="when training goes on after a checkpoint: once the state is copied, or once it is durable",
        default="async",
        known=CHECKPOINT_MODES,
        reach=Reach.RUN,
    ),
    Option(
        name="lost-shard",
        help="with --strategy shrink or rollback, what becomes of a lost rank's batches (default: redistribute)",
        known=(*LOST_SHARDS, QUICKEST),
        reach=Reach.RUN,
    ),
    Option(
        name="exact-gradients",
        help="with --strategy adaptive, whether a lost rank's gradients are kept apart, or added to a rank's own "
        "('off': not exact)",
        default="on",
        known=("on", "off"),
        reach=Reach.RUN,
    ),
    Option(
        name="split-backward",
        help="with --strategy adaptive, whether gradients of weights are computed behind those of inputs while a rank "
        "is missing",
        default="on",
        known=("on", "off"),
        reach=Reach.RUN,
    ),
    Option(
        name="adaptive-memory",
        metavar="FACTOR",
        help="with --strategy adaptive, how many times the activations of the schedule a rank may hold meanwhile",
        kind=float,
        default=1.0,
        bounds=(1.0, 1000.0),
        reach=Reach.RUN,
    ),
    Option(
        name="staggered",
        help="with --strategy adaptive, whether a rank begins the next step before other stages have done this one",
        default="off",
        known=("on", "off"),
        reach=Reach.RUN,
    ),
    Option(
        name="snapshot-every",
        metavar="K",
        help="with --strategy snapshot (there 4, if 0) and auto, steps between copies in host memory; 0: none",
        kind=int,
        default=0,
        bounds=(0, 10**6),
        reach=Reach.RUN,
    ),
    Option(
        name="allow-inexact",
        metavar="",
        help="what does not lead to the bits of a run that never failed may be asked for",
        default=False,
        reach=Reach.RUN,
    ),
    Option(
        name="grow",
        metavar="step=N",
        help="with a strategy that goes on without a lost rank, it comes back when the others have done step N; these "
        "wait for it (default: never)",
        reach=Reach.RUN,
    ),
    Option(
        name="unfit",
        metavar="SPEC",
        help="rank=R,times=N: once rank R is lost, its place fails the launcher's health check N times (default 1; "
        f"after {CHECKS_MAX} it is given up)",
    ),
    Option(
        name="groups",
        metavar="RUNS",
        help="recovery groups, such as 0-1,2-3; only what passes between groups is logged (default: none)",
        reach=Reach.RUN,
    ),
    Option(
        name="seed",
        metavar="S",
        help="seed of everything random",
        kind=int,
        default=0,
        bounds=(0, 2**63 - 1),
        reach=Reach.BOTH,
    ),
    Option(
        name="log-servers",
        metavar="N",
        help="log servers, as if on N machines",
        kind=int,
        default=1,
        bounds=(1, 16),
    ),
    Option(name="copies", metavar="C", help="copies of every record", kind=int, default=1),
    Option(name="spares", metavar="N", help="warm spare processes", kind=int, default=1, bounds=(0, 64)),
    Option(
        name="warm-up",
        metavar="",
        help="a spare for each rank has run the script as that rank, up to one forward and backward, before its loss",
        default=False,
    ),
    Option(
        name="helpers",
        metavar="N",
        help="ranks that share a replay",
        kind=int,
        default=0,
        bounds=(0, 64),
        reach=Reach.RUN,
    ),
    Option(name="model", default="default", known=tuple(MODELS), reach=Reach.BOTH),
    Option(
        name="checkpoint-every",
        metavar="K",
        help="steps between checkpoints",
        kind=int,
        default=10,
        reach=Reach.BOTH,
    ),
    Option(
        name="updates",
        help="when buckets of gradients are applied",
        default="after_backward",
        known=("after_backward", "wait_free"),
        reach=Reach.BOTH,
        updates=True,
    ),
    Option(
        name="data-parallel",
        help="who averages gradients over replicas",
        default="session",
        known=("session", "ddp"),
        reach=Reach.BOTH,
        updates=True,
    ),
    Option(
        name="reduction",
        help="the order in which gradients are summed; auto: by replica, from three replicas on",
        default="auto",
        known=("auto", "ordered", "fast"),
        reach=Reach.BOTH,
        updates=True,
    ),
    Option(
        name="undo",
        help="how a half-applied step is taken back",
        default="exact",
        known=("exact", "arithmetic", "preimage"),
        reach=Reach.RUN,
        updates=True,
    ),
    Option(
        name="optimizer",
        help="amsgrad is AdamW with amsgrad, sgd has Nesterov momentum",
        default="adamw",
        known=tuple(OPTIMIZERS),
        reach=Reach.BOTH,
        updates=True,
    ),
    Option(
        name="optimizer-implementation",
        help="torch's implementation of the optimizer (default: torch's choice)",
        known=IMPLEMENTATIONS,
        reach=Reach.BOTH,
        updates=True,
    ),
    Option(
        name="rehearse",
        metavar="WHEN",
        help="rehearse recoveries while the job runs: 'start', 'always' or 'off'",
        default="off",
    ),
    Option(
        name="secure", metavar="", help="use mutual TLS and tokens, all made for this drill", default=False
    ),
    Option(
        name="json",
        metavar="PATH",
        help="write the report as JSON",
        kind=Path,
        default=None,
        field="json_path",
    ),
    Option(
        name="html",
        metavar="PATH",
        help="write the report as a page",
        kind=Path,
        default=None,
        field="html_path",
    ),
    Option(
        name="directory",
        metavar="DIR",
        help="keep everything of both runs in this directory (must be empty)",
        kind=Path,
        default=None,
    ),
    Option(
        name="keep",
        metavar="",
        help="keep the temporary directory (it is kept if the drill fails)",
        default=False,
    ),
    Option(
        name="twin",
        metavar="DIR",
        help="directory of the failure-free run; the run is used if it is finished there, else made there",
        kind=Path,
        default=None,
    ),
)
_BY_ATTRIBUTE = {option.attribute: option for option in OPTIONS}
DEFAULTS = {attribute: option.default for attribute, option in _BY_ATTRIBUTE.items()}
_RESULTS = ("json", "html", "directory", "keep", "twin")
"""Options for result files, which are no part of the command that reproduces a drill."""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds all options."""
    updates = parser.add_argument_group("updates")
    for option in OPTIONS:
        option.add_to(updates if option.updates else parser)


def add_trainers_to(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the trainer."""
    for option in OPTIONS:
        if option.reach is not Reach.DRILL:
            option.add_to(parser)


def check(values: Mapping[str, Any]) -> None:
    """Checks each value by itself. `values`: by attribute. Raises UsageError for an invalid one."""
    for attribute, value in values.items():
        if attribute in _BY_ATTRIBUTE:
            _BY_ATTRIBUTE[attribute].check(value)


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the given values by attribute."""
    return {
        option.attribute: option.value(getattr(arguments, option.name.replace("-", "_")))
        for option in OPTIONS
    }


def words(values: Mapping[str, Any], *reaches: Reach) -> list[str]:
    """Returns the command-line words of the options with one of these reaches. Options of the drill alone are left out
    if they have their default or name result files."""
    return [
        word
        for option in OPTIONS
        if option.reach in reaches and option.attribute in values and option.name not in _RESULTS
        for value in [values[option.attribute]]
        if option.reach is not Reach.DRILL or value != option.default
        for word in option.words(value)
    ]
