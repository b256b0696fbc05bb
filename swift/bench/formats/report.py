"""What the turns say together: medians, ratios to the limits, losses; and the tables of them. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from swift.bench.formats.turns import LIMITS, Turn

MIB = 1 << 20
_MOST = ("blocked_s", "total_s", "load_s", "gather_s", "copy_s", "write_s", "write_fsync_s", "read_s")
_SUM = ("cpu_s", "bytes", "state_bytes")


def merge(measures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of all ranks in one turn. Seconds are those of the slowest rank; processor time and bytes are sums."""
    found: dict[str, Any] = {}
    for name in _MOST:
        if of := [each[name] for each in measures if name in each]:
            found[name] = max(of)
    for name in _SUM:
        if of := [each[name] for each in measures if name in each]:
            found[name] = sum(of)
    told = [each["losses"] for each in measures if "losses" in each]
    if told:
        found["losses"] = {
            group: list(dict.fromkeys(what for each in told for what in each[group])) for group in told[0]
        }
    return found


class Measures:
    """All that was measured."""

    def __init__(self) -> None:
        self._turns: dict[tuple[int, int, str], list[tuple[Turn, dict[str, Any]]]] = {}
        self._left_out: dict[tuple[int, int, str], dict[str, float]] = {}

    def add(self, ranks: int, turn: Turn, merged: dict[str, Any]) -> None:
        """What `merge` has made."""
        self._turns.setdefault((turn.parameter_bytes, ranks, turn.layout), []).append((turn, merged))

    def leave_out(self, ranks: int, turn: Turn, save_s: float) -> None:
        """Not measured, because a save would take that long."""
        self._left_out.setdefault((turn.parameter_bytes, ranks, turn.layout), {})[turn.format] = save_s

    def cases(self) -> list[dict[str, Any]]:
        """In the order in which they came."""
        return [
            _case(size, ranks, layout, [each for each in turns if each[0].round >= 0])
            | {"left_out": self._left_out.get((size, ranks, layout), {})}
            for (size, ranks, layout), turns in self._turns.items()
        ]

    def losses(self) -> dict[str, dict[str, list[str]]]:
        """By format and group, in any case."""
        found: dict[str, dict[str, list[str]]] = {}
        for turns in self._turns.values():
            for turn, merged in turns:
                for group, lost in merged.get("losses", {}).items():
                    of = found.setdefault(turn.format, {}).setdefault(group, [])
                    of += [what for what in lost if what not in of]
        return found


def _case(size: int, ranks: int, layout: str, turns: list[tuple[Turn, dict[str, Any]]]) -> dict[str, Any]:
    base = {turn.round: merged for turn, merged in turns if turn.format == LIMITS}
    kinds = dict.fromkeys((turn.format, turn.fsync) for turn, _ in turns if turn.format != LIMITS)
    formats = []
    for name, fsync in kinds:
        of = {turn.round: m for turn, m in turns if (turn.format, turn.fsync) == (name, fsync)}
        formats.append({"format": name, "fsync": fsync, **_row(of, base, fsync)})
    measured = [merged for turn, merged in turns if turn.format != LIMITS]
    return {
        "parameter_bytes": size,
        "state_bytes": max((merged["state_bytes"] for merged in measured), default=0),
        "ranks": ranks,
        "layout": layout,
        "rounds": len(base),
        "limits": {
            name: statistics.median(merged[name] for merged in base.values())
            for name in ("copy_s", "write_s", "write_fsync_s", "read_s", "gather_s")
        },
        "formats": formats,
    }


def _row(of: Mapping[int, dict[str, Any]], base: Mapping[int, dict[str, Any]], fsync: bool) -> dict[str, Any]:
    """Ratios are the medians of the rounds' ratios."""

    def ratio(one: str, other: str) -> float:
        ratios = [merged[one] / base[number][other] for number, merged in of.items()]
        return float(statistics.median(ratios))

    return {
        **{
            name: statistics.median(merged[name] for merged in of.values())
            for name in ("blocked_s", "total_s", "cpu_s", "load_s")
        },
        "bytes": round(statistics.median(merged["bytes"] for merged in of.values())),
        "size": statistics.median(merged["bytes"] / merged["state_bytes"] for merged in of.values()),
        "blocked_over_copy": ratio("blocked_s", "copy_s"),
        "total_over_write": ratio("total_s", "write_fsync_s" if fsync else "write_s"),
        "load_over_read": ratio("load_s", "read_s"),
    }


HEAD = (
    f"{'':<16} {'':>5} {'blocked':>9} {'total':>9} {'CPU':>9} {'load':>9} {'size':>6}   "
    f"{'blocked':>9} {'total':>10} {'load':>9}\n"
    f"{'':<16} {'fsync':>5} {'ms':>9} {'ms':>9} {'ms':>9} {'ms':>9} {'':>6}   "
    f"{'over copy':>9} {'over write':>10} {'over read':>9}"
)


def table(case: Mapping[str, Any]) -> str:
    """One case as lines of text."""
    limits = case["limits"]
    ranks = f"{case['ranks']} rank" + ("s" if case["ranks"] > 1 else "")
    gathered = (
        f", gathered in {1e3 * limits['gather_s']:.1f} ms"
        if case["layout"] == "gathered"
        else ", sharded"
        if case["ranks"] > 1
        else ""
    )
    lines = [
        f"{case['parameter_bytes'] / MIB:g} MiB of parameters ({case['state_bytes'] / MIB:.1f} MiB of state), "
        f"{ranks}{gathered}",
        f"limits: copied in memory {1e3 * limits['copy_s']:.1f} ms, written {1e3 * limits['write_s']:.1f} ms, "
        f"with fsync {1e3 * limits['write_fsync_s']:.1f} ms, read {1e3 * limits['read_s']:.1f} ms",
        HEAD,
    ]
    for row in case["formats"]:
        times = " ".join(f"{1e3 * row[name]:9.1f}" for name in ("blocked_s", "total_s", "cpu_s", "load_s"))
        lines.append(
            f"{row['format']:<16} {'yes' if row['fsync'] else 'no':>5} {times} {row['size']:6.2f}   "
            f"{row['blocked_over_copy']:9.2f} {row['total_over_write']:10.2f} {row['load_over_read']:9.2f}"
        )
    lines += [
        f"{name:<16} left out: a save would take about {save_s:.1f} s (see --save-max)"
        for name, save_s in case["left_out"].items()
    ]
    return "\n".join(lines)


KEPT = "-"


def losses_table(losses: Mapping[str, Mapping[str, Sequence[str]]], skipped: Mapping[str, str]) -> str:
    """What each format loses, a column for each group; and why others were not measured."""
    lines = []
    if losses:
        groups = list(next(iter(losses.values())))
        cells = {name: [",".join(of[group]) or KEPT for group in groups] for name, of in losses.items()}
        widths = [
            max(len(group), *(len(row[index]) for row in cells.values()))
            for index, group in enumerate(groups)
        ]
        lines += [f"what is lost ({KEPT}: nothing):", _columns("", groups, widths)]
        lines += [_columns(name, row, widths) for name, row in cells.items()]
    lines += [f"{name:<16} skipped: {why}" for name, why in skipped.items()]
    return "\n".join(lines)


def _columns(name: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    return " ".join(
        [f"{name:<16}", *(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))]
    ).rstrip()
