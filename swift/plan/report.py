"""What a plan says, as one document and as text. Pure."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from swift.plan import frontier, greedy
from swift.plan.frontier import Frontier, Point
from swift.plan.model import CostModel, Cuts, Prediction
from swift.plan.profile import Cap, Profile
from swift.plan.verdict import intervals, pays_bytes

FORMAT = 1
ROWS_MAX = 24
GROUPS_SHOWN = 16
BETTER = 1e-9
"""By less than that share of it, two recovery times are the same."""


def build(profile: Profile, cap: Cap | None) -> dict[str, Any]:
    """The whole document. Numbers that are infinite become None."""
    model = CostModel(profile)
    merged = {additive: greedy.merges(model, additive=additive) for additive in (True, False)}
    curve, chosen, problem = choose(model, cap, [*merged[True], *merged[False]])
    prediction = model.predict(chosen)
    swift, own = ([_row(model, cuts) for cuts in merged[additive]] for additive in (True, False))
    rows = [_row(model, point.cuts) for point in curve.points]
    return {
        "plan": FORMAT,
        "name": profile.name,
        "stages": profile.stages,
        "machines": profile.machines,
        "step_s": model.step_s,
        "mtbf_s": model.mtbf_s,
        "checkpoint_interval_steps": profile.checkpoint_interval_steps,
        "cap": None if cap is None else {cap.kind: cap.value},
        "met": not problem,
        "problem": problem,
        "chosen": {**asdict(prediction), "logged": list(prediction.logged), "text": groups_text(prediction)},
        "frontier": {
            "exact": curve.resolution_bytes == 0,
            "resolution_bytes": curve.resolution_bytes,
            "points": rows,
        },
        "swift": swift,
        "greedy": own,
        "compared": _finite(compared(rows, swift, own)),
        "pays": _finite(pays_bytes(model, chosen)),
        "interval": _finite(intervals(model, chosen, [point.cuts for point in curve.points], cap)),
    }


def groups_text(prediction: Prediction) -> str:
    """The stages of each group, as `Session.from_env(groups=...)` takes them."""
    ends = [(first, end - 1) for first, end in (group.stages for group in prediction.groups)]
    return ",".join(f"{first}" if last == first else f"{first}-{last}" for first, last in ends)


def choose(model: CostModel, cap: Cap | None, others: Sequence[Cuts] = ()) -> tuple[Frontier, Cuts, str]:
    """(frontier, groups, "" or why the cap cannot be met, with the groups that come closest).

    `others`: choices that are known already, for a frontier that is not exact.
    """
    if cap is not None and cap.kind == "worst_recovery_s":
        within = _frontier(model, others, cap.value)
        if within.points:
            return within, within.points[0].cuts, ""
        curve = _frontier(model, others)
        closest = min(curve.points, key=lambda point: model.worst_recovery_s(point.cuts))
        least = f"{model.worst_recovery_s(closest.cuts):.4g} s is the least that is found"
        return curve, closest.cuts, f"no groups recover from every failure within {cap.value:g} s; {least}"
    curve = _frontier(model, others)
    if cap is None:
        return curve, curve.points[-1].cuts, ""
    point: Point | None
    if cap.kind == "recovery_s":
        point, last = curve.by(cap.value), curve.points[-1]
        problem = f"no groups recover within {cap.value:g} s on average; {last.recovery_s:.4g} s is the least"
        return (curve, point.cuts, "") if point is not None else (curve, last.cuts, problem)
    profile = model.profile
    room = cap.value // profile.checkpoint_interval_steps - profile.other_bytes
    point = curve.within(max(room, 0))  # one group of all keeps to any cap: it logs nothing
    assert point is not None
    return curve, point.cuts, ""


def _frontier(model: CostModel, others: Sequence[Cuts], worst_s: float = math.inf) -> Frontier:
    curve = frontier.exact(model, worst_s=worst_s)
    return frontier.joined(model, curve, others, worst_s=worst_s) if curve.resolution_bytes else curve


def _row(model: CostModel, cuts: Cuts) -> dict[str, Any]:
    per_step = model.bytes_per_step(cuts)
    return {
        "groups": len(cuts) + 1,
        "bytes_per_step": per_step,
        "storage_bytes": per_step * model.profile.checkpoint_interval_steps,
        "overhead_s": model.overhead_s(cuts),
        "recovery_s": model.expected_recovery_s(cuts),
        "worst_recovery_s": model.worst_recovery_s(cuts),
        "logged": [model.edges[cut] for cut in cuts],
    }


def compared(
    rows: Sequence[dict[str, Any]], swift: Sequence[dict[str, Any]], own: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """At every size of the frontier and of SWIFT's merge: the shortest recovery that each has within it."""
    sizes = sorted({row["storage_bytes"] for row in [*rows, *swift]})
    shortest_at = []
    best = [_Shortest(choices) for choices in (rows, swift, own)]
    for size in sizes:
        exact_s, swift_s, greedy_s = (shortest.within(size) for shortest in best)
        shortest_at.append(
            {"storage_bytes": size, "exact_s": exact_s, "swift_s": swift_s, "greedy_s": greedy_s}
        )
    return shortest_at


class _Shortest:
    """Asked with ascending sizes."""

    def __init__(self, choices: Sequence[dict[str, Any]]) -> None:
        self._left = sorted(choices, key=lambda row: -int(row["storage_bytes"]))
        self._least = math.inf

    def within(self, size: int) -> float:
        while self._left and self._left[-1]["storage_bytes"] <= size:
            self._least = min(self._least, self._left.pop()["recovery_s"])
        return self._least


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def dumps(document: dict[str, Any]) -> str:
    """One line for each choice: there may be a thousand of a thousand boundaries."""
    parts = []
    for name, value in document.items():
        if name == "frontier":
            head = {key: entry for key, entry in value.items() if key != "points"}
            points = ",\n  ".join(json.dumps(point) for point in value["points"])
            parts.append(f'"frontier": {json.dumps(head)[:-1]}, "points": [\n  {points}]}}')
        elif name in ("swift", "greedy", "compared"):
            parts.append(f'"{name}": [\n  ' + ",\n  ".join(json.dumps(row) for row in value) + "]")
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


# --- text ---


def text(document: dict[str, Any]) -> str:
    """The document as text, for a terminal."""
    lines = [
        f"{document['name']}: {document['stages']} stages on {document['machines']} machines, "
        f"{seconds_words(document['step_s'])} a step, a failure every {seconds_words(document['mtbf_s'])}",
        "",
        *_table(document),
        "",
        _better(document),
        "",
        *_chosen(document),
        "",
        _pays_words(document),
        *_interval_words(document),
    ]
    return "\n".join(lines)


def size_words(size: float) -> str:
    """1234567 -> "1.235 MB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.4g} {unit}"
        size /= 1000
    raise AssertionError


def seconds_words(seconds: float | None) -> str:
    """5400.0 -> "90 min"."""
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.4g} s"


def _table(document: dict[str, Any]) -> list[str]:
    points, chosen = document["frontier"]["points"], document["chosen"]["logged"]
    others = {row["storage_bytes"]: row for row in document["compared"]}
    rows = [["", "groups", "log", "overhead", "recovery", "at worst", "greedy", "SWIFT"]]
    for index in _selected(points, chosen):
        point = points[index]
        other = others[point["storage_bytes"]]
        rows.append(
            [
                "*" if point["logged"] == chosen else "",
                str(point["groups"]),
                size_words(point["storage_bytes"]),
                f"{100 * point['overhead_s'] / document['step_s']:.2g} %",
                f"{point['recovery_s']:.4g} s",
                f"{point['worst_recovery_s']:.4g} s",
                *(_behind(point["recovery_s"], other[name]) for name in ("greedy_s", "swift_s")),
            ]
        )
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    left_out = len(points) - (len(rows) - 1)
    exact = document["frontier"]["exact"]
    head = f"{len(points)} choices of recovery groups, of which none is better in bytes and in time"
    if not exact:
        head += (
            f" (not exact: sizes were rounded up to {size_words(document['frontier']['resolution_bytes'])})"
        )
    return [head, *lines, *([f"({left_out} more; --json has all)"] if left_out else [])]


def _selected(points: Sequence[dict[str, Any]], chosen: list[int]) -> list[int]:
    if len(points) <= ROWS_MAX:
        return list(range(len(points)))
    spread = {round(at * (len(points) - 1) / (ROWS_MAX - 2)) for at in range(ROWS_MAX - 1)}
    return sorted(spread | {i for i, point in enumerate(points) if point["logged"] == chosen})


def _behind(exact_s: float, other_s: float | None) -> str:
    if other_s is None:
        return "-"
    return f"+{100 * (other_s / exact_s - 1):.2g} %" if is_better(exact_s, other_s) else "same"


def is_better(exact_s: float, other_s: float | None) -> bool:
    """By more than rounding; also where the other one has nothing of that size."""
    return other_s is None or exact_s < other_s * (1 - BETTER)


def _better(document: dict[str, Any]) -> str:
    words = []
    for name, title in (("greedy_s", "the greedy merge"), ("swift_s", "SWIFT's merge")):
        gains = [
            row[name] / row["exact_s"] - 1
            for row in document["compared"]
            if row[name] is not None and row["exact_s"] is not None and is_better(row["exact_s"], row[name])
        ]
        total = len(document["compared"])
        most = f", by up to {100 * max(gains):.1f} %" if gains else ""
        words.append(f"quicker than {title} at {len(gains)} of {total} sizes{most}")
    return "the same bytes: " + "; ".join(words)


def _chosen(document: dict[str, Any]) -> list[str]:
    chosen, cap = document["chosen"], document["cap"]
    what = "without a cap: the shortest recovery"
    if cap is not None:
        ((kind, value),) = cap.items()
        amount = size_words(value) if kind == "storage_bytes" else seconds_words(value)
        what = {
            "storage_bytes": f"within {amount}: the shortest recovery",
            "recovery_s": f"back within {amount} on average: the fewest bytes",
            "worst_recovery_s": f"back within {amount} whoever fails: the fewest bytes",
        }[kind]
    lines = [
        what,
        f"  log {size_words(chosen['storage_bytes'])} until the next checkpoint, "
        f"{size_words(chosen['bytes_per_step'])} a step; overhead {seconds_words(chosen['overhead_s'])} a step",
        f"  recovery {seconds_words(chosen['recovery_s'])} on average, "
        f"{seconds_words(chosen['worst_recovery_s'])} at worst; "
        f"a replayed step takes {chosen['replay_ratio']:.2f} of a step",
    ]
    groups = chosen["groups"]
    for group in groups[:GROUPS_SHOWN]:
        (first, end), (begin, stop) = group["machines"], group["stages"]
        copies = f", {group['copies']} copies" if group["copies"] > 1 else ""
        lines.append(
            f"  {_run_words('machine', first, end)} ({_run_words('stage', begin, stop)}): "
            f"{seconds_words(group['recovery_s'])}{copies}"
        )
    if len(groups) > GROUPS_SHOWN:
        lines.append(f"  and {len(groups) - GROUPS_SHOWN} groups more")
    else:
        lines.append(f'  for the session: groups="{chosen["text"]}"')
    return lines


def _run_words(what: str, first: int, end: int) -> str:
    return f"{what} {first}" if end == first + 1 else f"{what}s {first} to {end - 1}"


def _pays_words(document: dict[str, Any]) -> str:
    pays = document["pays"]
    log, checkpoint = size_words(pays["log_bytes"]), size_words(pays["checkpoint_bytes"])
    if not document["chosen"]["logged"]:
        return "bytes: nothing is logged between groups; everybody restores the checkpoint"
    if pays["avoided"] is None:
        return (
            f"bytes: the log pays: {log}, and no frequency of checkpoints ({checkpoint} each) is back as soon"
        )
    verdict = "the log pays" if pays["pays"] else "the log does not pay"
    return (
        f"bytes: {verdict}: {log} against {pays['avoided']:.1f} checkpoints of {checkpoint} avoided in "
        f"{document['checkpoint_interval_steps']} steps (back as soon without a log: one every "
        f"{pays['equal_interval_steps']:.1f} steps)"
    )


def _interval_words(document: dict[str, Any]) -> list[str]:
    interval = document["interval"]
    verdict = "the log pays" if interval["log_pays"] else "the log does not pay"
    titles = (("best", "best of all"), ("chosen", "these groups"), ("without_log", "without a log"))
    lines = [f"time: {verdict}; the share of it that is training, at the best interval:"]
    for name, title in titles:
        option = interval[name]
        if option is None:
            lines.append(f"  {title}: no interval keeps to the cap")
            continue
        count = option["groups"]
        what = f"{count} groups" if count > 1 else "1 group"
        limited = " (no more within the cap)" if option["limited_by_cap"] else ""
        lines.append(
            f"  {title}: {_percent(option['useful'])}, {what}, a checkpoint every {option['steps']} steps{limited}"
        )
    now = interval["now"]
    lines.append(
        f"  as it is, every {now['steps']} steps: {_percent(now['useful'])}; "
        f"without a log {_percent(now['useful_without_log'])}"
    )
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.3f} %"
