"""What came of each case."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """Those of earlier runs."""
    return list(json.loads(path.read_text())["cases"]) if path.exists() else []


def parsed(lines: str) -> list[Row]:
    return [json.loads(line) for line in lines.splitlines()]


def write(path: Path, rows: Sequence[Row]) -> None:
    path.write_text(json.dumps({"cases": rows}, indent=2) + "\n")


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/frameworks.md."""
    lines = [
        "| framework | trainer | ranks | killed | verdict | seconds lost | steps again | restarted | lines |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        link = f"[{row['trainer']}](../tests/frameworks/{row['framework']}/{row['trainer']}.py)"
        cost = ["seconds_lost", "steps_again", "restarted", "lines"]
        told = ["-" if row[name] is None else str(row[name]) for name in cost]
        cells = [row["version"], link, row["topology"], row["kill"], row["verdict"], *told]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
