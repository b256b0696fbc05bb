"""What the ranks of a generation share: changes, what is new to whom, limits, and the end of it."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft_services.coordinator import driver as sharing_module
from swift_ft_services.coordinator.commands import Fenced, Invalid, Refusal
from swift_ft_services.coordinator.driver import Driver, NoSuchJob, Sharing
from swift_ft_services.coordinator.service import Context, Servicer
from tests.memory_store import MemoryStore
from tests.unit.coordinator.driver_world import DEATH, PATIENCE_S, FakeLogs, driver_of, join, sender, until


def put(key: str, value: bytes) -> pb.SharedChange:
    return pb.SharedChange(key=key, set=value)


def swap(key: str, expected: bytes, desired: bytes) -> pb.SharedChange:
    return pb.SharedChange(key=key, swap=pb.SharedSwap(expected=expected, desired=desired))


def shown(shared: list[pb.Shared]) -> dict[str, bytes | None]:
    return {one.key: one.value if one.HasField("value") else None for one in shared}


def test_what_is_new_is_what_has_changed_since() -> None:
    sharing = Sharing(1, 2)
    sharing.change("a", 1, [put("x", b"1"), put("y", b"2")])
    found, seen, more = sharing.news(0)
    assert (shown(found), more) == ({"x": b"1", "y": b"2"}, False)
    sharing.change("b", 1, [put("y", b"2")])  # as it is already
    assert sharing.news(seen) == ([], seen, False)
    sharing.change("b", 2, [pb.SharedChange(key="x", delete=True), put("z", b"")])
    found, later, _ = sharing.news(seen)
    assert shown(found) == {"x": None, "z": b""}
    assert later > seen
    assert shown(sharing.news(0)[0]) == {"y": b"2", "x": None, "z": b""}


def test_sums_and_swaps_answer_with_what_came_of_them() -> None:
    sharing = Sharing(1, 2)
    add = pb.SharedChange(key="n", add=3)
    assert shown(sharing.change("a", 1, [add])) == {"n": b"3"}
    assert shown(sharing.change("b", 1, [pb.SharedChange(key="n", add=-5)])) == {"n": b"-2"}
    assert [one.value for one in sharing.change("a", 2, [add, add])] == [b"1", b"4"]
    assert shown(sharing.change("a", 3, [swap("s", b"", b"first")])) == {"s": b"first"}
    assert shown(sharing.change("a", 4, [swap("s", b"", b"second")])) == {"s": b"first"}
    assert shown(sharing.change("a", 5, [swap("s", b"first", b"second")])) == {"s": b"second"}
    assert shown(sharing.change("a", 6, [swap("t", b"something", b"else")])) == {"t": None}
    assert "t" not in shown(sharing.news(0)[0])


def test_a_change_whose_answer_was_lost_is_made_once() -> None:
    sharing = Sharing(1, 2)
    add = pb.SharedChange(key="n", add=1)
    first = sharing.change("a", 1, [add])
    sharing.change("b", 1, [add])
    assert sharing.change("a", 1, [add]) == first
    assert shown(sharing.news(0)[0]) == {"n": b"2"}
    sharing.change("a", 2, [add])
    assert sharing.change("a", 1, [add]) == []  # a late one: nobody waits for its answer
    assert shown(sharing.news(0)[0]) == {"n": b"3"}


@pytest.mark.parametrize(
    "change",
    [
        put("", b""),
        pb.SharedChange(key="text", add=1),
        pb.SharedChange(key="large", add=(1 << 63) - 1),
        pb.SharedChange(key="k"),
    ],
)
def test_what_cannot_be_shared_is_refused_and_changes_nothing(change: pb.SharedChange) -> None:
    sharing = Sharing(1, 1)
    sharing.change("a", 1, [put("text", b"x"), pb.SharedChange(key="large", add=1)])
    before = sharing.news(0)
    with pytest.raises(Invalid):
        sharing.change("a", 2, [put("other", b"1"), change])
    assert sharing.news(0) == before


def test_keys_have_a_bound_by_what_they_cost_and_room_is_given_back() -> None:
    sharing = Sharing(1, 1)
    most = sharing_module.BYTES_MAX + sharing_module.BYTES_PER_RANK
    many = most // (sharing_module.ENTRY_BYTES + 5)
    sharing.change("a", 1, [put(f"{n:05}", b"") for n in range(many)])
    with pytest.raises(Refusal, match=f"the 1 ranks of this job share at most {most}"):
        sharing.change("a", 2, [put("one more", b"")])
    sharing.members = 2
    sharing.change("a", 3, [put("one more", b"")])
    sharing.members = 1  # what is there stays, and may become less
    sharing.change("a", 4, [pb.SharedChange(key="one more", delete=True)])
    sharing.begin(2)
    large = bytes(1 << 18)
    fit = most // len(large) - 1
    sharing.change("a", 1, [put(f"k{n}", large) for n in range(fit)])
    with pytest.raises(Refusal, match="share at most"):
        sharing.change("a", 2, [put("one more", large)])
    sharing.change("a", 3, [put("k1", b"")])
    sharing.change("a", 4, [put("one more", large)])
    with pytest.raises(Refusal, match="share at most"):  # what is kept for a lost answer counts as well
        sharing.change("a", 5, [swap("one more", b"?", b"")] * 2)
    sharing.begin(3)
    assert sharing._bytes == 0


def test_what_is_new_is_found_among_many_that_have_changed_again_and_again() -> None:
    sharing = Sharing(1, 1)
    for number in range(1, 5000):
        sharing.change("a", number, [put(f"k{number % 7}", b"%d" % number)])
    found, seen, more = sharing.news(0)
    assert (seen, more, len(found)) == (4999, False, 7)
    assert [one.revision for one in found] == list(range(4993, 5000))
    assert [one.value for one in sharing.news(4997)[0]] == [b"4998", b"4999"]


def test_an_answer_has_a_bound_and_the_rest_comes_next() -> None:
    sharing = Sharing(1, 64)
    for n in range(7):
        sharing.change("a", n + 1, [put(f"k{n}", bytes(1 << 18))])
    found, seen, more = sharing.news(0)
    assert more
    assert sum(one.ByteSize() for one in found) < 2 * sharing_module.NEWS_BYTES_MAX
    keys = list(shown(found))
    while more:
        found, seen, more = sharing.news(seen)
        keys += shown(found)
    assert keys == [f"k{n}" for n in range(7)]
    assert seen == sharing.revision


async def test_each_key_that_is_waited_for_is_looked_at_once_however_often_something_changes() -> None:
    class Counted(Sharing):
        looked = 0

        def _value(self, key: str) -> bytes | None:
            self.looked += 1
            return super()._value(key)

    keys, changes = [f"k{n}" for n in range(500)], 500
    sharing = Counted(1, 1)
    waiting = asyncio.create_task(sharing.wait(keys, PATIENCE_S))
    await asyncio.sleep(0)
    sharing.looked = 0
    for number in range(changes):
        sharing.change("a", number + 1, [put("other", b"%d" % number)])
        await asyncio.sleep(0)
    assert sharing.looked <= 5 * changes
    sharing.change("a", changes + 1, [put(key, b"") for key in keys[:-1]])
    await asyncio.sleep(0)
    sharing.change("a", changes + 2, [pb.SharedChange(key="k0", delete=True), put("k499", b"")])
    await asyncio.sleep(0.01)
    assert not waiting.done(), "one of them is gone again"
    sharing.change("a", changes + 3, [put("k0", b"")])
    async with asyncio.timeout(PATIENCE_S):
        await waiting


# -- through the service ------------------------------------------------------------------------------------


def asked(**fields: Any) -> pb.ShareRequest:
    return pb.ShareRequest(
        **{"job": "j", "rank": 0, "incarnation": "a", "generation": 1, "number": 1} | fields
    )


class Service:
    """Calls as they come from gRPC."""

    def __init__(self, driver: Driver) -> None:
        self._servicer = Servicer(driver)

    async def __call__(self, **fields: Any) -> pb.ShareReply:
        async with asyncio.timeout(PATIENCE_S):
            return await self._servicer.Share(asked(**fields), cast("Context", None))


def shared_by(driver: Driver) -> Callable[[], set[str]]:
    return lambda: set(driver._sharing)


async def test_who_waits_for_a_key_is_answered_when_it_is_there(driver: Driver) -> None:
    share = Service(driver)
    waiting = asyncio.create_task(share(until=["x", "y"], wait_s=60.0))
    await until(lambda: shared_by(driver)() and driver._sharing["j"]._waiting)
    await share(changes=[put("x", b"1")])
    await asyncio.sleep(0)
    assert not waiting.done()
    await share(number=2, changes=[put("y", b"2")])
    reply = await waiting
    assert shown(list(reply.news)) == {"x": b"1", "y": b"2"}
    assert (await share(until=["never"], wait_s=0.01, seen=reply.revision)).news == []
    assert (await share(until=["never"], wait_s=float("nan"), seen=reply.revision)).news == []
    assert not driver._sharing["j"]._waiting


async def test_a_newer_generation_ends_waits_and_forgets_the_keys(driver: Driver) -> None:
    share = Service(driver)
    first = await share(changes=[put("x", b"1")])
    waiting = asyncio.create_task(share(until=["y"], wait_s=60.0))
    await until(lambda: driver._sharing["j"]._waiting)
    await driver.apply("j", pb.SuspectRequest(**sender(), reason="broken", generation=1, again=True))
    reply = await waiting
    assert (reply.generation, reply.epoch) == (2, 0)
    late = await share(changes=[put("z", b"1")])  # of the older one, from the live holder
    assert (late.generation, late.epoch, list(late.news)) == (2, 0, [])
    new = await share(generation=2)
    assert new.epoch == first.epoch
    assert list(new.news) == []


def test_what_is_about_the_job_outlives_generations_and_deleted_keys_are_forgotten() -> None:
    sharing = Sharing(1, 1)
    sharing.change("a", 1, [put("swift/x", b"1"), put("x", b"1")])
    sharing.begin(2)
    assert shown(sharing.news(0)[0]) == {"swift/x": b"1"}
    sharing.change("a", 1, [put("swift/x", b"2")])  # numbers are of a generation
    for number in range(2, 4 * sharing_module.DELETED_MAX, 2):
        sharing.change("a", number, [put(f"swift/{number}", b"")])
        sharing.change("a", number + 1, [pb.SharedChange(key=f"swift/{number}", delete=True)])
    found = sharing.news(0)[0]
    assert len(found) == sharing_module.DELETED_MAX + 1
    assert {key for key, value in shown(found).items() if value is not None} == {"swift/x"}


async def test_only_the_holder_of_a_rank_shares(driver: Driver) -> None:
    for changes in ([], [put("x", b"")]):
        with pytest.raises(Fenced):
            driver.sharing("j", pb.ShareRequest(**sender("b"), generation=1, changes=changes))
        with pytest.raises(Refusal, match="not there yet"):
            driver.sharing("j", pb.ShareRequest(**sender(), generation=2, changes=changes))
        with pytest.raises(NoSuchJob):
            driver.sharing("other", pb.ShareRequest(**sender(), generation=1, changes=changes))
    assert not driver._sharing


async def test_who_is_no_member_asks_and_changes_nothing(driver: Driver) -> None:
    share = Service(driver)
    await share(number=1, changes=[put("swift/shapes", b"[2]"), put("built-0", b"")])

    reply = await share(incarnation="")
    assert shown(list(reply.news)) == {"swift/shapes": b"[2]", "built-0": b""}
    with pytest.raises(Fenced):
        driver.sharing("j", pb.ShareRequest(generation=1, changes=[put("x", b"")]))
    for other in (0, 2):  # a coordinator's first question must not make keys of another generation
        assert driver.sharing("j", pb.ShareRequest(generation=other)) is None


async def test_whoever_is_fenced_while_it_waits_learns_that_it_is_over(driver: Driver) -> None:
    share = Service(driver)
    waiting = asyncio.create_task(share(until=["y"], wait_s=60.0))
    await until(lambda: "j" in driver._sharing and driver._sharing["j"]._waiting)
    await driver.apply("j", DEATH)
    assert (await waiting).epoch == 0
    await driver.join("j", join(incarnation="b"))
    assert (await share(incarnation="b", generation=2)).generation == 2


async def test_a_job_that_is_over_shares_nothing(driver: Driver) -> None:
    share = Service(driver)
    await share(changes=[put("x", b"1")])
    await driver.apply("j", pb.FailRequest(**sender(), reason="because"))
    assert not driver._sharing
    assert (await share()).epoch == 0
    assert not driver._sharing


async def test_a_coordinator_that_begins_anew_is_noticed(
    driver: Driver, logs: FakeLogs, store: MemoryStore
) -> None:
    first = await Service(driver)(changes=[put("x", b"1")])
    waiting = asyncio.create_task(Service(driver)(until=["y"], wait_s=60.0))
    await until(lambda: driver._sharing["j"]._waiting)
    driver.stop()
    assert (await waiting).epoch == 0
    driver = await driver_of(logs, store)
    again = await Service(driver)(epoch=first.epoch, number=2, changes=[put("y", b"1")])
    assert again.epoch not in (0, first.epoch)
    assert list(again.news) == []
    assert driver._sharing["j"].revision == 0  # nothing was taken
