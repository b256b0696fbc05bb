"""Launchers of several machines that restart the ranks of a script without a session together."""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import TCPStore

from swift_ft.launch import together
from swift_ft.launch.ranks import MachinePlace
from swift_ft.launch.rendezvous import LOOPBACK, open_store
from swift_ft.launch.together import Together

WAIT_S = 20.0


class Machines:
    """Two machines, and their first store."""

    def __init__(self) -> None:
        listener = socket.create_server((LOOPBACK, 0))
        self.port = listener.getsockname()[1]
        self.store = open_store(LOOPBACK, self.port, listener=listener.detach())
        self.news = threading.Event()
        self.there: list[Together] = []

    def begin(self, number: int) -> Together:
        place = MachinePlace(number=number, ranks_of=[1, 1], master_addr=LOOPBACK, master_port=self.port)
        self.there.append(Together(place, 60.0, self.news.set))
        return self.there[-1]

    def until(self, look: Callable[[], object]) -> None:
        while not look():
            assert self.news.wait(WAIT_S)
            self.news.clear()


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setattr(together, "LOOK_S", 0.01)
    monkeypatch.setattr(together, "TAKE_OVER_S", 0.01)
    world = Machines()
    yield world
    for launcher in world.there:
        launcher.close()
    for launcher in world.there:
        launcher._thread.join(WAIT_S)


def test_two_failures_at_once_are_one_round_and_nobody_begins_before_all_have_stopped(
    machines: Machines,
) -> None:
    first, second = machines.begin(0), machines.begin(1)
    first.ask(1, "rank 0 failed")
    second.ask(1, "rank 1 failed")
    machines.until(lambda: first.round == second.round == 1)
    assert first.reason == second.reason
    assert first.reason in ("rank 0 failed", "rank 1 failed")
    turns, look = [], first._poll
    first._poll = lambda store: (look(store), turns.append(1), machines.news.set())  # type: ignore[method-assign]
    first.stopped(1)
    machines.until(lambda: len(turns) > 2)
    assert not machines.store.check(["swift/port/1"]), "the second machine has not stopped"
    second.ask(2, "it has failed again")
    machines.until(lambda: first.round == second.round == 2)
    first.stopped(2)
    second.stopped(2)
    machines.until(lambda: first.store_port and second.store_port)
    assert first.store_port == second.store_port
    assert first.store_port is not None
    number, port = first.store_port
    assert number == 2
    assert port != machines.port
    TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False).set("key", "of a rank")


def test_a_machine_that_takes_a_lost_ones_place_makes_all_begin_again(machines: Machines) -> None:
    first, lost = machines.begin(0), machines.begin(1)
    first.ask(1, "rank 1 failed")
    machines.until(lambda: first.round == lost.round == 1)
    first.stopped(1)
    lost.stopped(1)
    machines.until(lambda: first.store_port and lost.store_port)
    lost.close()
    another = machines.begin(1)
    machines.until(lambda: first.round == another.round == 2)
    assert first.reason == "a machine was lost, and another one has its place"


def test_one_that_comes_while_the_others_wait_for_its_place_joins_them(machines: Machines) -> None:
    first, lost = machines.begin(0), machines.begin(1)
    lost.ask(0, "")  # its thread has begun once that is there
    machines.store.wait(["swift/round/0", "swift/began/0/0"])
    lost.close()
    first.ask(1, "rank 0 has lost its peer")
    machines.until(lambda: first.round == 1)
    first.stopped(1)
    another = machines.begin(1)
    machines.until(lambda: another.round == 1)
    another.stopped(1)
    machines.until(lambda: first.store_port and another.store_port)
    assert first.store_port == another.store_port
    assert first.round == 1


def test_they_leave_together(machines: Machines) -> None:
    first, second = machines.begin(0), machines.begin(1)
    first.ended(0)
    second.ask(1, "rank 1 failed")
    machines.until(lambda: first.round == second.round == 1)
    assert not first.all_ended
    for launcher in (first, second):
        launcher.ended(1)
    machines.until(lambda: first.all_ended and second.all_ended)
    second.fail("too late")
    machines.until(lambda: first.failed == "too late")


def test_ranks_that_end_well_after_the_first_machine_is_lost_can_leave(machines: Machines) -> None:
    second = machines.begin(1)
    machines.store.wait(["swift/began/0/1"])
    del machines.store
    machines.until(lambda: second.lost)
    assert not second.all_ended
    second.ended(0)
    assert second.all_ended
