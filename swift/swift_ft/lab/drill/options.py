"""Options of `swift-ft drill` as fields of dataclasses.

The command's flags and help, the trainer's flags, the checks of single values, and the command that reproduces a drill
come from the fields that `option` makes. A new option is a field of `DrillConfig` or `Topology`.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, get_args

OPTIMIZERS = (
    *("adamw", "sgd", "amsgrad", "adam", "adagrad", "rmsprop", "adadelta", "nadam", "radam"),
    *("lamb", "lion"),
)
DEFAULT_KILL = "rank=2,step=17,microbatch=3,phase=backward"
ON_OFF = ("on", "off")


class Reach(Enum):
    """Processes that an option is passed to."""

    DRILL = auto()
    """The drill alone."""
    RUN = auto()
    """The trainer of the run with faults as well: recovery settings, which change no bit of the twin."""
    BOTH = auto()
    """The trainers of both runs: their digests are comparable only if the option is the same."""
    RESULT = auto()
    """The drill alone, for its result files: no part of the command that reproduces it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    attribute: str
    kind: Any
    """Type of the field: it decides how the flag's word is read; `bool` makes a switch, a tuple a repeated flag."""
    default: Any
    help: str
    metavar: str
    reach: Reach
    known: tuple[str, ...] = ()
    """Valid values; case, and - for _, do not matter."""
    bounds: tuple[float, float] | None = None
    flag: str = ""
    """The flag, if it differs from the field's name with dashes."""

    @property
    def name(self) -> str:
        return self.flag or f"--{self.attribute.replace('_', '-')}"

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Adds the flag, with a help that lists known values and the default."""
        described = ": ".join(filter(None, [self.help, ", ".join(self.known)]))
        if self.kind is bool:
            parser.add_argument(self.name, dest=self.attribute, action="store_true", help=described)
            return
        known: dict[str, Any] = {"dest": self.attribute, "metavar": self.metavar, "type": self.value}
        if isinstance(self.default, tuple):
            parser.add_argument(self.name, action="append", default=[], help=described, **known)
            return
        shown = described if str(self.default) in ("", "None") else f"{described} (default %(default)s)"
        parser.add_argument(self.name, default=self.default, help=shown, **known)

    @property
    def value(self) -> Any:
        """Returns the function that reads the flag's word: for known values in the table's spelling."""
        if self.known:
            return lambda word: next((each for each in self.known if _plain(each) == _plain(word)), word)
        return next((kind for kind in (int, float, Path) if kind in (self.kind, *get_args(self.kind))), str)

    def problem(self, value: Any) -> str:
        """Returns why a value is invalid whatever the other options are; empty: it is valid."""
        if self.known and value != self.default and value not in self.known:
            return f"unknown {self.name} {value!r}: one of {', '.join(self.known)}"
        least, most = self.bounds or (value, value)
        if self.bounds and not least <= value <= most:
            shown = "2**63 - 1" if most == 2**63 - 1 else f"{most:.0f}"
            return f"{self.name} must be {least:g} to {shown}, not {value}"
        return ""

    def words(self, value: Any) -> list[str]:
        if self.kind is bool:
            return [self.name] if value else []
        values = value if isinstance(value, tuple) else [value]
        return [word for each in values if str(each) for word in (self.name, str(each))]


def _plain(word: str) -> str:
    return word.lower().replace("_", "-")


def option(
    default: Any, help: str = "", metavar: str = "NAME", *, reach: Reach = Reach.DRILL, **rest: Any
) -> Any:
    """Returns the field of an option. `rest`: further fields of `Option`."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "reach": reach, **rest})


of_run = partial(option, reach=Reach.RUN)
of_both = partial(option, reach=Reach.BOTH)
of_result = partial(option, reach=Reach.RESULT)


def options_of(*kinds: Any) -> list[Option]:
    return [
        Option(attribute=each.name, kind=each.type, default=each.default, **each.metadata)
        for kind in kinds
        for each in fields(kind)
        if each.metadata
    ]


def values_of(given: Any, kind: Any) -> dict[str, Any]:
    """Returns the values of this dataclass's options, by attribute. `given`: an instance, or a parsed command line."""
    return {each.attribute: getattr(given, each.attribute) for each in options_of(kind)}


def problems(values: Mapping[str, Any], options: list[Option]) -> Iterator[str]:
    """Yields why values are invalid by themselves. `values`: by attribute."""
    found = (each.problem(values[each.attribute]) for each in options if each.attribute in values)
    return filter(None, found)


def words(values: Mapping[str, Any], options: list[Option], *reaches: Reach) -> list[str]:
    """Returns the command-line words of the options with one of these reaches. Options of the drill alone are left out
    if they have their default."""
    return [
        word
        for each in options
        if each.reach in reaches
        for value in [values[each.attribute]]
        if each.reach is not Reach.DRILL or value != each.default
        for word in each.words(value)
    ]
