"""Drawings as SVG, by matplotlib."""

import io
from typing import TYPE_CHECKING, Any

from swift_ft.errors import ServiceError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
"""Text stays text, and the same drawing has the same bytes."""


def new(width: float, height: float, title: str = "") -> "tuple[Figure, Axes]":
    """Returns an empty drawing of this size in inches. Raises ServiceError if matplotlib is missing."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ServiceError("matplotlib is missing here: pip install 'swift-ft[lab]'") from None
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title)
    return figure, axes


def svg(figure: "Figure") -> str:
    """Returns the drawing as an SVG element."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
