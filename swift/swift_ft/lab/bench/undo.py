"""`swift-ft bench undo`: cost of the journal and of undo, relative to the optimizer's own step in the same run.

Each figure is a median over rounds. A round runs everything that is compared in turn, so a busy machine slows all of
it. A ratio is the median of the rounds' ratios. The model is GPT-like: a few large matrices, many small vectors.
plain       the optimizer's step, alone
journal     the same step through the journal, in buckets, without keeping values (goal: at most 1.02 of plain)
recording   the same, keeping the values that the undo needs
undo        undoing the whole step (goal: at most 1.0 of plain arithmetic, 1.5 exact)
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.optimizers import Lamb, Lion
from swift_ft.state.journal import Journal

Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, tuple[Make, dict[str, Any], tuple[str, ...]]] = {
    # name: class, hyperparameters, implementations other than the for-loop
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}, ("foreach", "fused")),
    "adam": (torch.optim.Adam, {"lr": 1e-3}, ("foreach", "fused")),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}, ("foreach", "fused")),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}, ("foreach", "fused")),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}, ("foreach",)),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}, ("foreach",)),
    "nadam": (torch.optim.NAdam, {"lr": 1e-3}, ("foreach",)),
    "radam": (torch.optim.RAdam, {"lr": 1e-3}, ("foreach",)),
    "lamb": (Lamb, {"lr": 1e-2, "weight_decay": 0.01}, ()),
    "lion": (Lion, {"lr": 1e-4, "weight_decay": 0.1}, ()),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GOALS = {"journal": 1.02, "undo_arithmetic": 1.0, "undo_exact": 1.5, "bytes_exact": 3.0}
GROWN = 6
"""Steps that run before the measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One line of the result: an optimizer, its implementation and a dtype."""

    optimizer: str
    implementation: str
    dtype: str

    def make(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        cls, hyper, implementations = OPTIMIZERS[self.optimizer]
        flags = {
            "for-loop": {"foreach": False} if implementations else {},
            "foreach": {"foreach": True},
            "fused": {"fused": True},
        }
        return cls(parameters, **hyper, **flags[self.implementation])


def cases(optimizers: Sequence[str], dtypes: Sequence[str]) -> list[Case]:
    """Lists all cases that torch 2.13 computes correctly: its fused SGD is wrong for bfloat16 on a CPU."""
    return [
        Case(optimizer=name, implementation=implementation, dtype=dtype)
        for name in optimizers
        for dtype in dtypes
        for implementation in ("for-loop", *OPTIMIZERS[name][2])
        if (name, implementation, dtype) != ("sgd", "fused", "bfloat16")
    ]


def model(elements: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Creates layers of a matrix [4 W, W] and two vectors [W], about `elements` in all, with gradients."""
    width = max(8, int((elements / 24) ** 0.5))
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for _ in range(max(1, elements // (4 * width * width))):
        for shape in ((4 * width, width), (width,), (width,)):
            value = torch.randn(shape, generator=generator) * 0.02
            parameters.append(torch.nn.Parameter(value.to(dtype)))
    for parameter in parameters:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * 0.01).to(dtype)
    return parameters


class Bench:
    """One case: an optimizer that steps plainly, and three of the same kind, each with a journal in another mode."""

    def __init__(self, case: Case, elements: int, bucket_bytes: int):
        self.case = case
        dtype = DTYPES[case.dtype]
        self._plain = case.make(model(elements, dtype))
        self._journals: dict[str, Journal] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        for mode in ("none", "arithmetic", "exact"):
            optimizer = self._optimizers[mode] = case.make(model(elements, dtype))
            self._journals[mode] = Journal(optimizer, undo=mode, bucket_bytes=bucket_bytes)
        self.elements = sum(p.numel() for p in _parameters(self._plain))
        self._step = 0
        self.seconds: dict[str, list[float]] = {}
        for _ in range(GROWN):
            self._grow()

    def _grow(self) -> None:
        """Runs a step that is not undone, so that the state differs from that after a first step."""
        self._step += 1
        generator = torch.Generator().manual_seed(self._step)
        some = [p.grad for p in _parameters(self._plain) if p.grad is not None]
        for gradient in some:
            gradient.copy_(torch.randn(gradient.shape, generator=generator) * 0.01)
        self._plain.step()
        for mode, journal in self._journals.items():
            for mine, theirs in zip(_parameters(self._optimizers[mode]), some, strict=True):
                assert mine.grad is not None
                mine.grad.copy_(theirs)
            journal.begin(self._step)
            journal.apply_rest()

    def round(self) -> None:
        """Times every variant once, in turn."""
        self._step += 1
        self._time("plain", self._plain.step)
        for mode, journal in self._journals.items():
            journal.begin(self._step)
            self._time("journal" if mode == "none" else f"recording_{mode}", journal.apply_rest)
            if mode != "none":
                self._time(f"undo_{mode}", journal.undo)
        self._level()

    def _level(self) -> None:
        """Copies the exact state into the arithmetic optimizer, so that errors do not accumulate over rounds."""
        true, rough = (self._optimizers[mode] for mode in ("exact", "arithmetic"))
        with torch.no_grad():
            for theirs, mine in zip(_parameters(true), _parameters(rough), strict=True):
                mine.copy_(theirs)
                for name, value in true.state.get(theirs, {}).items():
                    rough.state[mine][name].copy_(value)

    def _time(self, what: str, call: Callable[[], Any]) -> None:
        began = time.perf_counter()
        call()
        self.seconds.setdefault(what, []).append(time.perf_counter() - began)

    def forget(self) -> None:
        """Discards the times of the warm-up rounds."""
        self.seconds.clear()

    def result(self) -> dict[str, Any]:
        """Returns the case in numbers: ms of a plain step, and the median ratios of the other times to it."""
        plain = self.seconds["plain"]
        result: dict[str, Any] = {
            "optimizer": self.case.optimizer,
            "implementation": self.case.implementation,
            "dtype": self.case.dtype,
            "parameters": self.elements,
            "step_ms": statistics.median(plain) * 1e3,
        }
        for what, seconds in self.seconds.items():
            if what != "plain":
                ratios = [value / base for value, base in zip(seconds, plain, strict=True)]
                result[what] = statistics.median(ratios)
        result |= self._kept_and_error()
        result["goals_met"] = {
            name: result[name] <= goal
            for name, goal in GOALS.items()
            if name != "journal" or self.case.implementation != "for-loop"
        }
        return result

    def _kept_and_error(self) -> dict[str, Any]:
        """Measures bytes and error of the undo, in steps outside the timed rounds."""
        figures: dict[str, Any] = {}
        for mode in ("arithmetic", "exact"):
            journal = self._journals[mode]
            journal.begin(self._step + 1)
            journal.apply_rest()
            figures[f"bytes_{mode}"] = journal.extra_bytes / self.elements
            journal.undo()
            self._level()
            journal.measure = True
            journal.begin(self._step + 1)
            journal.apply_rest()
            result = journal.undo()
            journal.measure = False
            if mode == "exact" and result.exact_share != 1.0:
                raise ServiceError(f"{self.case}: the exact undo was not exact")
            figures[f"error_{mode}"] = {
                "ulps_max": result.ulps_max,
                "ulps_mean": result.ulps_mean,
                "exact_share": result.exact_share,
                "over_step": result.step_error,
            }
        passing = self._journals["exact"].passing_bytes
        figures["passing_bytes_exact"] = passing / self.elements
        return figures


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def machine() -> dict[str, Any]:
    """Describes the machine, with the speed of memory copies, which limits everything here."""
    source, target = torch.ones(1 << 24), torch.ones(1 << 24)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return {
        "cpu": output.cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "copy_gigabytes_per_second": 2 * source.numel() * 4 / statistics.median(seconds) / 1e9,
    }


HEAD = (
    f"{'optimizer':<9} {'dtype':<8} {'by':<8} {'step':>8} {'journal':>7}  "
    f"{'recording':^15}  {'undo':^15}  {'bytes':>5}  {'error in ulps':>14}\n"
    f"{'':<9} {'':<8} {'':<8} {'ms':>8} {'':>7}  {'arithm.':>7} {'exact':>7}  {'arithm.':>7} {'exact':>7}  "
    f"{'exact':>5}  {'max':>7} {'mean':>6}"
)


def row(case: dict[str, Any]) -> str:
    """Formats one case as a line of text."""

    def ratio(name: str, goal: str | None = None) -> str:
        met = case["goals_met"].get(goal or name, True)
        return f"{case[name]:6.2f}{' ' if met else '*'}"

    error = case["error_arithmetic"]
    return (
        f"{case['optimizer']:<9} {case['dtype']:<8} {case['implementation']:<8} {case['step_ms']:8.2f} "
        f"{ratio('journal')}  {ratio('recording_arithmetic', '')} {ratio('recording_exact', '')}  "
        f"{ratio('undo_arithmetic')} {ratio('undo_exact')}  {case['bytes_exact']:5.2f}  "
        f"{error['ulps_max']:7.0f} {error['ulps_mean']:6.3f}"
    )


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--parameters", type=int, default=4_000_000, metavar="N", help="elements of the model")
    add("--rounds", type=int, default=9, metavar="N", help="repetitions that are timed")
    add("--bucket-mb", type=float, default=25.0, metavar="MB", help="bytes of a bucket, in 2^20")
    add("--optimizers", default=",".join(OPTIMIZERS), metavar="A,B", help="some of the optimizers")
    add("--dtypes", default=",".join(DTYPES), metavar="A,B", help="some of the element types")


def run(arguments: Any) -> dict[str, Any]:
    optimizers = output.some(arguments.optimizers, OPTIMIZERS, "--optimizers")
    dtypes = output.some(arguments.dtypes, DTYPES, "--dtypes")
    if arguments.parameters < 1 or arguments.rounds < 1 or arguments.bucket_mb <= 0:
        raise UsageError("--parameters, --rounds and --bucket-mb must be positive")
    about = machine()
    print(
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads, torch {about['torch']}, "
        f"copies {about['copy_gigabytes_per_second']:.1f} GB/s"
    )
    print(
        f"about {arguments.parameters} parameters, medians of {arguments.rounds} rounds; * misses its goal\n{HEAD}"
    )
    results = []
    for case in cases(optimizers, dtypes):
        bench = Bench(case, arguments.parameters, int(arguments.bucket_mb * (1 << 20)))
        for index in range(arguments.rounds + 2):
            if index == 2:
                bench.forget()
            bench.round()
        result = bench.result()
        results.append(result)
        print(row(result), flush=True)
    met = {name: [r["goals_met"][name] for r in results if name in r["goals_met"]] for name in GOALS}
    for name, each in met.items():
        print(f"{name} at most {GOALS[name]}: {sum(each)} of {len(each)}")
    return {
        "machine": about,
        "goals": {
            n: {"at_most": GOALS[n], "met": all(each), "cases_met": sum(each), "cases": len(each)}
            for n, each in met.items()
        },
        "results": results,
    }
