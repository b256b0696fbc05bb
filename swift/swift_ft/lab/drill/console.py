"""Terminal output: progress while the drill runs, and the short report."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from swift_ft.lab.drill import lossy, replay_report, saving

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
# Events that the timeline shows; the report in JSON has all of them.
_MARKS = (
    "fault",
    "service_killed",
    "corrupted",
    "child_exit",
    "state",
    "plan",
    "refused",
    "notice",
    "freed",
    "spare_assigned",
    "group_built",
    "restore_begin",
    "restore_end",
    "replay_begin",
    "help_begin",
    "help_end",
    "help_declined",
    "helped",
    "replay_progress",
    "replay_end",
    "roll_forward",
    "undone",
    "replica_received",
    "ready",
)
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
        elif name == "fault":
            self._progress.update(self._task, note=f"rank {event['rank']} killed in {event['phase']}")
        elif name == "state":
            self._progress.update(self._task, note=f"generation {event['generation']}: {event['state']}")
        elif name == "replay_progress":
            self._progress.update(self._task, note=describe(event))
        elif name == "service_killed":
            self._progress.update(self._task, note=f"{event['service']} killed")


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


def describe(event: Mapping[str, Any]) -> str:
    """Returns a description of one event."""
    name, rank = event["event"], event.get("rank")
    match name:
        case "fault":
            return f"rank {rank} killed in {event['phase']}, step {event['step']}, microbatch {event['microbatch']}"
        case "service_killed":
            return f"{event['service']} killed" + (f" in {event['state']}" if "state" in event else "")
        case "corrupted" if "version" in event:
            return f"one bit flipped in rank {rank}'s checkpoint of version {event['version']}"
        case "corrupted" if "stream" not in event:
            return (
                f"one bit flipped in what rank {rank} is given by a replica (byte {event['byte']} of a chunk)"
            )
        case "corrupted":
            return f"one bit of {event['stream']} flipped ({event['record']})"
        case "child_exit":
            return f"rank {rank}'s process is gone (exit code {event.get('code')})"
        case "state":
            why = f": {event['reason']}" if event.get("reason") and event["state"] == "FENCING" else ""
            return f"{event['state']}, generation {event.get('generation')}{why}"
        case "plan":
            return f"go on at version {event['target_version']}: {event.get('reason', '')}"
        case "refused":
            return f"rank {rank} refuses: {event.get('reason', '')}"
        case "spare_assigned":
            kind = "warm spare" if event.get("warm") else "new process"
            return f"rank {rank} is now a {kind} (pid {event['pid']})"
        case "replay_begin":
            return f"rank {rank} replays from version {event.get('version')}"
        case "help_begin":
            helpers = ", ".join(map(str, event.get("helpers") or ())) or "nobody"
            return f"rank {rank} is helped by {helpers}: {event.get('shares')} microbatches of a step"
        case "help_end":
            return ": ".join(filter(None, [f"rank {rank} goes on alone", event.get("reason")]))
        case "help_declined":
            return f"rank {rank} does not help rank {event.get('owner')}: {event.get('reason')}"
        case "helped":
            return (
                f"rank {rank} has helped rank {event.get('owner')}: {event.get('microbatches')} microbatches"
            )
        case "replay_progress":
            left = f"{event.get('steps_left')} steps, {seconds(event.get('seconds_left'))}"
            return f"rank {rank} replays, at version {event.get('version')}; left: {left}"
        case "replay_end":
            return (
                f"rank {rank} replayed {event.get('steps')} steps: {event.get('records')} records read, "
                f"{event.get('verified')} sends verified, {event.get('filled')} filled; "
                f"{seconds(event.get('log_wait_s', 0.0))} for the log; paced by {event.get('bottleneck', '?')}"
            )
        case "undone":
            return f"rank {rank} took {event.get('buckets')} buckets back ({event.get('mode')})"
        case "replica_received":
            sources = ", ".join(str(source["rank"]) for source in event.get("sources") or ())
            return f"rank {rank} has {event.get('bytes', 0) / 1e6:.1f} MB of state from rank {sources or '?'}"
    words = {
        "notice": "told to stop",
        "freed": "out of the half-done step",
        "group_built": "has the new group",
        "ready": "ready",
        "restore_begin": "gets its state (a checkpoint or a replica)",
        "restore_end": "has its state",
        "roll_forward": "finishes the step that was under way",
    }
    return words.get(name, str(name))


def timeline_rows(result: Mapping[str, Any]) -> list[tuple[float, str, str]]:
    """Returns (seconds since the first kill, source, description) of the relevant events. Ranks with the same event
    share a row."""
    first_steps = [event for event in result["timeline"] if event["event"] in _MARKS]
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


def _phases(result: Mapping[str, Any]) -> list[Any]:
    shown: list[Any] = []
    for number, recovery in enumerate(result["recoveries"], start=1):
        phases = recovery["recovery_seconds"]
        if phases is None:
            shown.append(Text(f"recovery {number}: the trace does not say how long it took", style="yellow"))
            continue
        names = [name for name in PHASE_COLOURS if name in phases]
        legend = Table.grid(padding=(0, 2))
        legend.add_row(*(Text(name, style=PHASE_COLOURS[name]) for name in names))
        legend.add_row(*(seconds(phases[name]) for name in names))
        head = f"recovery {number}: {seconds(phases['total'])} from the kill to the first step after it"
        shown += [Text(head, style="bold"), phase_bar(phases), legend, Text()]
    return shown


def facts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (name, value) of the main results; those that do not apply are left out."""
    log, rates, undo = result["log"], result["throughput"], result["undo"]
    rows = [("faults", "\n".join(fault["spec"] for fault in result["faults"]))]
    if result["strategy"]:
        strategies = (f"stage {stage} {name}" for stage, name in result["strategy"].items())
        rows.append(("recovered by", ", ".join(strategies)))
    if result["sources"]:
        sources = (f"rank {rank} from {', '.join(map(str, of))}" for rank, of in result["sources"].items())
        rows.append(("copied", f"{'; '.join(sources)} ({result['bytes_copied'] / 1e6:.1f} MB)"))
    shared = [
        replay_report.words(replay)
        for recovery in result["recoveries"]
        for replay in recovery["shared_replays"]
    ]
    if shared:
        rows.append(("replayed by", "\n".join(shared)))
    ended = [replay for recovery in result["recoveries"] for replay in recovery["replays"]]
    cut = [
        replay_report.cut_short(interruption)
        for recovery in result["recoveries"]
        for interruption in recovery["interruptions"]
    ]
    for name, lines in (
        ("paced by", [replay_report.paced_by(replay) for replay in ended]),
        ("replay took", [line for replay in ended if (line := replay_report.took(replay))]),
        ("interrupted", cut),
    ):
        if lines:
            rows.append((name, "\n".join(lines)))
    if undo["mode"]:
        rows.append(("taken back", _undone(undo)))
    done = f"{result['steps_replayed']} steps replayed, {result['steps_lost']} steps lost, "
    rows.append(("work done again", f"{done}{result['microbatches_recomputed']} microbatches computed again"))
    kept = {True: "yes", False: "NO", None: "?"}[result["survivors_kept"]]
    if result["survivors_freed_seconds"] is not None:
        kept += f"; out of their step {seconds(result['survivors_freed_seconds'])} after the notice"
    rows.append(("survivors kept", kept))
    if finished := lossy.words(result["lossy"]):
        rows.append(("cut short", finished))
    if saved := saving.words(result["checkpoint"]):
        rows.append(("checkpoints", saved))
    megabytes = f"{log['bytes'] / 1e6:.1f} MB" if log["bytes"] is not None else "?"
    rows.append(("log", f"{log['records']} records, {megabytes}; {log['verified_sends']} sends verified"))
    if result["prediction"]:
        rows.append(("as predicted", "\n".join(_predicted(result["prediction"]))))
    if "unlogged" in log:
        lacks = log["unlogged"]
        steps = f"steps {lacks['first_step']} to {lacks['last_step']}"
        rows.append(("not logged", f"{lacks['records']} records ({lacks['bytes'] / 1e6:.1f} MB) of {steps}"))
    rate = {name: "-" if value is None else f"{value:.2f}" for name, value in rates.items()}
    rows.append(
        ("steps per second", f"{rate['before']} before, {rate['during']} during, {rate['after']} after")
    )
    if result["reduction"]:
        rows.append(("reduction", _reduced(result["reduction"])))
    if result["loss"]:
        rows.append(("final loss", _lost(result["loss"])))
    control = result["negative_control"]
    caught = {True: "caught", False: "NOT CAUGHT", None: "not tried"}[control["caught"]]
    rows.append(
        ("a flipped bit in a log", caught + (f": {control['refused']}" if "refused" in control else ""))
    )
    return rows


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


def _facts(result: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for name, value in facts(result):
        table.add_row(name, Text(value))
    return table


def show(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints the short report to stdout."""
    console = console or Console()
    timeline = Table(box=None, padding=(0, 1), show_header=False)
    timeline.add_column(justify="right", no_wrap=True)
    timeline.add_column(no_wrap=True, style="cyan")
    timeline.add_column(overflow="fold")
    for t, who, what in timeline_rows(result):
        timeline.add_row(f"+{t:.3f}", who, Text(what))
    verdict = result["verdict"]
    head = Text(headline(result), style=f"bold {COLOURS[verdict]}")
    console.print(
        Group(
            timeline,
            Text(),
            *_phases(result),
            _facts(result),
            Text(),
            Panel(Group(head, Text(result["reason"])), border_style=COLOURS[verdict], expand=False),
        )
    )
    console.print(f"again: {result['rerun']}", soft_wrap=True, markup=False, highlight=False)
