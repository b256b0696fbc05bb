"""What the coordinator says to people."""

from collections.abc import Collection, Mapping

from services.coordinator.row import JobRow, State


def waiting_for(row: JobRow) -> str:
    """What the state waits for, for people."""
    waits = [f"log server {address}: {why}" for address, why in sorted(row.blocked.items())]
    if row.state in (State.FORMING, State.FENCING) and row.granted < row.generation and not waits:
        waits.append(f"the log servers to hold generation {row.generation}")
    if row.state in (State.FORMING, State.FENCING, State.PLANNING):
        waits += _ranks(row.dead_ranks(), "to join")
    if row.state is State.PLANNING:
        silent = sorted(set(row.holders) - set(row.reports))
        waits += _ranks(silent, "to report")
        if not waits:
            waits.append("the log inventory" if row.plan is None else "the logs to be emptied")
    if row.state in (State.FORMING, State.RECOVERING):
        waits += _ranks(sorted(set(row.holders) - set(row.ready)), "to be ready")
    return "; ".join(waits)


def exit_words(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def versions_words(versions: Mapping[int, int]) -> str:
    return ", ".join(f"rank {rank} at {version}" for rank, version in sorted(versions.items()))


def _ranks(ranks: Collection[int], what: str) -> list[str]:
    names = ", ".join(map(str, ranks))
    return [f"{'rank' if len(ranks) == 1 else 'ranks'} {names} {what}"] if ranks else []
