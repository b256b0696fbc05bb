"""The report as one self-contained page: what the terminal shows and more, as rich exports it."""

import html
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from swift_ft.lab.drill.console import (
    PHASE_COLOURS,
    fact_rows,
    grid,
    headline,
    phases,
    timeline_rows,
    titled,
    verdict,
)

WIDTH, CELLS = 140, 110
"""Columns of the page, and of a drawing in it."""
BARS = "▁▂▃▄▅▆▇█"
_FORMAT = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title><style>
{stylesheet}
body {{ color: {foreground}; background: {background}; margin: 2rem }}
pre {{ font: 13px/1.35 ui-monospace, monospace }}
</style></head><body><pre><code>{code}</code></pre></body></html>
"""
ANSWERS = {True: "yes", False: "NO", None: "no evidence"}
EQUAL = {True: "equal", False: "DIFFERENT", None: "no evidence"}


def page(result: Mapping[str, Any]) -> str:
    """Returns the page of one report."""
    shape = result["topology"]
    ranks = f"{shape['pipeline_ranks']}{f' x {n}' if (n := shape['replicas']) > 1 else ''} ranks"
    head = f"swift drill: {ranks}, {shape['schedule']}, {shape['steps']} steps"
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    console.print(Text(head, style="bold"), verdict(result), *_sections(result))
    title = html.escape(f"{head}: {headline(result)}")
    return console.export_html(code_format=_FORMAT.replace("TITLE", title))


def _sections(result: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield from phases(result)
    yield titled("Around the failure", lanes(result["timeline"], result["topology"]["ranks"]))
    if result["loss"]:
        yield titled("Loss", loss_lines(result["loss"]))
    happened = [(f"+{t:.3f}", who, what) for t, who, what in timeline_rows(result)]
    yield titled("What happened (seconds since the first kill)", grid(happened))
    never = ", ".join(fault["spec"] for fault in result["faults"] if not fault["fired"])
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    figures = [("never happened", never), ("versions", versions), ("seed", result["seed"])]
    yield titled("Figures", grid([*fact_rows(result), *(row for row in figures if row[1] != "")]))
    checks = [(c["name"], ANSWERS[c["answer"]], "" if c["answer"] else c["detail"]) for c in result["checks"]]
    yield titled("What the verdict rests on", grid(checks))
    if cut := [
        (
            f"step {step['step']}",
            f"bucket {n}",
            b["parameters"],
            ", ".join(map(str, b["contributors"])),
            b["divisor"],
        )
        for step in result["lossy"] or ()
        for n, b in enumerate(step["buckets"])
    ]:
        head = ("", "", "parameters", "gradients of ranks", "divided by")
        yield titled("Steps that were cut short", grid([head, *cut]))
    head = ("", "", "recovered", "failure-free", "all digests")
    yield titled("Digests of the parameters", grid([head, *_digests(result["digests"])]))
    yield titled("Again", Text(result["rerun"]))


def _digests(digests: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Yields the parameters' digests in both runs. The report in JSON has the digests of all fields."""
    for comparison in [*digests["recovery"], digests["end"]]:
        where = f"version {comparison['version']}"
        where += f", generation {comparison['generation']}" if "generation" in comparison else ", end"
        for rank, entry in comparison["ranks"].items():
            sides = ((entry[side] or {}).get("parameters", "-") for side in ("recovered", "failure_free"))
            yield where, f"rank {rank}", *(str(side)[:16] for side in sides), EQUAL[entry["equal"]]


# Drawings of characters: a cell is a moment, or a step.


def lanes(timeline: Sequence[Mapping[str, Any]], ranks: int) -> Group:
    """Returns a line for the coordinator and one for each rank: steps, replays, restores and kills over time."""
    shown = ("step_begin", "step_end", "fault", "service_killed")
    times = [event["t"] for event in timeline if event["event"] in shown] or [0.0]
    start, span = min(times), (max(times) - min(times)) or 1.0
    cells = {who: [(" ", "")] * CELLS for who in ("coordinator", *(f"rank {rank}" for rank in range(ranks)))}

    def cell(t: float) -> int:
        return max(0, min(CELLS - 1, int((t - start) / span * CELLS)))

    for who, begun, ended, colour in _spans(timeline, start + span):
        for at in range(cell(begun), max(cell(begun) + 1, cell(ended))) if ended > start else ():
            cells[who][at] = ("█", colour)
    for event in timeline:
        if event["event"] in ("fault", "service_killed"):
            who = f"rank {event['rank']}" if event["event"] == "fault" else "coordinator"
            cells[who][cell(event["t"])] = ("X", "bold red")
    key = [("step", "blue"), ("replayed step", "magenta"), ("restore or copy", "cyan"), ("X kill", "red")]
    return Group(
        *(Text.assemble(f"{who:<12}", *line) for who, line in cells.items()),
        Text.assemble(" " * 12, *((f"{name}   ", colour) for name, colour in key), f"{span:.2f} s in all"),
    )


def _spans(timeline: Sequence[Mapping[str, Any]], end: float) -> Iterator[tuple[str, float, float, str]]:
    """Yields (who, begin, end, colour). An interrupted step ends at the rank's notice or kill."""
    states = {"FENCING": "fence", "PLANNING": "plan", "RECOVERING": "rebuild"}
    changes = [event for event in timeline if event["event"] == "state"]
    for event, until in zip(changes, [*(each["t"] for each in changes[1:]), end], strict=False):
        if phase := states.get(str(event["state"]).upper()):
            yield "coordinator", event["t"], until, PHASE_COLOURS[phase]
    opened: dict[tuple[Any, str], Mapping[str, Any]] = {}
    ends = {"step_end": "step", "notice": "step", "fault": "step", "restore_end": "restore"}
    for event in timeline:
        rank, name = event.get("rank"), event["event"]
        if name in ("step_begin", "restore_begin"):
            opened[rank, name.removesuffix("_begin")] = event
        elif begun := opened.pop((rank, ends.get(name, "")), None):
            light = "bright_" if begun.get("step", 0) % 2 else ""  # so that neighbours can be told apart
            colour = "cyan" if ends[name] == "restore" else "magenta" if begun.get("replay") else "blue"
            yield f"rank {rank}", begun["t"], event["t"], light + colour


def loss_lines(loss: Mapping[str, Any]) -> Group:
    """Returns both runs' losses over the steps, to one scale; a loss that is not finite is a gap."""
    runs = {name: loss[name][:: -(-len(loss["steps"]) // CELLS)] for name in ("failure_free", "recovered")}
    known = [value for values in runs.values() for value in values if value is not None]
    if not known:
        return Group(Text("no loss is a finite number"))
    low, span = min(known), (max(known) - min(known)) or 1.0
    lines = {
        name: "".join(" " if v is None else BARS[round((v - low) / span * (len(BARS) - 1))] for v in values)
        for name, values in runs.items()
    }
    steps = f"steps {min(loss['steps'])} to {max(loss['steps'])}"
    return Group(
        *(Text(f"{name.replace('_', '-'):<14}{line}") for name, line in lines.items()),
        Text(f"{steps}; losses {low:.4g} to {max(known):.4g}"),
    )
