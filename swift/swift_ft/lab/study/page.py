"""A study as one self-contained HTML page: no script, font or picture from elsewhere. Pure."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from swift_ft.lab.study import drawing, figures
from swift_ft.lab.study.settings import PLAIN

COLOURS = {"PASS": "#1a7f37", "FAIL": "#cf222e"}
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
.table { overflow-x: auto; font-size: .8rem }
.table td, .table th { white-space: nowrap; font-variant-numeric: tabular-nums }
.drawings { display: flex; flex-wrap: wrap; gap: 1.5rem }
.drawings figure { flex: 1 1 300px; max-width: 560px; margin: 0 }
figcaption { font-weight: 600 } svg text { font-size: 13px }
tr.front td:first-child { font-weight: 600 }
"""


def text(value: object) -> str:
    return html.escape(str(value))


def build(found: Mapping[str, Any]) -> str:
    """Builds the page from the document of `figures.build`."""
    good = not found["failed"] and not found["differ"]
    settings = found["settings"]
    verdict = "PASS" if good else "FAIL"
    head = (
        "All runs came to their ends, and all exact ones with the same bits."
        if good
        else f"{len(found['failed'])} runs failed, {len(found['differ'])} have other bits."
    )
    parts = [
        "<h1>swift study: what failures cost, by strategy</h1>",
        f'<div class="verdict" style="--verdict: {COLOURS[verdict]}"><b>{verdict}</b><br>{text(head)}</div>',
        f"<p>{text(found['question'])}</p>",
        f'<p class="dim">{text(found["machine"])}. {text(_runs(settings))}</p>',
        "<h2>In words</h2>",
        _list(figures.conclusions(found)),
        *(_task(task) for task in found["tasks"].values()),
        *(_skipped(found["skipped"])),
        *(_section("Checked by one process of plain torch", map(figures.check_words, found["checks"]))),
        *(_section("Runs that failed", (f"{name}: {why}" for name, why in found["failed"].items()))),
        *(_section("Other bits than without failures", found["differ"])),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>swift study</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _runs(settings: Mapping[str, Any]) -> str:
    return (
        f"Two replicas, {settings['steps']} steps, a checkpoint every {settings['checkpoint_every']} steps, "
        f"{settings['seeds']} seeds; where the others go on without a lost rank, its place is gone for "
        f"{settings['repair_s']:g} s. ± is the 95 % interval of the mean over seeds. A rank fails in the update of a "
        "step, by SIGKILL; the time between failures is exponential."
    )


def _list(words: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{text(each)}</li>" for each in words) + "</ul>"


def _section(title: str, words: Any) -> list[str]:
    found = list(words)
    return [f"<h2>{text(title)}</h2>", _list(found)] if found else []


def _skipped(tasks: Mapping[str, str]) -> list[str]:
    return [f"<p>{text(task)} was skipped: {text(why)}</p>" for task, why in tasks.items()]


def _task(task: Mapping[str, Any]) -> str:
    rows = task["rows"]
    better = "more is better" if task["higher_is_better"] else "less is better"
    parts = [f"<h2>{text(task['title'])}: {text(task['measure'])} in {text(task['unit'])} ({better})</h2>"]
    drawings = []
    for rate in sorted({row["rate"] for row in rows if row["rate"] > 0}):
        at_rate = [row for row in rows if row["rate"] == rate]
        drawn = drawing.tradeoff(at_rate, task["apart"])
        drawings.append(f"<figure><figcaption>{figures.rate_words(rate)}</figcaption>{drawn}</figure>")
    highest = max(row["rate"] for row in rows)
    shown = [row for row in rows if row["strategy"] == PLAIN or row["rate"] == highest > 0]
    drawn = drawing.curves(shown, "nats")
    drawings.append(f"<figure><figcaption>Loss, {figures.rate_words(highest)}</figcaption>{drawn}</figure>")
    parts.append(f'<div class="drawings">{"".join(drawings)}</div>')
    parts.append(drawing.key(list(dict.fromkeys(row["strategy"] for row in rows))))
    parts.append(
        '<p class="dim">To the lower left is better. The dashed line joins those that no other one beats in both; '
        f"their names are bold in the tables. {figures.PER_FAILURE[0].upper()}{figures.PER_FAILURE[1:]}.</p>"
    )
    parts += [f"<h3>{text(title)}</h3>{_table(group)}" for title, group in figures.groups(task)]
    return "".join(parts)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    words = [figures.cells_of(row) for row in rows]
    named = figures.columns(words)
    head = "".join(f"<th>{text(title)}</th>" for _, title in named)
    body = []
    for row, of_row in zip(rows, words, strict=True):
        cells = "".join(f"<td>{text(of_row[name])}</td>" for name, _ in named)
        body.append(f'<tr class="{"front" if row["front"] else ""}">{cells}</tr>')
    return f'<div class="table"><table><tr>{head}</tr>{"".join(body)}</table></div>'
