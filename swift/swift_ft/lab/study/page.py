"""A study as one self-contained HTML page: its drawings, and its tables as the terminal has them."""

import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from swift_ft.lab.study import figures
from swift_ft.lab.study.settings import STRATEGIES

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:1200px;margin:2rem auto;padding:0 1rem}"
    "pre{overflow-x:auto;font-size:.8rem}.drawings{display:flex;flex-wrap:wrap}svg{max-width:100%;height:auto}"
)
COLOURS = {strategy: f"C{number}" for number, strategy in enumerate(STRATEGIES)}
SETTINGS: Any = {
    "font.size": 10,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "svg.hashsalt": "swift",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "grid.color": "#d1d9e0",
}
"""Of matplotlib's drawings. Text stays text, and the same drawing has the same bytes."""


def build(found: Mapping[str, Any]) -> str:
    """Builds the page from the document of `figures.build`."""
    failed, differ = len(found["failed"]), len(found["differ"])
    head = "PASS: all runs came to their ends, and all exact ones with the same bits."
    if failed or differ:
        head = f"FAIL: {failed} runs failed, {differ} have other bits."
    parts = [f"<h1>swift study: what failures cost, by strategy</h1><p><b>{head}</b></p>"]
    for task in found["tasks"].values():
        parts.append(
            f'<h2>{html.escape(task["title"])}</h2><div class="drawings">{"".join(_drawings(task))}</div>'
        )
    tables = html.escape("\n".join(figures.lines(found)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>swift study</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body>{''.join(parts)}<pre>{tables}</pre></body></html>\n"
    )


def _drawings(task: Mapping[str, Any]) -> list[str]:
    rows = [row for row in task["rows"] if row["runs"]]
    if not rows:
        return ["<p>No run came to its end.</p>"]
    rates = sorted({row["rate"] for row in rows if row["rate"] > 0})
    return [tradeoff([row for row in rows if row["rate"] == rate], task["apart"]) for rate in rates]


@matplotlib.rc_context(SETTINGS)
def tradeoff(rows: Sequence[Mapping[str, Any]], unit: str) -> str:
    """Draws, as SVG, a dot for each strategy at one rate: to the right what takes longer, upwards what has learned
    less."""
    figure = Figure(figsize=(5.5, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(figures.rate_words(rows[0]["rate"]))
    for row in rows:
        x, y, strategy = row["overhead"], row["worse"], row["strategy"]
        if x is not None and y is not None:
            half = y["half"] or 0.0
            axes.errorbar(
                [100 * x["mean"]], [y["mean"]], [half], fmt="o", color=COLOURS[strategy], label=strategy
            )
    axes.set_xlabel("longer by, %")
    axes.set_ylabel(f"worse by, {unit}")
    axes.legend()
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
