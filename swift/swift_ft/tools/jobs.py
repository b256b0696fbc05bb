"""`swift-ft jobs`: lists a coordinator's jobs and their states."""

from collections.abc import Sequence

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.rpc.codec import as_json
from swift_ft.rpc.views import state_name
from swift_ft.tools.status import answer, client_of, exit_code_of, parser_of

DESCRIPTION = """\
Lists a coordinator's jobs, those under way first: state, generation, living ranks, version, newest checkpoint. With
tokens only the jobs that the token in $SWIFT_TOKEN_FILE is of."""


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code_of(run, argv)


def run(argv: Sequence[str]) -> int:
    arguments = parser_of("swift-ft jobs", DESCRIPTION, "print it as JSON", of_job=False).parse_args(argv)
    client = client_of(arguments)
    try:
        reply = client.jobs()
    finally:
        client.close()
    answer(as_json(reply) if arguments.json else lines(reply))
    return 0


def lines(reply: pb.JobsReply) -> list[str]:
    """Returns the lines of the text output."""
    if not reply.jobs:
        return ["no jobs"]
    table: list[tuple[str, ...]] = [("job", "state", "generation", "ranks", "version", "checkpoint", "")]
    table += [_row(job) for job in reply.jobs]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]) - 1)]
    out = ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in table]
    return out + ([f"and {reply.left_out} more"] if reply.left_out else [])


def _row(job: pb.JobSummary) -> tuple[str, ...]:
    checkpoint = str(job.checkpoint) if job.HasField("checkpoint") else "-"
    words = [f"waits for {job.waiting_for}"] if job.waiting_for else []
    if job.HasField("inexact_since"):
        words.append(f"not exact since version {job.inexact_since}")
    if job.reason and job.state != pb.RUNNING:
        words.append(job.reason)
    return (
        job.job,
        state_name(job.state),
        str(job.generation),
        f"{job.live_ranks}/{job.world_size}",
        str(job.version),
        checkpoint,
        "; ".join(words),
    )
