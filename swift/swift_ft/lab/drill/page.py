"""The report as one self-contained page, without scripts, fonts or pictures from elsewhere."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swift_ft.lab.drill.console import describe, facts, headline, seconds, timeline_rows
from swift_ft.lab.drill.loss import loss_curves

COLOURS = {"PASS": "#1a7f37", "FAIL": "#cf222e", "INCONCLUSIVE": "#9a6700"}
PHASE_COLOURS = {
    "detect": "#cf222e",
    "superseded": "#8c959f",
    "fence": "#d4a72c",
    "plan": "#eac54f",
    "rebuild": "#0969da",
    "restore": "#1b7c83",
    "replay": "#8250df",
    "rejoin": "#1a7f37",
}
STEP_COLOUR, REPLAY_COLOUR, KILL_COLOUR = "#b6d7ff", "#8250df", "#cf222e"

WIDTH, LEFT, LANE = 960, 96, 26
"""Width of the drawing, width of its labels and height of one lane, in pixels."""

STYLE = """
:root { color-scheme: light dark; --fg: #1f2328; --dim: #59636e; --line: #d1d9e0; --bg: #fff; --card: #f6f8fa }
@media (prefers-color-scheme: dark) {
  :root { --fg: #e6edf3; --dim: #9198a1; --line: #3d444d; --bg: #0d1117; --card: #151b23 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg);
       max-width: 1000px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.verdict { border-left: 6px solid var(--verdict); background: var(--card); padding: .8rem 1rem }
.verdict b { color: var(--verdict); font-size: 1.3rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .2rem .6rem .2rem 0;
        border-bottom: 1px solid var(--line); vertical-align: top } th { font-weight: 600; white-space: nowrap }
td.t { font-variant-numeric: tabular-nums; white-space: nowrap; color: var(--dim); text-align: right }
code, pre { font: 13px/1.5 ui-monospace, monospace; background: var(--card); overflow-wrap: anywhere }
pre { padding: .6rem; white-space: pre-wrap } .dim { color: var(--dim) }
svg { width: 100%; height: auto; display: block } svg text { font: 12px system-ui, sans-serif; fill: var(--fg) }
svg .axis { stroke: var(--line) } .key span { margin-right: 1rem; white-space: nowrap }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; vertical-align: -.05em }
"""


def text(value: object) -> str:
    return html.escape(str(value))


def page(result: Mapping[str, Any]) -> str:
    """Returns the page of one report."""
    shape = result["topology"]
    verdict = result["verdict"]
    ranks = f"{shape['pipeline_ranks']} ranks"
    if shape["replicas"] > 1:
        ranks = f"{shape['pipeline_ranks']} x {shape['replicas']} ranks"
    head = f"swift drill: {ranks}, {shape['schedule']}, {shape['steps']} steps"
    parts = [
        f"<h1>{text(head)}</h1>",
        f'<div class="verdict" style="--verdict: {COLOURS[verdict]}"><b>{headline(result)}</b>'
        f"<br>{text(result['reason'])}</div>",
        *(_recovery(number, recovery) for number, recovery in enumerate(result["recoveries"], start=1)),
        _drawing(result),
        loss_curves(result["loss"], [e["step"] for e in result["timeline"] if e["event"] == "fault"]),
        _happened(result),
        _facts(result),
        _checks(result),
        _cut_steps(result["lossy"] or ()),
        _digests(result),
        f"<h2>Again</h2><pre>{text(result['rerun'])}</pre>",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(head)}: {verdict}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _key(entries: Iterable[tuple[str, str]]) -> str:
    spans = "".join(
        f'<span><i style="background: {colour}"></i>{text(name)}</span>' for name, colour in entries
    )
    return f'<p class="key">{spans}</p>'


def _recovery(number: int, recovery: Mapping[str, Any]) -> str:
    """Returns a bar of the phases, each as wide as its share of the time."""
    phases = recovery["recovery_seconds"]
    if phases is None:
        return f"<h2>Recovery {number}</h2><p>The trace does not say how long it took.</p>"
    bars, x = [], 0.0
    for name, colour in PHASE_COLOURS.items():
        width = WIDTH * phases.get(name, 0.0) / (phases["total"] or 1.0)
        title = f"{name}: {seconds(phases.get(name, 0.0))}"
        bars.append(
            f'<rect x="{x:.2f}" width="{width:.2f}" height="28" fill="{colour}"><title>{title}</title></rect>'
        )
        x += width
    key = _key(
        (f"{name} {seconds(phases[name])}", PHASE_COLOURS[name]) for name in PHASE_COLOURS if name in phases
    )
    return (
        f"<h2>Recovery {number}: {seconds(phases['total'])} from the kill to the first step after it</h2>"
        f'<svg viewBox="0 0 {WIDTH} 28" role="img" aria-label="phases of the recovery">{"".join(bars)}</svg>{key}'
        f'<p class="dim">{text(recovery["plan_reason"] or "")}</p>'
    )


class _Scale:
    """Maps time to pixels, over the range of all recoveries."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        events = result["timeline"]
        near = [e["t"] for e in events if e["event"] in ("step_begin", "step_end", "fault", "service_killed")]
        self.start = min(near, default=0.0)
        self.end = max(near, default=1.0)
        if self.end <= self.start:
            self.end = self.start + 1.0

    def x(self, t: float) -> float:
        share = (min(max(t, self.start), self.end) - self.start) / (self.end - self.start)
        return LEFT + share * (WIDTH - LEFT)


def _drawing(result: Mapping[str, Any]) -> str:
    """Returns the drawing: a lane for the coordinator and one for each rank, with steps, replays and kills."""
    scale = _Scale(result)
    ranks = range(result["topology"]["ranks"])
    height = LANE * (len(ranks) + 1) + 26
    shapes = [_states(result, scale)]
    for lane, rank in enumerate(ranks, start=1):
        y = lane * LANE
        shapes.append(f'<text x="0" y="{y + 16}">rank {rank}</text>')
        shapes.append(
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH}" y1="{y + LANE - 2}" y2="{y + LANE - 2}"/>'
        )
        shapes += _spans(result, scale, rank, y)
    shapes.append(_axis(scale, height))
    key = _key(
        [
            ("step", STEP_COLOUR),
            ("replayed step", REPLAY_COLOUR),
            ("restore or copy", PHASE_COLOURS["restore"]),
            ("kill", KILL_COLOUR),
        ]
    )
    return (
        f'<h2>Around the failure</h2><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="timeline of all ranks">{"".join(shapes)}</svg>{key}'
    )


def _bar(scale: _Scale, start: float, end: float, y: int, colour: str, title: str) -> str:
    x, until = scale.x(start), scale.x(end)
    return (
        f'<rect x="{x:.2f}" y="{y + 4}" width="{max(until - x - 0.5, 0.5):.2f}" height="{LANE - 10}" '
        f'fill="{colour}"><title>{text(title)}</title></rect>'
    )


def _spans(result: Mapping[str, Any], scale: _Scale, rank: int, y: int) -> list[str]:
    """Returns the bars of one rank. An interrupted step ends at the rank's notice or kill."""
    shapes: list[str] = []
    opened: dict[str, Mapping[str, Any]] = {}
    for event in result["timeline"]:
        if event.get("rank") != rank or event["t"] < scale.start:
            continue
        name = event["event"]
        if name == "step_begin":
            opened["step"] = event
        elif name == "restore_begin":
            opened["restore"] = event
        elif name in ("step_end", "notice", "fault") and "step" in opened:
            begun = opened.pop("step")
            colour = REPLAY_COLOUR if begun.get("replay") else STEP_COLOUR
            what = "replayed step" if begun.get("replay") else "step"
            how = "" if name == "step_end" else ", dropped"
            shapes.append(_bar(scale, begun["t"], event["t"], y, colour, f"{what} {begun['step']}{how}"))
        elif name == "restore_end" and "restore" in opened:
            begun = opened.pop("restore")
            shapes.append(_bar(scale, begun["t"], event["t"], y, PHASE_COLOURS["restore"], "restore"))
        if name == "fault":
            x = scale.x(event["t"])
            shapes.append(
                f'<path d="M{x - 5:.1f} {y + 5}l10 12m0 -12l-10 12" stroke="{KILL_COLOUR}" stroke-width="3">'
                f"<title>{text(describe(event))}</title></path>"
            )
    return shapes


def _states(result: Mapping[str, Any], scale: _Scale) -> str:
    """Returns the coordinator's lane."""
    colours = {"FENCING": "fence", "PLANNING": "plan", "RECOVERING": "rebuild"}
    shapes = ['<text x="0" y="16">coordinator</text>']
    states = [event for event in result["timeline"] if event["event"] == "state"]
    ends = [event["t"] for event in states[1:]]
    for event, until in zip(states, [*ends, scale.end], strict=False):
        state = str(event["state"]).upper()
        if until <= scale.start or event["t"] >= scale.end:
            continue
        colour = PHASE_COLOURS[colours[state]] if state in colours else "var(--line)"
        shapes.append(_bar(scale, event["t"], until, 0, colour, f"{state}, generation {event['generation']}"))
    for event in result["timeline"]:
        if event["event"] == "service_killed":
            x = scale.x(event["t"])
            shapes.append(
                f'<path d="M{x - 5:.1f} 5l10 12m0 -12l-10 12" stroke="{KILL_COLOUR}" stroke-width="3">'
                f"<title>{text(describe(event))}</title></path>"
            )
    return "".join(shapes)


def _axis(scale: _Scale, height: int) -> str:
    """Returns time labels at round numbers, at most about twelve."""
    span = scale.end - scale.start
    unit = next(u for u in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300, 1e9) if span / u <= 12)
    labels = []
    tick = 0
    while tick * unit <= span:
        x = scale.x(scale.start + tick * unit)
        labels.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">{tick * unit:g} s</text>')
        tick += 1
    return "".join(labels)


def _happened(result: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><td class="t">+{t:.3f}</td><td>{text(who)}</td><td>{text(what)}</td></tr>'
        for t, who, what in timeline_rows(result)
    )
    return f'<h2>What happened</h2><p class="dim">Seconds since the first kill.</p><table>{rows}</table>'


def _facts(result: Mapping[str, Any]) -> str:
    never = ", ".join(fault["spec"] for fault in result["faults"] if not fault["fired"])
    shown = [
        *facts(result),
        *([("never happened", never)] if never else []),
        ("versions", ", ".join(f"{name} {version}" for name, version in result["versions"].items())),
        ("seed", result["seed"]),
    ]
    rows = "".join(f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in shown)
    return f"<h2>Figures</h2><table>{rows}</table>"


def _checks(result: Mapping[str, Any]) -> str:
    words = {True: "yes", False: "NO", None: "no evidence"}
    rows = "".join(
        f"<tr><td>{text(check['name'])}</td><td>{words[check['answer']]}</td>"
        f"<td>{'' if check['answer'] else text(check['detail'])}</td></tr>"
        for check in result["checks"]
    )
    return f"<h2>What the verdict rests on</h2><table>{rows}</table>"


def _cut_steps(steps: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of the buckets in steps interrupted by a loss: contributors and divisor."""
    rows = "".join(
        f"<tr><td>step {step['step']}</td><td>bucket {number}</td><td>{bucket['parameters']}</td>"
        f"<td>{text(', '.join(map(str, bucket['contributors'])))}</td><td>{bucket['divisor']}</td></tr>"
        for step in steps
        for number, bucket in enumerate(step["buckets"])
    )
    if not rows:
        return ""
    head = "<tr><th></th><th></th><th>parameters</th><th>gradients of ranks</th><th>divided by</th></tr>"
    return f"<h2>Steps that were cut short</h2><table>{head}{rows}</table>"


def _digests(result: Mapping[str, Any]) -> str:
    """Returns the table of the parameters' digests in both runs. The report in JSON has the digests of all fields."""
    rows = []
    for comparison in [*result["digests"]["recovery"], result["digests"]["end"]]:
        where = f"version {comparison['version']}"
        where += f", generation {comparison['generation']}" if "generation" in comparison else ", end"
        for rank, entry in comparison["ranks"].items():
            ours, twin = (
                (entry[side] or {}).get("parameters", "-") for side in ("recovered", "failure_free")
            )
            equal = {True: "equal", False: "DIFFERENT", None: "no evidence"}[entry["equal"]]
            rows.append(
                f"<tr><td>{where}</td><td>rank {rank}</td><td><code>{text(str(ours)[:16])}</code></td>"
                f"<td><code>{text(str(twin)[:16])}</code></td><td>{equal}</td></tr>"
            )
    head = "<tr><th></th><th></th><th>recovered</th><th>failure-free</th><th>all digests</th></tr>"
    return f"<h2>Digests of the parameters</h2><table>{head}{''.join(rows)}</table>"
