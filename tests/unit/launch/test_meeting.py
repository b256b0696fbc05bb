"""A launcher among others: what it makes of the coordinator's answers."""

import threading
from collections.abc import Iterator

import pytest

from swift_ft import coordinator_client as client
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import AccessDenied, ServiceError, SwiftError, UsageError
from swift_ft.launch.ranks import RankProgram
from swift_ft.launch.rendezvous import MetRendezvous, NotNeeded, Terms
from tests.patience import eventually

MACHINES = [
    pb.Machine(address="a01", port=7, ranks=2),
    pb.Machine(address="a02", port=8, ranks=3),
]
PLACED = pb.MeetReply(place=1, machines=MACHINES, here=2)
JOB = RankProgram(
    script="s", module=False, args=[], cwd="/", coordinator="meta:1", name="j", checkpoint_dir=None, run="r"
)


class Coordinator:
    """Gives its answers in turn; the last one stays."""

    def __init__(self, *answers: pb.MeetReply | SwiftError) -> None:
        self.answers = list(answers)
        self.requests: list[pb.MeetRequest] = []

    def __call__(self, address: str, job: str) -> "Coordinator":
        assert (address, job) == ("meta:1", "j")
        return self

    def __enter__(self) -> "Coordinator":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def call(self, request: pb.MeetRequest) -> pb.MeetReply:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, SwiftError):
            raise answer
        return answer


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.said: list[str] = []
        self.woken = threading.Event()
        self.launchers: list[MetRendezvous] = []

    def __call__(self, *answers: pb.MeetReply | SwiftError, terms: Terms | None = None) -> MetRendezvous:
        self.coordinator = Coordinator(*answers)
        self._monkeypatch.setattr(client, "CoordinatorClient", self.coordinator)
        terms = terms or Terms(keep_alive_interval=0.01)
        wishes = {"nodes": (2, 2), "ranks": 3, "address": "a02"}
        self.launchers.append(
            MetRendezvous(JOB, terms=terms, wake=self.woken.set, say=self.said.append, **wishes)  # type: ignore[arg-type]
        )
        return self.launchers[-1]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch)
    yield world
    for one in world.launchers:
        one.leave()
        assert world.coordinator.requests[-1].leaves


def test_it_waits_for_the_others_and_says_again_what_it_holds(launcher: World) -> None:
    met = launcher(pb.MeetReply(here=1), ServiceError("away"), PLACED)
    info = met.next_rendezvous()
    assert (info.number, info.ranks_of) == (1, [2, 3])
    assert (info.master_addr, info.master_port) == ("a01", 7)
    assert launcher.said == ["1 of 2 machines are here: waiting for the others"]
    first = launcher.coordinator.requests[0]
    assert (first.machine.ranks, first.machine.address, first.HasField("held")) == (3, "a02", False)
    eventually(lambda: launcher.coordinator.requests[-1].held == PLACED)
    assert met.lost == ""


def test_one_that_has_lost_its_place_wakes_the_loop(launcher: World) -> None:
    met = launcher(PLACED, ServiceError("away"), UsageError("no"), pb.MeetReply(over="silent", here=2))
    met.next_rendezvous()
    assert launcher.woken.wait(20.0)
    assert met.lost == "silent"


@pytest.mark.parametrize("error", [UsageError("--nnodes"), AccessDenied("token")])
def test_what_the_coordinator_refuses_at_the_start_ends_it(error: SwiftError, launcher: World) -> None:
    with pytest.raises(type(error), match=str(error)):
        launcher(error).next_rendezvous()


def test_a_line_that_cannot_be_made_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, job: str) -> Coordinator:
        raise UsageError(f"{address} is not loopback")

    monkeypatch.setattr(client, "CoordinatorClient", refuse)
    terms = Terms(join_timeout=5.0)
    met = MetRendezvous(JOB, nodes=(2, 2), ranks=3, address="a02", terms=terms, wake=lambda: None, say=print)
    try:
        with pytest.raises(UsageError, match=r"^meta:1 is not loopback$"):
            met.next_rendezvous()
    finally:
        met.leave()


def test_too_few_are_waited_for_until_the_time_is_over(launcher: World) -> None:
    met = launcher(pb.MeetReply(here=1), terms=Terms(join_timeout=0.3))
    with pytest.raises(ServiceError, match=r"^run: 1 of 2 machines were here after"):
        met.next_rendezvous()


def test_a_machine_too_many_waits_as_long_as_the_job_takes(launcher: World) -> None:
    waiting = 5 * [pb.MeetReply(here=3)]
    met = launcher(*waiting, pb.MeetReply(here=3, over="the job is over"), terms=Terms(join_timeout=0.01))
    with pytest.raises(NotNeeded, match="the job is over"):
        met.next_rendezvous()
    assert launcher.said == ["3 machines are here: waiting for a place"]


def test_the_first_machine_has_a_store_for_trainers_that_want_one(launcher: World) -> None:
    launcher(
        pb.MeetReply(here=1),
        pb.MeetReply(place=0, machines=MACHINES),
        terms=Terms(),
    )
    info = launcher.launchers[0].next_rendezvous()
    assert info.number == 0
    port = launcher.coordinator.requests[0].machine.port
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", port, is_master=False)
    store.set("key", "value")
    assert store.get("key") == b"value"
