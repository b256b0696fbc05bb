"""Terminal output: progress while the drill runs, and the short report."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

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
_MERGED = ("notice", "freed", "group_built", "ready", "restore_begin", "restore_end", "roll_forward")
"""Events that every rank emits at about the same time: one line for all ranks."""


class LiveProgress:
    """Progress bar for each run on a terminal; no output elsewhere. Never starts a thread: children die with the thread
    that started them."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
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

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._progress.stop()

    def begin(self, title: str, steps: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, note="done")
        self._task = self._progress.add_task(title, total=steps, note="starting")
        self._progress.refresh()

    def tick(self) -> None:
        """(called in each iteration of the run's loop) Redraws at most ten times per second."""
        if time.monotonic() - self._drawn > 0.1:
            self._drawn = time.monotonic()
            self._progress.refresh()

    def see(self, event: Mapping[str, Any]) -> None:
        """Shows one event of the trace."""
        name = event["event"]
        if name == "step_end" and not event.get("replay"):
            self._progress.update(self._task, completed=event["step"] + 1, note="")
        elif name in ("fault", "state", "replay_progress", "service_killed"):
            self._progress.update(self._task, note=describe(event))


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
    "replay_end": "rank {rank} replayed {steps} steps: {records} records read, {verified} sends verified, {filled} "
    "filled; {waited} for the log; paced by {bottleneck}",
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
        "waited": seconds(event.get("log_wait_s", 0.0)),
        "megabytes": f"{(event.get('bytes') or 0) / 1e6:.1f}",
        "source": ", ".join(str(source["rank"]) for source in event.get("sources") or ()) or "?",
    }
    known = defaultdict(lambda: "?", {"reason": "", **event, **derived})
    return _WORDS.get(name, name).format_map(known)


def timeline_rows(result: Mapping[str, Any]) -> list[tuple[float, str, str]]:
    """Returns (seconds since the first kill, source, description) of the relevant events. Ranks with the same event
    share a row."""
    first_steps = [event for event in result["timeline"] if event["event"] in _WORDS]
    kills = [e["t"] for e in first_steps if e["event"] in ("fault", "service_killed")]
    start = min(kills, default=0.0)
    rows: list[tuple[float, str, str]] = []
    merged: dict[tuple[str, Any], tuple[int, list[int]]] = {}
    for event in first_steps:
        name = event["event"]
        if event["t"] < start or (name == "child_exit" and event.get("code") == 0):
            continue
        if name == "freed" and "rank" not in event:  # bytes, by a log server
            continue
        if name in _MERGED and "rank" in event:
            key = (name, event.get("generation"))
            if key in merged:
                row, ranks = merged[key]
                ranks.append(event["rank"])
                who = f"ranks {', '.join(str(rank) for rank in sorted(set(ranks)))}"
                rows[row] = (rows[row][0], who, f"{describe(event)} (the last at +{event['t'] - start:.3f})")
                continue
            merged[key] = (len(rows), [event["rank"]])
            rows.append((event["t"] - start, f"rank {event['rank']}", describe(event)))
            continue
        rows.append((event["t"] - start, str(event["who"]), describe(event)))
    return rows


def phase_bar(phases: Mapping[str, float]) -> Text:
    """Returns the recovery as one line of coloured blocks, as many per phase as its share of the time."""
    total = phases["total"] or 1.0
    bar = Text()
    for name, colour in PHASE_COLOURS.items():
        share = phases.get(name, 0.0) / total
        bar.append("█" * round(share * BAR_CELLS), style=colour)
    return bar


def phases(result: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yields what each recovery took, by phase."""
    for number, recovery in enumerate(result["recoveries"], start=1):
        took = recovery["recovery_seconds"]
        if took is None:
            yield Text(f"recovery {number}: the trace does not say how long it took", style="yellow")
            continue
        names = [name for name in PHASE_COLOURS if name in took]
        legend = [
            [Text(name, style=PHASE_COLOURS[name]) for name in names],
            [Text(seconds(took[name])) for name in names],
        ]
        head = f"recovery {number}: {seconds(took['total'])} from the kill to the first step after it"
        yield Group(Text(head, style="bold"), phase_bar(took), grid(legend), Text())


def grid(rows: Iterable[Sequence[Any]]) -> Table:
    """Returns the rows as plain columns."""
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*(each if isinstance(each, Text) else Text(str(each)) for each in row))
    return table


def titled(title: str, content: RenderableType) -> Group:
    """Returns a section below its title."""
    return Group(Text(f"\n{title}", style="bold"), content)


def fact_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (name, value) of the main results; those that do not apply are left out."""
    recoveries, log, lacks = result["recoveries"], result["log"], result["log"].get("unlogged")
    replays = [replay for recovery in recoveries for replay in recovery["replays"]]
    shared = [replay for recovery in recoveries for replay in recovery["shared_replays"]]
    cut = [interruption for recovery in recoveries for interruption in recovery["interruptions"]]
    copied = "; ".join(
        f"rank {rank} from {', '.join(map(str, of))}" for rank, of in result["sources"].items()
    )
    kept = {True: "yes", False: "NO", None: "?"}[result["survivors_kept"]]
    if result["survivors_freed_seconds"] is not None:
        kept += f"; out of their step {seconds(result['survivors_freed_seconds'])} after the notice"
    megabytes = "?" if log["bytes"] is None else f"{log['bytes'] / 1e6:.1f} MB"
    control = result["negative_control"]
    caught = {True: "caught", False: "NOT CAUGHT", None: "not tried"}[control["caught"]]
    rows: list[tuple[str, Iterable[str]]] = [
        ("faults", [fault["spec"] for fault in result["faults"]]),
        ("recovered by", [", ".join(f"stage {stage} {name}" for stage, name in result["strategy"].items())]),
        ("copied", [f"{copied} ({result['bytes_copied'] / 1e6:.1f} MB)"] if copied else []),
        ("replayed by", map(replay_report.words, shared)),
        ("paced by", map(replay_report.paced_by, replays)),
        ("replay took", map(replay_report.took, replays)),
        ("interrupted", map(replay_report.cut_short, cut)),
        ("taken back", [_undone(result["undo"])] if result["undo"]["mode"] else []),
        (
            "work done again",
            [
                f"{result['steps_replayed']} steps replayed, {result['steps_lost']} steps lost, "
                f"{result['microbatches_recomputed']} microbatches computed again"
            ],
        ),
        ("survivors kept", [kept]),
        ("cut short", [_cut_short(result["lossy"])]),
        ("checkpoints", [_saved(result["checkpoint"])]),
        ("log", [f"{log['records']} records, {megabytes}; {log['verified_sends']} sends verified"]),
        ("as predicted", _predicted(result["prediction"]) if result["prediction"] else []),
        ("not logged", [_unlogged(lacks)] if lacks else []),
        (
            "steps per second",
            [
                ", ".join(
                    f"{'-' if v is None else f'{v:.2f}'} {name}" for name, v in result["throughput"].items()
                )
            ],
        ),
        ("reduction", [_reduced(result["reduction"])] if result["reduction"] else []),
        ("final loss", [_lost(result["loss"])] if result["loss"] else []),
        ("a flipped bit in a log", [": ".join(filter(None, [caught, control.get("refused")]))]),
    ]
    told = ((name, "\n".join(filter(None, lines))) for name, lines in rows)
    return [(name, value) for name, value in told if value]


def _unlogged(lacks: Mapping[str, Any]) -> str:
    steps = f"steps {lacks['first_step']} to {lacks['last_step']}"
    return f"{lacks['records']} records ({lacks['bytes'] / 1e6:.1f} MB) of {steps}"


def _saved(shown: Mapping[str, Any]) -> str:
    """Returns the line for the table of results; empty: no save was reported."""
    if shown["stall_s_median"] is None:
        return ""
    return (
        f"{shown['saved']} parts of at most {shown['bytes_max'] / 1e6:.1f} MB, {shown['mode']}: durable after "
        f"{1e3 * shown['seconds_median']:.0f} ms, of which training waited {1e3 * shown['stall_s_median']:.0f} ms "
        "(medians)"
    )


def _cut_short(section: Sequence[Mapping[str, Any]] | None) -> str:
    """Returns a line for each interrupted step, with the ranks whose gradients its buckets average."""
    lines = []
    for cut in section or ():
        kinds = Counter(tuple(bucket["contributors"]) for bucket in cut["buckets"])
        of_ranks = [
            f"{count} of ranks {', '.join(map(str, contributors))}" for contributors, count in kinds.items()
        ]
        lines.append(f"step {cut['step']}: buckets that are means: {'; '.join(of_ranks)}")
    return "\n".join(lines)


def _predicted(prediction: Mapping[str, Any]) -> list[str]:
    sizes = prediction["bytes"]
    per_step = sizes["per_step"]
    equal = {True: "yes", False: "NO", None: "?"}[sizes["equal"]]
    lines = [f"{equal}: {per_step['predicted']} bytes a step between groups {prediction['groups']}"]
    for recovery in prediction["recoveries"]:
        if recovery["ratio"] is None:
            lines.append(recovery["why"])
            continue
        judged = {True: "within a quarter", False: "NOT within a quarter", None: recovery["why"]}
        took, expected = seconds(recovery["measured_seconds"]), seconds(recovery["predicted_seconds"])
        lines.append(f"load and replay {took}, predicted {expected}: {judged[recovery['within']]}")
    return lines


def _undone(undo: Mapping[str, Any]) -> str:
    ranks = ", ".join(map(str, undo["ranks"]))
    words = f"{undo['buckets']} buckets of rank {ranks}, {undo['mode']}"
    if undo["ulps_max"] is not None:
        words += f"; off by {undo['ulps_max']:g} ulps at most, {undo['ulps_mean'] or 0.0:.3g} on average"
    if undo["relative_error"] is not None:
        words += f", {undo['relative_error']:.2g} of the step"
    return words


def _reduced(reduction: Mapping[str, Any]) -> str:
    words = f"{reduction['mode']}, by {reduction['by']}"
    for name, what in (("reduce_seconds_per_step", "reductions"), ("vote_seconds_per_step", "the vote")):
        if reduction[name] is not None:
            words += f", {seconds(reduction[name])} a step in {what}"
    return words


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


def show(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints the short report to stdout."""
    console = console or Console()
    happened = [(f"+{t:.3f}", Text(who, style="cyan"), what) for t, who, what in timeline_rows(result)]
    console.print(grid(happened), Text(), *phases(result), grid(fact_rows(result)), Text(), verdict(result))
    console.print(f"again: {result['rerun']}", soft_wrap=True, markup=False, highlight=False)
