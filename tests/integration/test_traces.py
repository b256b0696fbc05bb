"""Traces of recoveries, as an OTLP receiver gets them; and receivers that are away."""

import socket
import time
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from swift_ft._pb import coordinator_pb2 as pb
from tests.integration.coordinator_world import Job, recovered
from tests.patience import eventually

TIMEOUT_S = 20.0


class Receiver(otlp_grpc.TraceServiceServicer):
    """An OTLP receiver on a free port."""

    def __init__(self) -> None:
        self.resources: list[dict[str, str]] = []
        self.spans: list[Span] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        otlp_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(  # noqa: N802
        self, request: otlp.ExportTraceServiceRequest, _context: grpc.ServicerContext
    ) -> otlp.ExportTraceServiceResponse:
        for each in request.resource_spans:
            self.resources.append({one.key: one.value.string_value for one in each.resource.attributes})
            self.spans += [span for scope in each.scope_spans for span in scope.spans]
        return otlp.ExportTraceServiceResponse()

    def recoveries(self, count: int) -> list[Span]:
        """Waits for the roots of so many. A root is sent last."""

        def roots() -> list[Span] | None:
            found = [span for span in self.spans if not span.parent_span_id]
            return found if len(found) >= count else None

        return eventually(roots, lambda: [span.name for span in self.spans], TIMEOUT_S)

    def children(self, span: Span) -> list[Span]:
        found = [each for each in self.spans if each.parent_span_id == span.span_id]
        assert all(each.trace_id == span.trace_id for each in found)
        return sorted(found, key=lambda each: (each.start_time_unix_nano, each.name))

    def close(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    found = Receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    yield found
    found.close()


def attributes(span: Span) -> dict[str, object]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value") or "") for one in span.attributes}


def lose_rank(job: Job, generation: int) -> pb.View:
    """Kills the holder of rank 2; another process takes the rank. Returns the View that runs again."""
    job.members[-1].kill()
    job.members[-1].report_exit()
    job.members.append(job.member(2))
    return job.wait(job.members[0], recovered(generation))


def stop(job: Job) -> str:
    """Ends the coordinator, and returns what it has said."""
    for member in job.members:
        member.kill()
    process = job.coordinators.pop().process
    assert process is not None
    process.terminate()
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    return said


def test_a_recovery_is_a_span_its_phases_are_in_it_and_ranks_in_these(receiver: Receiver, job: Job) -> None:
    job.coordinator()
    began = time.time_ns()
    members = job.form()
    plan = lose_rank(job, 2).plan
    (root,) = receiver.recoveries(1)
    ended = time.time_ns()
    assert root.name == "recovery"
    told = attributes(root)
    assert (told["swift.job"], told["swift.generation"], told["swift.exact"]) == ("a", 2, True)
    assert told["swift.reason"] == "rank 2 was killed by signal 9"
    assert (told["swift.plan"], told["swift.version"]) == (plan.reason, plan.target_version)
    assert root.status.code == Status.STATUS_CODE_UNSET
    phases = receiver.children(root)
    assert [phase.name for phase in phases] == ["FENCING", "PLANNING", "RECOVERING"]
    edges = [phases[0].start_time_unix_nano, *(phase.end_time_unix_nano for phase in phases)]
    assert began < edges[0]
    assert edges == sorted(edges)
    assert edges[-1] < ended
    assert edges[:-1] == [phase.start_time_unix_nano for phase in phases]
    assert (edges[0], edges[-1]) == (root.start_time_unix_nano, root.end_time_unix_nano)
    ranks = [receiver.children(phase) for phase in phases]
    joins = [span.name for within in ranks[:2] for span in within if "joins" in span.name]
    assert joins == ["rank 2 joins"]
    assert {span.name for span in ranks[1]} - set(joins) == {f"rank {rank} reports" for rank in range(3)}
    assert [span.name for span in ranks[2]] == [f"rank {rank} is ready" for rank in range(3)]
    # Who was a step behind catches up: how far apart the survivors are is up to the scheduler.
    strategies = [attributes(span)["swift.strategy"] for span in ranks[2]]
    assert strategies == [pb.Strategy.Name(one.strategy) for one in plan.ranks]
    assert strategies[2] == "REPLAY"
    for phase, within in zip(phases, ranks, strict=True):
        for span in within:
            assert span.start_time_unix_nano == phase.start_time_unix_nano
            assert span.start_time_unix_nano < span.end_time_unix_nano <= phase.end_time_unix_nano
    # The last rank of a phase is what it has waited for.
    assert max(span.end_time_unix_nano for span in ranks[2]) == phases[2].end_time_unix_nano
    assert {one["service.name"] for one in receiver.resources} == {"swift-coordinator"}
    assert {one["deployment.environment"] for one in receiver.resources} == {"test"}
    assert members[0].error is None


def test_a_recovery_that_fails_is_an_error_and_one_of_two_generations_is_one_trace(
    receiver: Receiver, job: Job
) -> None:
    job.coordinator()
    members = job.form()
    members[2].kill()
    members[2].report_exit()
    job.wait(members[0], lambda view: view.state == pb.PLANNING)
    members[1].kill()
    members[1].report_exit()
    job.wait(members[0], lambda view: view.generation == 3)
    job.members += [job.member(1), job.member(2, refuses=lambda _view: "its state is damaged")]
    job.wait(members[0], lambda view: view.state == pb.FAILED)
    (root,) = receiver.recoveries(1)
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert root.status.message.startswith("FAILED: ")
    generations = [attributes(phase)["swift.generation"] for phase in receiver.children(root)]
    assert generations == sorted(generations)
    assert generations[0] == 2
    assert generations[-1] == attributes(root)["swift.generation"]


def test_another_coordinator_traces_what_is_left_of_a_recovery(receiver: Receiver, job: Job) -> None:
    coordinator = job.coordinator()
    members = job.form()
    members[2].kill()
    members[2].report_exit()
    job.wait(members[0], lambda view: view.state == pb.PLANNING)
    coordinator.kill()
    coordinator.start()
    job.members.append(job.member(2))
    job.wait(members[0], recovered(2))
    (root,) = receiver.recoveries(1)
    assert attributes(root)["swift.reason"] == "rank 2 was killed by signal 9"
    assert [phase.name for phase in receiver.children(root)] == ["PLANNING", "RECOVERING"]


@pytest.mark.parametrize("answers", [False, True], ids=["nobody listens", "it never answers"])
def test_a_receiver_that_is_away_holds_nothing_up(
    job: Job, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with socket.create_server(("127.0.0.1", 0)) as dead:
        port = dead.getsockname()[1]
        if not answers:
            dead.close()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        job.coordinator()
        job.form()
        for generation in range(2, 8):
            lose_rank(job, generation)
        began = time.monotonic()
        stop(job)
        assert time.monotonic() - began < TIMEOUT_S / 2


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "unheard/protobuf", "pip install 'swift-ft[otel]'"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "could not convert string to float: 'soon'"),
    ],
)
def test_an_endpoint_that_cannot_be_used_is_a_warning(
    job: Job, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(variable, value)
    job.coordinator()
    job.form()
    lose_rank(job, 2)
    (line,) = [line for line in stop(job).splitlines() if "traces" in line]
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set, but traces cannot be sent" in line
    assert words in line
