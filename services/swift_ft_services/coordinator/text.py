"""Texts that the coordinator shows to people, and fields of trace events."""

from collections.abc import Iterable, Mapping
from itertools import islice

from swift_ft.planner import Plan, RankPlan, Report
from swift_ft.rpc.codec import as_json
from swift_ft_services.coordinator.job_record import JobRow, State

NAMED_MAX = 64
"""Maximum number of ranks named in a sentence."""


def waiting_for(row: JobRow) -> str:
    waits = [f"log server {address}: {why}" for address, why in sorted(row.blocked.items())]
    if row.lacks_log_server() and not row.state.is_over:
        lost = "; ".join(f"{server.address} {server.lost}" for server in row.log_servers)
        waits.append(f"a log server, since none is left ({lost}): name one with swift-ft logs --add")
    if row.state in (State.FORMING, State.FENCING) and row.granted < row.generation and not waits:
        waits.append(f"the log servers to hold generation {row.generation}")
    if row.state in (State.FORMING, State.FENCING, State.PLANNING):
        missing = (rank for rank in row.slots() if rank not in row.holders)
        waits += _ranks(missing, row.wanted - len(row.seated()), "to join")
    if row.state is State.PLANNING:
        silent = sorted(set(row.seated()) - set(row.reports))
        waits += _ranks(silent, len(silent), "to report")
        if not waits:
            waits.append("the log inventory" if row.plan is None else "the logs to be emptied")
    if row.state in (State.FORMING, State.RECOVERING):
        begun = sorted(set(row.seated()) - set(row.ready))
        waits += _ranks(begun, len(begun), "to be ready")
    return "; ".join(waits)


def exit_words(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def versions_words(versions: Mapping[int, int]) -> str:
    return ", ".join(f"rank {rank} at {version}" for rank, version in sorted(versions.items()))


def report_fields(report: Report) -> dict[str, object]:
    fields: dict[str, object] = {"rank": report.rank, "version": report.version}
    if report.undo_to is not None:
        fields |= {"undo_to": report.undo_to, "undo_exact": report.undo_exact}
    if report.forward_to is not None:
        fields["forward_to"] = report.forward_to
    if report.finish_to is not None:
        fields["finish_to"] = report.finish_to
    if report.snapshots:
        fields["snapshots"] = [list(held) for held in report.snapshots]
    return fields


def plan_fields(plan: Plan) -> dict[str, object]:
    return {
        "target_version": plan.target_version,
        "exact": plan.exact,
        "ranks": [_rank_fields(r) for r in plan.ranks],
        **({"help": [as_json(help) for help in plan.help]} if plan.help else {}),
        **({"predictions": [as_json(one) for one in plan.predictions]} if plan.predictions else {}),
        "reason": plan.reason,
    }


def _rank_fields(r: RankPlan) -> dict[str, object]:
    sources = {"sources": list(r.sources)} if r.sources else {}
    return {
        "rank": r.rank,
        "strategy": str(r.strategy),
        "from_version": r.from_version,
        **sources,
        "reason": r.reason,
    }


def _ranks(ranks: Iterable[int], count: int, what: str) -> list[str]:
    """Returns the phrase that names `ranks`, at most NAMED_MAX of them: it is part of every View."""
    if not count:
        return []
    names = ", ".join(map(str, islice(ranks, NAMED_MAX)))
    more = f" and {count - NAMED_MAX} more" if count > NAMED_MAX else ""
    return [f"{'rank' if count == 1 else 'ranks'} {names}{more} {what}"]
