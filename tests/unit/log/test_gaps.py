"""What a dead writer has not got out: told from the log's own copies and from what a replica has logged."""

import random
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import LogUnavailable, RecordCorrupt
from swift_ft.log.record import RecordKey, Steps, collectives, hull, mark
from swift_ft.train.participants import Copied
from swift_ft.train.replay import OwnStreams, Servers, gaps

STEPS = Steps(10, 14)


def keys(steps: Iterable[int], microbatches: int = 2) -> list[RecordKey]:
    return [RecordKey(step, m, 0) for step in steps for m in range(microbatches)]


WHOLE = keys(range(10, 16))


def lacking(*copies: Sequence[RecordKey], alike: Sequence[RecordKey] = WHOLE) -> Steps | None:
    """What one stream lacks; its neighbour ``b`` is whole."""
    own = {"a": copies, "b": [WHOLE]}
    found = gaps(own, lambda: {"a": alike, "b": WHOLE}, STEPS)
    assert "b" not in found
    return found.get("a")


def test_what_is_declared_is_not_declared_again() -> None:
    held = [*keys([10]), mark(Steps(11, 12)), *keys([13])]
    assert lacking(held) == Steps(14, 14)
    assert lacking([*keys([10]), mark(Steps(11, 14))]) is None
    assert lacking([*keys([10, 11]), mark(Steps(11, 12))]) == Steps(13, 14)


def test_every_copy_must_have_it_but_one_that_has_only_come() -> None:
    assert lacking(keys(range(10, 15)), keys(range(10, 14))) == Steps(14, 14)
    assert lacking(keys(range(10, 15)), []) is None
    assert lacking([], []) == STEPS


def test_a_mark_that_one_copy_has_is_not_written_again_for_another() -> None:
    """A key is taken once: the new mark is another one, that says as much."""
    marked, cut_off = [*keys(range(10, 13)), mark(Steps(13, 14))], keys(range(10, 13))
    assert lacking(marked, cut_off) == Steps(12, 14)
    assert gaps({"a": [[mark(Steps(0, 4))], keys([0])[:1]]}, lambda: {"a": keys(range(6))}, Steps(0, 4)) == {}


def test_a_stream_that_is_never_written_lacks_nothing() -> None:
    assert lacking([], alike=[]) is None
    assert gaps({"a": [[]], "b": [[]]}, lambda: {"a": [], "b": []}, STEPS) == {}, (
        "nor does a trainer that logs nothing"
    )


@pytest.mark.parametrize(
    "alike",
    [
        {},
        {"a": []},
        {"a": keys(range(13, 16))},
        {"a": [*keys(range(10, 14)), mark(Steps(13, 14)), *keys([15])]},
    ],
)
def test_without_a_witness_the_last_step_counts_as_missing(alike: dict[str, list[RecordKey]]) -> None:
    whole_to_13 = keys(range(10, 14))
    found = gaps({"a": [whole_to_13]}, lambda: alike, STEPS)
    assert found["a"] == Steps(13, 14)
    assert gaps({"a": [WHOLE]}, lambda: alike, STEPS) == {}, "a later step is there"


def test_a_stream_of_the_replica_that_cannot_be_read_tells_nothing() -> None:
    whole = keys(range(10, 15))
    assert gaps({"a": [whole], "b": [WHOLE]}, lambda: {"b": WHOLE}, STEPS) == {"a": Steps(14, 14)}


def test_a_replica_is_asked_only_if_that_is_needed() -> None:
    def alike() -> dict[str, list[RecordKey]]:
        raise AssertionError("nothing is missing")

    assert gaps({"a": [WHOLE], "b": [WHOLE]}, alike, STEPS) == {}


class Logs:
    """Three servers' records: rank 0 has been copied and has none, and rank 2 can tell."""

    def __init__(self, first: Sequence[RecordKey] | Exception) -> None:
        self._held = {"a": [], "b": first, "c": WHOLE}
        self.asked: list[str] = []

    def digests(self, server: str, stream: str, from_step: int) -> dict[RecordKey, bytes]:
        self.asked.append(server)
        held = self._held[server]
        if isinstance(held, Exception):
            raise held
        return dict.fromkeys(held, b"")


@pytest.mark.parametrize(
    "first",
    [LogUnavailable("no answer"), RecordCorrupt("damaged"), [], [mark(Steps(10, 14))], WHOLE],
    ids=["no answer", "damaged", "no records", "marks alone", "records"],
)
def test_replicas_are_asked_one_after_the_other_until_one_has_records(first: Any) -> None:
    copies = [pb.LogCopies(rank=rank, servers=[server]) for rank, server in enumerate("abc")]
    member, writer, logs = mock.Mock(), mock.Mock(), Logs(first)
    member.watcher.latest = pb.View(log_copies=copies, checkpoints=[STEPS.first])
    site: Any = SimpleNamespace(rank=0, member=member, state=SimpleNamespace(stages=[]))
    copied = Copied(STEPS.last + 1, witnesses=(1, 2))
    OwnStreams(site).declare_gaps(cast(Servers, logs), writer, ["a"], copied)
    writer.unlogged.lacks.assert_called_once_with(collectives(0), STEPS)
    assert logs.asked == (["a", "b"] if first is WHOLE else ["a", "b", "c"])


@pytest.mark.parametrize("more", [0, 1])
def test_a_replica_that_has_not_logged_so_far_cannot_tell(more: int) -> None:
    """What it has not got out, a rank that died beside it may not have got out either."""
    own = keys(range(10, 14))[: 6 + more]
    assert gaps({"a": [own]}, lambda: {"a": keys(range(10, 13))}, STEPS) == {"a": Steps(13, 14)}


@pytest.mark.parametrize("later", [keys(range(14, 16)), []])
def test_where_a_stream_of_a_replica_begins_says_nothing_of_another(later: list[RecordKey]) -> None:
    """It has moved to other servers, and has sent them of each stream what it still had."""
    own = {"F": [WHOLE], "B": [keys(range(10, 13))]}
    found = gaps(own, lambda: {"F": keys(range(11, 16)), "B": later}, Steps(10, 13))
    assert found == {"B": Steps(12, 13)}


class Counted(list[RecordKey]):
    passes = 0

    def __iter__(self) -> Iterator[RecordKey]:
        self.passes += 1
        return super().__iter__()


def test_keys_are_gone_through_once_and_not_for_each_step() -> None:
    own, alike = Counted(keys([0])), Counted(keys(range(200)))
    assert gaps({"a": [own]}, lambda: {"a": alike}, Steps(0, 199)) == {"a": Steps(1, 199)}
    assert max(own.passes, alike.passes) < 5


@pytest.mark.parametrize("seed", range(300))
def test_a_rank_that_is_cut_off_anywhere_declares_what_it_lacks_and_no_more(seed: int) -> None:
    """Several streams, some sparse, written in one order; a random part of the end is gone."""
    chance = random.Random(seed)
    shape = {f"s{n}": chance.choice((0, 1, 1, 3)) for n in range(4)}
    shape["s0"] = max(1, shape["s0"])
    written = [
        (name, RecordKey(step, m, 0))
        for step in range(10, 16)
        for name, microbatches in shape.items()
        for m in range(microbatches)
    ]
    until = chance.randint(0, len(written))
    own = {name: [key for at, key in written[:until] if at == name] for name in shape}
    alike = {name: [key for at, key in written if at == name] for name in shape}
    found = gaps({name: [held] for name, held in own.items()}, lambda: alike, STEPS)
    for name in shape:
        missing = [k.step for k in alike[name] if k not in own[name] and k.step <= STEPS.last]
        assert found.get(name) == (Steps(min(missing), STEPS.last) if missing else None)
        if missing:
            own[name].append(mark(found[name]))
    again = gaps({name: [held] for name, held in own.items()}, lambda: alike, STEPS)
    assert again == {}
    assert all(hull(own[name]) == steps for name, steps in found.items())
