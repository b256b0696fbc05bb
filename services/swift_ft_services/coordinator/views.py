"""Conversion of a row to the messages that show it."""

from collections.abc import Iterable
from itertools import islice

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import encoded
from swift_ft.log.reader import lost_copy
from swift_ft.log.record import STEP_MAX
from swift_ft_services.coordinator.communicators import lost_slots
from swift_ft_services.coordinator.job import Job
from swift_ft_services.coordinator.job_record import Holder, JobRow, State
from swift_ft_services.coordinator.planning import job_shrinks, shrinks_late

FENCED_SHOWN = 256
"""Minimum number of the last fenced processes shown, or the number of ranks if that is higher; at most twice as many
are shown."""
SUMMARY_WORDS_MAX = 200
"""Maximum number of characters of a reason in a list of jobs."""
NAMED_MAX = 64
"""Maximum number of ranks named in a sentence."""


def view_of(row: JobRow) -> pb.View:
    return pb.View(
        job=row.job,
        generation=row.generation,
        state=pb.State.Value(row.state),
        world_size=row.world_size,
        members=[_member(holder) for _, holder in sorted(row.seated().items())],
        vacant=sorted(row.vacant),
        shrinks=job_shrinks(row.config),
        shrinks_late=shrinks_late(row.config),
        fenced=[_member(holder) for holder in _last_fenced(row)],
        plan=_plan_of(row),
        log_servers=row.addresses(),
        log_places=[
            pb.LogServerPlace(address=server.address, host=server.host, lost=server.lost)
            for server in row.log_servers
        ],
        log_copies=[
            pb.LogCopies(rank=rank, servers=_addresses(row, [copy.server for copy in logs.copies]))
            for rank, logs in sorted(row.placement.items())
        ],
        copies_wanted=row.copies,
        reason=row.reason,
        revision=row.revision,
        checkpoints=row.checkpoints,
        waiting_for=waiting_for(row),
        checkpoint_at=row.checkpoint_at,
        checkpoint_reason=row.checkpoint_reason,
        groups=row.groups,
        checkpoints_from=row.shards_from,
        inexact_since=row.inexact_since,
        inexact_reason=row.inexact_reason,
        runs=row.runs,
        setbacks=row.setbacks,
        exit_code=row.exit_code,
        final_version=row.final,
        ends_at=row.end.version if row.end is not None else None,
        ends_of=row.end.num_steps if row.end is not None else 0,
        from_job=row.origin.job if row.origin is not None else "",
        from_version=row.origin.version if row.origin is not None else 0,
        taking_part=[pb.Seat(slot=slot, member=id) for slot, id in sorted(row.taking_part.items())],
        lost=lost_slots(row),
        left=[slot for slot in lost_slots(row) if slot in row.finished],
        revoked=row.revoked,
        decisions=[row.decisions[number] for number in sorted(row.decisions)],
        rehearsals=[row.rehearsals[rank] for rank in sorted(row.rehearsals)],
    )


def _last_fenced(row: JobRow) -> list[Holder]:
    """Returns the fenced processes to show. One fenced long before learns it from the answer to its next call. Old ones
    are dropped many at a time, because a list that loses its first entries must be sent as a whole."""
    kept = max(FENCED_SHOWN, row.world_size)
    return [row.fenced[n] for n in range(max(0, len(row.fenced) // kept - 1) * kept, len(row.fenced))]


def _plan_of(row: JobRow) -> pb.Plan | None:
    if row.plan is None or row.state not in (State.RECOVERING, State.RUNNING):
        return None
    sources = {
        stream: [_source(row, number) for number in numbers] for stream, numbers in row.sources.items()
    }
    return encoded(row.plan, row.generation, sources)


def status_of(job: Job, now: float) -> pb.StatusReply:
    """Returns the View, and the state of ranks and log servers at `now` (monotonic seconds)."""
    ranks = [
        pb.RankStatus(
            rank=rank,
            version=job.row.finished.get(rank, job.steps.version(rank)),
            lease_age_s=job.leases.age_s(rank, now),
            stages=job.row.stages.get(rank, []),
            replay=job.replays.get(rank),
            unsaved=job.checkpoints.unsaved.get(rank),
        )
        for rank in sorted(job.row.holders)
    ]
    suspicions = job.suspicions.all(job.row, now)
    servers = [
        pb.LogServerStatus(address=job.row.log_servers[number].address, silent_s=age_s)
        for number, age_s in job.places.ages_s(now).items()
    ]
    return pb.StatusReply(view=view_of(job.row), ranks=ranks, suspicions=suspicions, log_servers=servers)


def summary_of(job: Job) -> pb.JobSummary:
    """Returns one line of a list of jobs; texts are cut to `SUMMARY_WORDS_MAX` characters."""
    row = job.row
    return pb.JobSummary(
        job=row.job,
        state=pb.State.Value(row.state),
        generation=row.generation,
        world_size=row.world_size,
        live_ranks=0 if row.state.is_over else len(row.holders),
        version=max([job.checkpoints.newest_known(), *row.checkpoints]),
        checkpoint=max(row.checkpoints, default=None),
        inexact_since=row.inexact_since,
        reason=row.reason[:SUMMARY_WORDS_MAX],
        waiting_for=waiting_for(row)[:SUMMARY_WORDS_MAX],
    )


def measurements_of(job: Job) -> pb.MeasurementsReply:
    ranks = [
        pb.RankMeasurement(rank=rank, host=job.row.placement[rank].host, measured=measured)
        for rank, measured in sorted(job.measured.items())
    ]
    return pb.MeasurementsReply(world_size=job.row.world_size, config=job.row.config, ranks=ranks)


def _member(holder: Holder) -> pb.Member:
    return pb.Member(
        rank=holder.rank,
        incarnation=holder.incarnation,
        pid=holder.pid,
        host=holder.host,
        id=holder.member,
    )


def _source(row: JobRow, number: int) -> str:
    server = row.log_servers[number]
    if not server.lost:
        return server.address
    return lost_copy(row.reads_moved(), server.cold, STEP_MAX if server.below is None else server.below)


def _addresses(row: JobRow, numbers: list[int]) -> list[str]:
    return [row.log_servers[number].address for number in numbers]


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


def _ranks(ranks: Iterable[int], count: int, what: str) -> list[str]:
    """Returns the phrase that names `ranks`, at most NAMED_MAX of them: it is part of every View."""
    if not count:
        return []
    names = ", ".join(map(str, islice(ranks, NAMED_MAX)))
    more = f" and {count - NAMED_MAX} more" if count > NAMED_MAX else ""
    return [f"{'rank' if count == 1 else 'ranks'} {names}{more} {what}"]
