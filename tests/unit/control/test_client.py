"""The client and the watcher, against a scripted server."""

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft._pb import coordinator_pb2_grpc as pb_grpc
from swift_ft.coordinator_client import CoordinatorClient, make_member, newer
from swift_ft.coordinator_messages import whole
from swift_ft.credentials import open_channel
from swift_ft.errors import AccessDenied, Fenced, JoinRefused, ServiceError, UnknownJob, UsageError
from swift_ft.launch.standalone import free_port
from tests.patience import eventually


class Scripted:
    """Answers each call with the next of its script: an answer, or a status code. The last one stays."""

    def __init__(self) -> None:
        self.script: list[object] = [pb.Ack()]
        self.requests: list[object] = []
        self.views: list[pb.View] = []
        self.changed = threading.Condition()

    def _next(self, request: object, context: grpc.ServicerContext) -> object:
        self.requests.append(request)
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, grpc.StatusCode):
            context.abort(answer, f"scripted {answer.name}")
        return answer

    def show(self, view: pb.View) -> None:
        with self.changed:
            self.views.append(view)
            self.changed.notify_all()

    def Watch(  # noqa: N802  (gRPC names its methods so)
        self, request: pb.WatchRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ViewUpdate]:
        sent = 0
        while context.is_active():
            with self.changed:
                if len(self.views) == sent:
                    self.changed.wait(0.05)
                fresh, sent = self.views[sent:], len(self.views)
            yield from map(whole, fresh)

    Join = Heartbeat = Report = Ready = Refuse = CheckpointDurable = MemberExited = Suspect = _next
    Finish = Fail = Status = AskCheckpoint = ChangeLogServers = Measure = Measurements = _next
    Differs = Rehearsed = Jobs = Stop = Share = Meet = Revoke = Vote = _next


class Served:
    """A scripted server on one port, which can go away and come back."""

    def __init__(self) -> None:
        self.scripted = Scripted()
        self.port = free_port()
        self.start()

    def start(self) -> None:
        self.server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_CoordinatorServicer_to_server(self.scripted, self.server)  # type: ignore[arg-type]
        assert self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.server.start()

    def stop(self) -> None:
        self.server.stop(grace=0).wait()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.stop()


@pytest.fixture
def client(served: Served) -> Iterator[CoordinatorClient]:
    with CoordinatorClient(served.address, "j", patience_s=5.0) as client:
        client.member = make_member(2)
        yield client


def view(generation: int, revision: int, state: "pb.State.ValueType" = pb.RUNNING) -> pb.View:
    return pb.View(job="j", generation=generation, revision=revision, state=state)


def test_a_limit_of_the_coordinator_does_not_end_a_job_that_runs(
    client: CoordinatorClient, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More calls a second than it takes, say: it is asked again. Whoever is not in the job yet soon hears why."""
    limit = grpc.StatusCode.RESOURCE_EXHAUSTED
    monkeypatch.setattr("swift_ft.coordinator_client.LIMIT_PAUSE_S", 0.01)
    monkeypatch.setattr("swift_ft.coordinator_client.LIMIT_PATIENCE_S", 0.05)
    served.scripted.script = [*[limit] * 20, pb.Ack()]
    client.call(pb.ReadyRequest(generation=3, version=7))
    assert len(served.scripted.requests) == 21
    client.member = None
    served.scripted.script = [limit]
    with pytest.raises(ServiceError, match="RESOURCE_EXHAUSTED: scripted"):
        client.status()


def test_a_launcher_that_waits_for_a_place_waits_for_a_newer_token_too(served: Served) -> None:
    """Whoever was never answered, or may not make a call, hears it at once."""
    expired, denied = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
    with CoordinatorClient(served.address, "j", patience_s=5.0) as client:
        served.scripted.script = [expired, pb.MeetReply(here=1)]
        with pytest.raises(AccessDenied):
            client.call(pb.MeetRequest())
        served.scripted.script = [pb.MeetReply(here=1), expired, expired, pb.MeetReply(here=2), denied]
        assert [client.call(pb.MeetRequest()).here for _ in range(2)] == [1, 2]
        with pytest.raises(AccessDenied):
            client.call(pb.ChangeLogServersRequest())


def test_calls_carry_what_they_say(client: CoordinatorClient, served: Served) -> None:
    assert client.member is not None
    me: dict[str, Any] = {"job": "j", "rank": 2, "incarnation": client.member.incarnation}
    client.call(pb.ReportRequest(generation=3, undo_to=0, undo_exact=True))
    client.call(pb.ReadyRequest(generation=3, version=7, stages=[1, 4], num_stages=8))
    client.call(pb.FailRequest(reason="no memory"))
    client.call(pb.ExitRequest(rank=3, pid=77, exit_code=-9))
    assert served.scripted.requests == [
        pb.ReportRequest(**me, generation=3, undo_to=0, undo_exact=True),
        pb.ReadyRequest(**me, generation=3, version=7, stages=[1, 4], num_stages=8),
        pb.FailRequest(**me, reason="no memory"),
        pb.ExitRequest(job="j", rank=3, pid=77, exit_code=-9),
    ]
    served.scripted.script = [pb.HeartbeatReply(generation=3, interval_s=0.5)]
    assert client.call(pb.HeartbeatRequest(version=7)).interval_s == 0.5
    served.scripted.script = [pb.StatusReply(view=view(3, 1))]
    assert client.status().view.generation == 3


def test_a_launcher_speaks_for_no_rank(served: Served) -> None:
    with CoordinatorClient(served.address, "j") as launcher:
        launcher.call(pb.FailRequest(rank=-1, reason="no replacement left"))
        assert served.scripted.requests == [pb.FailRequest(job="j", rank=-1, reason="no replacement left")]
        with pytest.raises(UsageError, match="join the job"):
            launcher.call(pb.HeartbeatRequest())


@pytest.mark.parametrize(
    "code",
    # The last one: it stopped in the middle of the call.
    [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED],
)
def test_a_restarting_coordinator_is_waited_for(
    client: CoordinatorClient, served: Served, code: grpc.StatusCode
) -> None:
    served.scripted.script = [code, code, code, pb.Ack()]
    client.call(pb.FinishRequest(version=3))
    assert len(served.scripted.requests) == 4


def test_a_coordinator_that_comes_back_on_its_port_is_found_at_once(
    client: CoordinatorClient, served: Served
) -> None:
    client.call(pb.FinishRequest(version=3))
    served.stop()
    there: list[float] = []

    def come_back() -> None:
        there.append(time.monotonic())
        served.start()
        there.append(time.monotonic())

    back = threading.Timer(0.7, come_back)
    back.start()
    client.call(pb.FinishRequest(version=3))
    answered = time.monotonic()
    back.join()
    assert there[0] < answered < there[1] + 2.0


def test_of_several_coordinators_the_one_that_serves_is_found(served: Served) -> None:
    """Those that stand by say so; a watcher moves on with the calls, as soon as one of them is not answered."""
    other = Served()
    served.scripted.script = [grpc.StatusCode.UNAVAILABLE]
    try:
        with CoordinatorClient(f"{served.address},{other.address}", "j", patience_s=10.0) as client:
            client.member = make_member(2)
            watcher = client.watch()
            served.scripted.show(view(1, 1))
            watcher.wait_for(lambda v: v.generation == 1, 5)
            client.call(pb.FinishRequest(version=3))
            assert (len(served.scripted.requests), len(other.scripted.requests)) == (1, 1)
            other.scripted.show(view(2, 1))
            watcher.wait_for(lambda v: v.generation == 2, 5)
            other.stop()
            served.scripted.script = [pb.Ack()]
            client.call(pb.FinishRequest(version=4))
            assert len(served.scripted.requests) == 2
            served.scripted.show(view(3, 1))
            watcher.wait_for(lambda v: v.generation == 3, 5)
    finally:
        other.stop()


def test_a_channel_to_several_coordinators_is_closed_while_calls_are_under_way(served: Served) -> None:
    channel = open_channel(f"{served.address},127.0.0.1:{free_port()}")
    stub = pb_grpc.CoordinatorStub(channel)
    streams = [stub.Watch(pb.WatchRequest(job="j")) for _ in range(4)]
    closing = threading.Thread(target=channel.close, daemon=True)
    closing.start()
    closing.join(10.0)
    assert not closing.is_alive()
    assert {stream.code() for stream in streams} == {grpc.StatusCode.CANCELLED}


@pytest.mark.parametrize("asks", ["a call", "a watcher"])
def test_a_coordinator_that_does_not_answer_is_told_at_once_and_once(served: Served, asks: str) -> None:
    """Long before the patience ends; and that it answers again."""
    told: list[str] = []
    news = threading.Event()

    def tell(line: str) -> None:
        told.append(line)
        news.set()

    served.stop()
    served.scripted.show(view(1, 1))
    with CoordinatorClient(served.address, "j", patience_s=60.0, tell=tell) as client:
        if asks == "a watcher":
            watcher = client.watch()
            waits = threading.Thread(target=watcher.wait_for, args=(lambda view: True, 60.0))
        else:
            waits = threading.Thread(target=client.call, args=(pb.ExitRequest(rank=2),))
        waits.start()
        assert news.wait(30.0)
        served.start()
        waits.join(30.0)
        away, again = told
    assert re.match(
        rf"the coordinator at {served.address} does not answer \(Connection refused.*trying", away
    )
    assert again == f"the coordinator at {served.address} answers again"


def test_patience_ends_with_the_address(served: Served) -> None:
    served.stop()
    with CoordinatorClient(served.address, "j", patience_s=0.3) as client:
        with pytest.raises(ServiceError, match=f"coordinator at {served.address} within 0.3 s: .*refused"):
            client.status()


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, Fenced, "^scripted FAILED_PRECONDITION$"),
        (grpc.StatusCode.INVALID_ARGUMENT, UsageError, "^scripted INVALID_ARGUMENT$"),
        (
            grpc.StatusCode.NOT_FOUND,
            UnknownJob,
            "^the coordinator at 127.0.0.1:[0-9]+ does not know job j any more: .* start it on the job's own, and then",
        ),
        (
            grpc.StatusCode.UNIMPLEMENTED,
            UsageError,
            "^at 127.0.0.1:[0-9]+ is another service, not a coordinator$",
        ),
        (grpc.StatusCode.INTERNAL, ServiceError, "INTERNAL: scripted"),
    ],
)
def test_refusals_have_their_error(
    client: CoordinatorClient, served: Served, code: grpc.StatusCode, error: type[Exception], words: str
) -> None:
    served.scripted.script = [code]
    with pytest.raises(error, match=words) as caught:
        client.call(pb.FinishRequest(version=3))
    assert type(caught.value) is error
    assert len(served.scripted.requests) == 1


def test_whoever_only_asks_for_a_job_hears_which_there_are(served: Served) -> None:
    served.scripted.script = [grpc.StatusCode.NOT_FOUND]
    with CoordinatorClient(served.address, "j") as client:
        with pytest.raises(UnknownJob, match="scripted NOT_FOUND: swift-ft jobs lists those that there are"):
            client.status()


class TestJoin:
    def join(self, client: CoordinatorClient, takeover_s: float = 10.0) -> int:
        request = pb.JoinRequest(
            member=make_member(1), world_size=4, config={"seed": "7"}, fingerprint={"torch": "2.13.0"}
        )
        return client.join(request, takeover_s=takeover_s)

    def test_the_generation_comes_back_and_the_member_is_known(
        self, client: CoordinatorClient, served: Served
    ) -> None:
        served.scripted.script = [pb.JoinReply(generation=1)]
        assert self.join(client) == 1
        request = served.scripted.requests[0]
        assert isinstance(request, pb.JoinRequest)
        assert client.member == request.member
        assert dict(request.config) == {"seed": "7"}

    def test_another_fingerprint_is_refused_at_once(self, client: CoordinatorClient, served: Served) -> None:
        served.scripted.script = [grpc.StatusCode.FAILED_PRECONDITION]
        with pytest.raises(JoinRefused, match="scripted"):
            self.join(client)

    def test_a_predecessor_that_is_about_to_be_known_dead_is_waited_for(
        self, client: CoordinatorClient, served: Served
    ) -> None:
        taken = grpc.StatusCode.ALREADY_EXISTS
        served.scripted.script = [taken, taken, pb.JoinReply(generation=2)]
        assert self.join(client) == 2

    def test_a_live_holder_is_respected(self, client: CoordinatorClient, served: Served) -> None:
        served.scripted.script = [grpc.StatusCode.ALREADY_EXISTS]
        with pytest.raises(JoinRefused, match="scripted") as caught:
            self.join(client, takeover_s=0.2)
        assert type(caught.value) is JoinRefused


def test_close_ends_a_call_that_waits(served: Served) -> None:
    served.stop()
    client = CoordinatorClient(served.address, "j", patience_s=60.0)
    threading.Timer(0.2, client.close).start()
    began = time.monotonic()
    with pytest.raises(ServiceError, match="was closed"):
        client.status()
    assert time.monotonic() - began < 30.0
    with pytest.raises(ServiceError, match="was closed"):
        client.status()


class TestWatcher:
    def test_callbacks_get_every_newer_view_in_order(self, client: CoordinatorClient, served: Served) -> None:
        seen: list[tuple[int, int]] = []

        def remember(view: pb.View) -> None:
            assert threading.current_thread().name == "view-watcher-j"
            seen.append((view.generation, view.revision))

        watcher = client.watch(remember)
        for shown in (view(1, 1), view(1, 4), view(1, 3), view(2, 2), view(1, 9), view(2, 2), view(2, 7)):
            served.scripted.show(shown)
        assert watcher.wait_for(lambda v: v.revision == 7, 5).generation == 2
        assert watcher.latest == view(2, 7)
        late: list[pb.View] = []
        watcher.subscribe(late.append)
        served.scripted.show(view(3, 1))
        watcher.wait_for(lambda _: bool(late), 5)
        assert seen == [(1, 1), (1, 4), (2, 2), (2, 7), (3, 1)]
        assert late == [view(3, 1)]

    def test_it_reconnects_and_takes_old_news_for_no_news(
        self, client: CoordinatorClient, served: Served
    ) -> None:
        seen: list[pb.View] = []
        watcher = client.watch(seen.append)
        served.scripted.show(view(4, 1))
        watcher.wait_for(lambda v: v.generation == 4, 5)
        for generation in (5, 6):
            served.stop()
            served.scripted.views = [view(4, 1), view(generation, 1)]
            served.start()
            watcher.wait_for(lambda v, wanted=generation: v.generation == wanted, 5)  # type: ignore[misc]
        assert [v.generation for v in seen] == [4, 5, 6]

    def test_wait_for_names_what_it_waits_for(self, client: CoordinatorClient, served: Served) -> None:
        watcher = client.watch()
        with pytest.raises(ServiceError, match=r"waited 0\.1 s for job j: no view of it"):
            watcher.wait_for(lambda _: True, 0.1)
        waiting = view(2, 1, pb.PLANNING)
        waiting.waiting_for = "rank 1 to join"
        served.scripted.show(waiting)
        watcher.wait_for(lambda _: True, 5)
        with pytest.raises(ServiceError, match="PLANNING in generation 2, waiting for rank 1 to join"):
            watcher.wait_for(lambda v: v.state == pb.RUNNING, 0.1)

    def test_close_frees_who_waits(self, client: CoordinatorClient, served: Served) -> None:
        watcher = client.watch()
        threading.Timer(0.2, watcher.close).start()
        with pytest.raises(ServiceError, match="the watcher of job j was closed"):
            watcher.wait_for(lambda _: False, None)

    def test_a_callback_may_close_the_client(self, client: CoordinatorClient, served: Served) -> None:
        closed = threading.Event()

        def close(_view: pb.View) -> None:
            client.close()
            closed.set()

        client.watch(close)
        served.scripted.show(view(1, 1))
        assert closed.wait(5)

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_callback_that_fails_is_not_silent(self, client: CoordinatorClient, served: Served) -> None:
        def fail(_view: pb.View) -> None:
            raise RuntimeError("a bug of the callback")

        watcher = client.watch(fail)
        served.scripted.show(view(1, 1))
        with pytest.raises(ServiceError, match="a callback of the watcher of job j failed"):
            watcher.wait_for(lambda v: v.revision == 2, 5)


def test_views_are_ordered_by_generation_then_revision() -> None:
    assert newer(view(1, 1), None)
    ordered: list[Callable[[], pb.View]] = [lambda: view(1, 9), lambda: view(2, 1), lambda: view(2, 2)]
    for older, younger in itertools.pairwise(ordered):
        assert newer(younger(), older())
        assert not newer(older(), younger())
        assert not newer(older(), older())


def test_a_vote_that_is_not_waited_for_arrives(served: Served, client: CoordinatorClient) -> None:
    """grpc cancels a call that nobody holds: every decision then took the time until the vote was said again."""
    client.call(pb.VoteRequest(generation=1, kind=pb.AGREE, value=5), waits=False)
    eventually(lambda: any(isinstance(request, pb.VoteRequest) for request in served.scripted.requests))
