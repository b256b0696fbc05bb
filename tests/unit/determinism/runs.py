"""Runs of made-up records."""

from collections.abc import Collection, Mapping, Sequence

from swift_ft.lab.determinism.verify import Process, Record, Run
from swift_ft.train.transcript import ENTERS, GRADIENT, INPUT, LEAVES, LOSS, OUTPUT, STATE, Seen

SEEN = {
    "torch": Seen(STATE, 0, 0, 0, "generator torch"),
    "numpy": Seen(STATE, 0, 0, 0, "generator numpy"),
    "w": Seen(STATE, 0, 0, 0, "parameter Net.w"),
    "frozen": Seen(STATE, 0, 0, 0, "parameter Net.frozen"),
    "mean": Seen(STATE, 0, 0, 0, "buffer Net.mean"),
    "lr": Seen(STATE, 0, 0, 0, "optimizer 0.param_groups.0.lr"),
    "momentum": Seen(STATE, 0, 0, 0, "optimizer 0.state.Net.w.momentum"),
    "x": Seen(INPUT, 0, 0, 0),
    "inner x": Seen(ENTERS, 0, 0, 0, "Net.inner"),
    "inner y": Seen(LEAVES, 0, 0, 0, "Net.inner"),
    "y": Seen(OUTPUT, 0, 0, 0),
    "loss": Seen(LOSS, 0, 0, 0),
    "g": Seen(GRADIENT, 0, 0, 0, "Net.w"),
}
"""In the order in which a step comes to them."""
_OF_RANK = ("x", "inner x", "inner y", "y", "loss")


def digest(word: str, step: int, rank: int = 0) -> bytes:
    """The value of an uninterrupted run: everything changes with each step, but for what nobody uses."""
    if word in ("frozen", "numpy"):
        return word.encode()
    return f"{word} {step} {rank if word in _OF_RANK else ''}".encode()


def record(
    step: int,
    rank: int = 0,
    changed: Mapping[str, bytes] | None = None,
    *,
    without: Collection[str] = (),
    settings: Mapping[str, str] | None = None,
    last: bool = False,
) -> Record:
    values = {word: digest(word, step, rank) for word in SEEN} | dict(changed or {})
    seen = {SEEN.get(w, Seen(STATE, 0, 0, 0, w)): value for w, value in values.items() if w not in without}
    return Record(rank, step, seen, settings or {"threads": "2"}, last)


def run(*processes: Process) -> Run:
    return Run(processes)


def steps(first: int, behind: int, rank: int = 0) -> Sequence[Record]:
    """Those of a process that nobody disturbs."""
    return [record(step, rank) for step in range(first, behind)]


def whole(behind: int, ranks: int = 1) -> Run:
    """An uninterrupted run."""
    return run(*(steps(0, behind, rank) for rank in range(ranks)))
