"""What came of each pair of versions."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

WORKS = "works"
FAILS = "fails"
REFUSED = "refused"
UNAVAILABLE = "not to be had"
_REASON_MAX = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    torch: str
    python: str
    date: str
    verdict: str
    reason: str = ""
    """In one line: of a verdict that is not `WORKS`, or what of it is refused."""
    build: str = ""
    suite: dict[str, int] = field(default_factory=dict)
    """passed, failed"""
    trainers: dict[str, str] = field(default_factory=dict)
    drills: dict[str, str] = field(default_factory=dict)
    floors: bool = False
    """With the oldest dependencies."""
    overlay: bool = False
    """With the pipelining of a newer torch."""

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...], bool, bool]:
        return _number(self.torch), _number(self.python), self.floors, self.overlay


def judged(suite: dict[str, int], trainers: dict[str, str], drills: dict[str, str]) -> tuple[str, str]:
    """The verdict over a pair that could be tried, and its reason. What is refused does not fail."""
    wrong = [f"{suite['failed']} tests fail"] if suite["failed"] else []
    if not suite["failed"] and not suite["passed"]:
        wrong.append("no test ran")
    wrong += [
        f"trainer {name}: {verdict}" for name, verdict in trainers.items() if verdict not in ("ok", REFUSED)
    ]
    wrong += [f"drill {name}: {verdict}" for name, verdict in drills.items() if verdict != "PASS"]
    if wrong:
        return FAILS, "; ".join(wrong)
    refused = [name for name, verdict in trainers.items() if verdict == REFUSED]
    return WORKS, f"{', '.join(refused)} refused" if refused else ""


def read(path: Path) -> list[Row]:
    """Those of earlier runs."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []


def write(path: Path, rows: Sequence[Row]) -> None:
    path.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n")


def with_row(rows: Sequence[Row], new: Row) -> list[Row]:
    """The rows, in the order of their versions, with `new` in the place of an older one of its pair."""
    others = [row for row in rows if row.key != new.key]
    return sorted([*others, new], key=lambda row: row.key)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/compatibility.md."""
    lines = [
        "| torch | Python | build | tests passed, failed | trainers | drills | verdict | date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        build = row.build + ", oldest dependencies" * row.floors
        cells = [row.torch + " + overlay" * row.overlay, row.python, build]
        cells.append(f"{row.suite['passed']}, {row.suite['failed']}" if row.suite else "")
        cells += [_good(row.trainers, "ok"), _good(row.drills, "PASS")]
        reason = textwrap.shorten(row.reason, _REASON_MAX, placeholder=" …")
        cells += [f"{row.verdict}: {reason}" if reason else row.verdict, row.date]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _good(verdicts: dict[str, str], good: str) -> str:
    return f"{sum(v == good for v in verdicts.values())} of {len(verdicts)}" if verdicts else ""
