"""What a drill shows: its progress, and its report, in a terminal or, with checks and digests, as a page."""

import html
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from swift_ft.lab.drill import replay_report

COLOURS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow"}
PHASE_COLOURS = {
    "detect": "red",
    "superseded": "bright_black",
    "fence": "yellow",
    "plan": "bright_yellow",
    "rebuild": "blue",
    "restore": "cyan",
    "replay": "magenta",
    "rejoin": "green",
}
BAR_CELLS = 60
ANSWERS = {True: "yes", False: "NO", None: "no evidence"}
_MERGED = ("notice", "freed", "group_built", "ready", "restore_begin", "restore_end", "roll_forward")
"""Events that every rank emits at about the same time: one line for all ranks."""


class LiveProgress(Progress):
    """Progress bar for each run on a terminal; no output elsewhere. Never starts a thread: children die with the thread
    that started them."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        super().__init__(
            TextColumn("{task.description:<13}"),
            BarColumn(30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: Any = None
        self._drawn = 0.0

    def begin(self, title: str, steps: int) -> None:
        if self._task is not None:
            self.update(self._task, note="done")
        self._task = self.add_task(title, total=steps, note="starting")
        self.refresh()

    def tick(self) -> None:
        """(called in each iteration of the run's loop) Redraws at most ten times per second."""
        if time.monotonic() - self._drawn > 0.1:
            self._drawn = time.monotonic()
            self.refresh()

    def see(self, event: Mapping[str, Any]) -> None:
        """Shows one event of the trace."""
        name = event["event"]
        if name == "step_end" and not event.get("replay"):
            self.update(self._task, completed=event["step"] + 1, note="")
        elif name in ("fault", "state", "replay_progress", "service_killed"):
            self.update(self._task, note=describe(event))


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def headline(result: Mapping[str, Any]) -> str:
    """Returns the verdict and its basis."""
    if result["verdict"] != "PASS":
        return str(result["verdict"])
    if result["exact"]:
        return "PASS (exact)"
    if result["by_the_loss_curve"]:
        return f"PASS (by the loss curve: {result['by_the_loss_curve']})"
    if result["shrink"] is not None and result["shrink"]["lost_shard"] == "drop":
        return "PASS (by an independent calculation: batches were dropped)"
    return "PASS (by the checkpoint, not by exact replay)"


_WORDS = {
    "fault": "rank {rank} killed in {phase}, step {step}, microbatch {microbatch}",
    "service_killed": "{service} killed{where}",
    "corrupted": "one bit of {stream} flipped ({record})",
    "corrupted checkpoint": "one bit flipped in rank {rank}'s checkpoint of version {version}",
    "corrupted copy": "one bit flipped in what rank {rank} is given by a replica (byte {byte} of a chunk)",
    "child_exit": "rank {rank}'s process is gone (exit code {code})",
    "state": "{state}, generation {generation}{why}",
    "plan": "go on at version {target_version}: {reason}",
    "refused": "rank {rank} refuses: {reason}",
    "notice": "told to stop",
    "freed": "out of the half-done step",
    "spare_assigned": "rank {rank} is now a {process} (pid {pid})",
    "group_built": "has the new group",
    "restore_begin": "gets its state (a checkpoint or a replica)",
    "restore_end": "has its state",
    "replay_begin": "rank {rank} replays from version {version}",
    "help_begin": "rank {rank} is helped by {names}: {shares} microbatches of a step",
    "help_end": "rank {rank} goes on alone{because}",
    "help_declined": "rank {rank} does not help rank {owner}: {reason}",
    "helped": "rank {rank} has helped rank {owner}: {microbatches} microbatches",
    "replay_progress": "rank {rank} replays, at version {version}; left: {steps_left} steps, {left}",
    "replay_end": "rank {rank} replayed {steps} steps in {took}: {records} records read, {verified} sends verified, "
    "{filled} filled",
    "roll_forward": "finishes the step that was under way",
    "undone": "rank {rank} took {buckets} buckets back ({mode})",
    "replica_received": "rank {rank} has {megabytes} MB of state from rank {source}",
    "ready": "ready",
}
"""Events that the timeline shows, in words; the report in JSON has all events."""


def describe(event: Mapping[str, Any]) -> str:
    """Returns a description of one event."""
    name, reason = str(event["event"]), event.get("reason")
    if name == "corrupted" and "stream" not in event:
        name += " checkpoint" if "version" in event else " copy"
    derived = {
        "where": f" in {event['state']}" if "state" in event else "",
        "why": f": {reason}" if reason and event.get("state") == "FENCING" else "",
        "because": f": {reason}" if reason else "",
        "process": "warm spare" if event.get("warm") else "new process",
        "names": ", ".join(map(str, event.get("helpers") or ())) or "nobody",
        "left": seconds(event.get("seconds_left")),
        "took": seconds(event.get("seconds")),
        "megabytes": f"{(event.get('bytes') or 0) / 1e6:.1f}",
        "source": ", ".join(str(source["rank"]) for source in event.get("sources") or ()) or "?",
    }
    known = defaultdict(lambda: "?", {"reason": "", **event, **derived})
    return _WORDS.get(name, name).format_map(known)


Row = tuple[float, str, str]
"""Seconds since the first kill, source, description."""
GAP = 0.1
"""Fraction of the time that is shown, from which a time without events is explained; never below `GAP_S`."""
GAP_S = 0.05
_MEANWHILE = {
    "": "nobody has noticed it yet",
    "FENCING": "log servers are fenced, ranks leave their step",
    "PLANNING": "ranks say what they hold, and a new process starts",
    "RECOVERING": "connections are made, and states",
    "restore_end": "what the next step needs is prepared",
    "replay_begin": "steps are computed again",
    "RUNNING": "training",
}
"""Newest event that tells -> what goes on without an event that is shown."""


def timeline_rows(result: Mapping[str, Any]) -> list[Row]:
    """Returns the relevant events, in the order in which they began. Ranks with the same event share a row, but for a
    rank that has done something of its own in between. What goes on in long gaps has a row, too."""
    shown = [event for event in result["timeline"] if _is_shown(event)]
    kills = [event["t"] for event in shown if event["event"] in ("fault", "service_killed")]
    start = min(kills, default=0.0)
    rows: list[tuple[Row, str]] = []
    merged: dict[tuple[str, Any], tuple[int, list[int]]] = {}
    alone: dict[str, int] = {}
    """Source -> its last row that it shares with nobody."""
    for event in shown:
        name, t, who = event["event"], event["t"] - start, _source(event["who"])
        if t < 0:
            continue
        if name in _MERGED and "rank" in event:
            who = f"rank {event['rank']}"
            row, ranks = merged.get((name, event.get("generation")), (-1, []))
            if row > alone.get(who, -1):
                ranks.append(event["rank"])
                told = f"{describe(event)} (the last at +{t:.3f})"
                rows[row] = ((rows[row][0][0], f"ranks {_listed(sorted(set(ranks)))}", told), name)
                continue
            merged[name, event.get("generation")] = (len(rows), [event["rank"]])
        else:
            alone[who] = len(rows)
        rows.append(((t, who, describe(event)), event["state"] if name == "state" else name))
    return list(_with_gaps(rows))


def _is_shown(event: Mapping[str, Any]) -> bool:
    if event["event"] == "freed" and "rank" not in event:  # bytes, by a log server
        return False
    return event["event"] in _WORDS and not (event["event"] == "child_exit" and event.get("code") == 0)


def _source(who: str) -> str:
    return re.sub(r"^rank(?=[0-9])", "rank ", who)


def _with_gaps(rows: Sequence[tuple[Row, str]]) -> Iterator[Row]:
    long_s = max(GAP_S, GAP * max((row[0] for row, _ in rows), default=0.0))
    now = ""
    for (row, what), (later, _) in zip(rows, [*rows[1:], *rows[-1:]]):
        yield row
        if what in _MEANWHILE:
            now = what
        elif what == "replay_end":
            now = "RECOVERING"
        if later[0] - row[0] >= long_s and now in _MEANWHILE:
            yield row[0], "", f"… {seconds(later[0] - row[0])}: {_MEANWHILE[now]}"


def phase_bar(phases: Mapping[str, float]) -> Text:
    """Returns the recovery as one line of coloured blocks, as many per phase as its share of the time."""
    shares = {name: phases.get(name, 0.0) / (phases["total"] or 1.0) for name in PHASE_COLOURS}
    return Text.assemble(
        *(("█" * round(share * BAR_CELLS), PHASE_COLOURS[name]) for name, share in shares.items())
    )


def phases(result: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yields what each recovery took, by phase."""
    for number, recovery in enumerate(result["recoveries"], start=1):
        took = recovery["recovery_seconds"]
        if took is None:
            yield Text(f"recovery {number}: the trace does not say how long it took", style="yellow")
            continue
        names = [Text(name, colour) for name, colour in PHASE_COLOURS.items() if name in took]
        head = f"recovery {number}: {seconds(took['total'])} from the kill to the first step after it"
        legend = grid([names, [seconds(took[name.plain]) for name in names]])
        yield Group(Text(head, style="bold"), phase_bar(took), legend, Text())


def grid(rows: Iterable[Sequence[Any]]) -> Table:
    """Returns the rows as plain columns."""
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*(each if isinstance(each, Text) else Text(str(each)) for each in row))
    return table


def fact_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (name, value) of the main results; those that do not apply are left out."""
    log, undo = result["log"], result["undo"]

    def of_recoveries(name: str, words: Callable[[Mapping[str, Any]], str]) -> list[str]:
        return [words(each) for recovery in result["recoveries"] for each in recovery[name]]

    copied = "; ".join(f"rank {rank} from {_listed(of)}" for rank, of in result["sources"].items())
    kept = {True: "yes", False: "NO", None: "?"}[result["survivors_kept"]]
    if result["survivors_freed_seconds"] is not None:
        kept += f"; out of their step {seconds(result['survivors_freed_seconds'])} after the notice"
    control = result["negative_control"]
    caught = {True: "caught", False: "NOT CAUGHT", None: "not tried"}[control["caught"]]
    pace = (f"{'-' if v is None else f'{v:.2f}'} {name}" for name, v in result["throughput"].items())
    rows: list[tuple[str, list[str]]] = [
        (
            "faults",
            [f"{each['spec']}{'' if each['fired'] else ': NEVER HAPPENED'}" for each in result["faults"]],
        ),
        ("recovered by", [", ".join(f"stage {stage} {name}" for stage, name in result["strategy"].items())]),
        ("copied", [f"{copied} ({_megabytes(result['bytes_copied'])})"] if copied else []),
        ("replayed by", of_recoveries("shared_replays", replay_report.words)),
        ("interrupted", of_recoveries("interruptions", replay_report.cut_short)),
        ("taken back", [_undone(undo)] if undo["mode"] else []),
        (
            "work done again",
            [
                f"{result['steps_replayed']} steps replayed, {result['steps_lost']} steps lost, "
                f"{result['microbatches_recomputed']} microbatches computed again"
            ],
        ),
        ("survivors kept", [kept]),
        ("cut short", [_cut_short(step) for step in result["lossy"] or ()]),
        ("checkpoints", [_saved(result["checkpoint"])]),
        (
            "log",
            [f"{log['records']} records, {_megabytes(log['bytes'])}; {log['verified_sends']} sends verified"],
        ),
        ("steps per second", [", ".join(pace)]),
        ("final loss", [_lost(result["loss"])] if result["loss"] else []),
        ("a flipped bit in a log", [": ".join(filter(None, [caught, control.get("refused")]))]),
    ]
    told = ((name, "\n".join(filter(None, lines))) for name, lines in rows)
    return [(name, value) for name, value in told if value]


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _megabytes(size: int | None) -> str:
    return "?" if size is None else f"{size / 1e6:.1f} MB"


def _saved(shown: Mapping[str, Any]) -> str:
    """Returns the line for the table of results; empty: no save was reported."""
    if shown["stall_s_median"] is None:
        return ""
    return (
        f"{shown['saved']} parts of at most {_megabytes(shown['bytes_max'])}, {shown['mode']}: durable after "
        f"{1e3 * shown['seconds_median']:.0f} ms, of which training waited {1e3 * shown['stall_s_median']:.0f} ms "
        "(medians)"
    )


def _cut_short(step: Mapping[str, Any]) -> str:
    """Returns an interrupted step with the ranks whose gradients its buckets average."""
    kinds = Counter(tuple(bucket["contributors"]) for bucket in step["buckets"])
    means = "; ".join(f"{count} of ranks {_listed(ranks)}" for ranks, count in kinds.items())
    return f"step {step['step']}: buckets that are means: {means}"


def _undone(undo: Mapping[str, Any]) -> str:
    off = "" if undo["ulps_max"] is None else f"; off by {undo['ulps_max']:g} ulps at most"
    return f"{undo['buckets']} buckets of rank {_listed(undo['ranks'])}, {undo['mode']}{off}"


def _lost(loss: Mapping[str, Any]) -> str:
    final = loss["final"]
    if final["relative_difference"] is None:
        return "?"
    return (
        f"{final['recovered']:.4f}, without failure {final['failure_free']:.4f} "
        f"({final['relative_difference']:.1e} of it apart)"
    )


def verdict(result: Mapping[str, Any]) -> Panel:
    """Returns the verdict and its reason in a frame."""
    colour = COLOURS[result["verdict"]]
    words = Group(Text(headline(result), style=f"bold {colour}"), Text(result["reason"]))
    return Panel(words, border_style=colour, expand=False)


def sections(result: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yields the report for a terminal."""
    yield grid((f"+{t:.3f}", Text(who, style="cyan"), what) for t, who, what in timeline_rows(result))
    yield Text()
    yield from phases(result)
    yield grid(fact_rows(result))
    yield Text()
    yield verdict(result)


def _digests(digests: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for comparison in [*digests["recovery"], digests["end"]]:
        where = f"version {comparison['version']}"
        where += f", generation {comparison['generation']}" if "generation" in comparison else ", end"
        for rank, entry in comparison["ranks"].items():
            sides = ((entry[side] or {}).get("parameters", "-") for side in ("recovered", "failure_free"))
            yield where, f"rank {rank}", *(str(side)[:16] for side in sides), ANSWERS[entry["equal"]]


class _Stdout(Console):
    def on_broken_pipe(self) -> None:
        """(called where a BrokenPipeError was caught) rich would exit with 1, which is a drill's FAIL."""
        raise  # noqa: PLE0704


def show(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints the report, to stdout if no console is given. Raises BrokenPipeError if nobody reads it."""
    console = console or _Stdout()
    console.print(*sections(result))
    console.print(f"again: {result['rerun']}", soft_wrap=True, markup=False, highlight=False)


# The report as a page. Its text is as narrow as the window: nothing scrolls sideways on a phone.

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;font-size:.9rem}td,th{padding:.15rem .8rem .15rem 0;text-align:left;"
    "vertical-align:top;white-space:pre-line}td:first-child{color:#57606a}"
    "th,td:last-child,td:nth-child(n+3),h1,p{overflow-wrap:anywhere}.bar{display:flex;height:1.2rem}"
    ".key{margin-right:1rem;white-space:nowrap}.key b{padding-left:.8rem;margin-right:.3rem}code{font-size:.85rem}"
)
PAGE_COLOURS = {"PASS": "#1a7f37", "FAIL": "#cf222e", "INCONCLUSIVE": "#9a6700"}
PAGE_PHASES = dict(
    zip(
        PHASE_COLOURS,
        ("#cf222e", "#8c959f", "#d4a72c", "#bf8700", "#0969da", "#1b7c83", "#8250df", "#1a7f37"),
        strict=True,
    )
)


def page(result: Mapping[str, Any]) -> str:
    """Returns the whole report, with the checks and digests, as one self-contained page."""
    shape = result["topology"]
    title = f"swift drill: {shape['ranks']} ranks, {shape['schedule']}, {shape['steps']} steps: {headline(result)}"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    checks = [(c["name"], ANSWERS[c["answer"]], "" if c["answer"] else c["detail"]) for c in result["checks"]]
    parts = [
        f'<h1 style="color:{PAGE_COLOURS[result["verdict"]]}">{html.escape(headline(result))}</h1>'
        f"<p>{html.escape(result['reason'])}</p><h2>What happened</h2>",
        _table([(f"+{t:.3f}", who, what) for t, who, what in timeline_rows(result)]),
        *map(_phases, result["recoveries"]),
        "<h2>Results</h2>",
        _table([*fact_rows(result), ("versions", versions)]),
        "<h2>What the verdict rests on</h2>",
        _table(checks),
        "<h2>Digests of the parameters</h2>",
        _table(_digests(result["digests"]), ("", "", "recovered", "failure-free", "all digests equal")),
        f"<h2>Again</h2><p><code>{html.escape(result['rerun'])}</code></p>",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    lines = [("th", head)] if head else []
    lines += [("td", row) for row in rows]
    cells = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) for tag, row in lines)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _phases(recovery: Mapping[str, Any]) -> str:
    took = recovery["recovery_seconds"]
    if took is None:
        return "<p>The trace does not say how long this recovery took.</p>"
    known = [(name, took[name], colour) for name, colour in PAGE_PHASES.items() if name in took]
    bar = "".join(f'<div style="flex:{each:.6f};background:{colour}"></div>' for _, each, colour in known)
    key = " ".join(
        f'<span class="key"><b style="background:{colour}"></b>{name} {seconds(each)}</span>'
        for name, each, colour in known
    )
    return (
        f"<h2>Recovery: {seconds(took['total'])} from the kill to the first step after it</h2>"
        f'<div class="bar">{bar}</div><p>{key}</p>'
    )
