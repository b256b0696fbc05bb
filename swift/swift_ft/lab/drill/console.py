"""What a drill shows: its report, in a terminal or, with checks and digests, as a page."""

import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

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


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def headline(result: Mapping[str, Any]) -> str:
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


def timeline_rows(result: Mapping[str, Any]) -> list[Row]:
    """Returns the relevant events, in the order in which they began. Ranks with the same event share a row, but for a
    rank that has done something of its own in between."""
    shown = [event for event in result["timeline"] if _is_shown(event)]
    kills = [event["t"] for event in shown if event["event"] in ("fault", "service_killed")]
    start = min(kills, default=0.0)
    rows: list[Row] = []
    merged: dict[tuple[str, Any], tuple[int, list[int]]] = {}
    alone: dict[str, int] = {}
    """Source -> its last row that it shares with nobody."""
    for event in shown:
        name, t, who = event["event"], event["t"] - start, re.sub("^rank(?=[0-9])", "rank ", event["who"])
        if t < 0:
            continue
        if name in _MERGED:
            who = f"rank {event['rank']}"
            row, ranks = merged.get((name, event.get("generation")), (-1, []))
            if row > alone.get(who, -1):
                ranks.append(event["rank"])
                told = f"{describe(event)} (the last at +{t:.3f})"
                rows[row] = (rows[row][0], f"ranks {_listed(sorted(set(ranks)))}", told)
                continue
            merged[name, event.get("generation")] = (len(rows), [event["rank"]])
        else:
            alone[who] = len(rows)
        rows.append((t, who, describe(event)))
    return rows


def _is_shown(event: Mapping[str, Any]) -> bool:
    if event["event"] == "freed" and "rank" not in event:  # bytes, by a log server
        return False
    return event["event"] in _WORDS and not (event["event"] == "child_exit" and event.get("code") == 0)


def phase_bar(phases: Mapping[str, float]) -> Text:
    """Returns the recovery as one line of coloured blocks, as many per phase as its share of the time."""
    shares = {name: phases.get(name, 0.0) / (phases["total"] or 1.0) for name in PHASE_COLOURS}
    return Text.assemble(
        *(("█" * round(share * BAR_CELLS), PHASE_COLOURS[name]) for name, share in shares.items())
    )


def phases(result: Mapping[str, Any]) -> Iterator[RenderableType]:
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
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*(each if isinstance(each, Text) else Text(str(each)) for each in row))
    return table


def fact_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (name, value) of the main results; those that do not apply are left out."""
    log, undone = result["log"], result["undo"]
    copied = "; ".join(f"rank {rank} from {_listed(of)}" for rank, of in result["sources"].items())
    kept = {True: "yes", False: "NO", None: "?"}[result["survivors_kept"]]
    if result["survivors_freed_seconds"] is not None:
        kept += f"; out of their step {seconds(result['survivors_freed_seconds'])} after the notice"
    control = result["negative_control"]
    caught = {True: "caught", False: "NOT CAUGHT", None: "not tried"}[control["caught"]]
    pace = (f"{'-' if v is None else f'{v:.2f}'} {name}" for name, v in result["throughput"].items())
    faults = (f"{each['spec']}{'' if each['fired'] else ': NEVER HAPPENED'}" for each in result["faults"])
    rows = {
        "faults": "\n".join(faults),
        "recovered by": ", ".join(f"stage {stage} {name}" for stage, name in result["strategy"].items()),
        "copied": f"{copied} ({_megabytes(result['bytes_copied'])})" if copied else "",
        "taken back": f"{undone['buckets']} buckets of rank {_listed(undone['ranks'])}, {undone['mode']}"
        if undone["mode"]
        else "",
        "work done again": f"{result['steps_replayed']} steps replayed, {result['steps_lost']} steps lost, "
        f"{result['microbatches_recomputed']} microbatches computed again",
        "survivors kept": kept,
        "cut short": "\n".join(map(_cut_short, result["lossy"] or ())),
        "checkpoints": _saved(result["checkpoint"]),
        "log": f"{log['records']} records, {_megabytes(log['bytes'])}; {log['verified_sends']} sends verified",
        "steps per second": ", ".join(pace),
        "a flipped bit in a log": ": ".join(filter(None, [caught, control.get("refused")])),
    }
    return [(name, value) for name, value in rows.items() if value]


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


def verdict(result: Mapping[str, Any]) -> Panel:
    colour = COLOURS[result["verdict"]]
    words = Group(Text(headline(result), style=f"bold {colour}"), Text(result["reason"]))
    return Panel(words, border_style=colour, expand=False)


def sections(result: Mapping[str, Any]) -> Iterator[RenderableType]:
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


# The report as a page: what a terminal shows, with checks and digests.

PAGE_COLUMNS = 120
PAGE = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>swift drill</title>'
    '<meta name="viewport" content="width=device-width"><style>{stylesheet}'
    "pre{{white-space:pre-wrap;overflow-wrap:anywhere}}</style></head><body><pre>{code}</pre></body></html>\n"
)


def page(result: Mapping[str, Any]) -> str:
    """Returns the whole report, with the checks and digests, as one self-contained page."""
    checks = [(c["name"], ANSWERS[c["answer"]], "" if c["answer"] else c["detail"]) for c in result["checks"]]
    digests = [("digests of the parameters", "", "recovered", "failure-free", "all digests equal")]
    console = Console(record=True, width=PAGE_COLUMNS, file=io.StringIO())
    show(result, console)
    for rows in (checks, [*digests, *_digests(result["digests"])], result["versions"].items()):
        console.print(Text(), grid(rows))
    return console.export_html(code_format=PAGE)
