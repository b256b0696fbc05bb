"""Checkpoints of one rank: what the coordinator hears of them, and when they are due."""

from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_client import Unanswered
from swift_ft.errors import Fenced, ServiceError, SwiftError, UsageError
from swift_ft.state import checkpoint_store
from swift_ft.state.checkpoint_store import CheckpointStore, Saved, Unsaved
from swift_ft.train.checkpointing import Saving
from swift_ft.train.config import SessionConfig
from tests.unit.checkpoint.holding import Holding
from tests.unit.runtime.wired import Unrecorded, site_of, state_of, updates_of


class Store:
    """Writes at once, or fails."""

    def __init__(self, error: ServiceError | None = None) -> None:
        self.error = error
        self.versions: list[int] = []
        self.saved: Saved | None = None
        self.unsaved: Unsaved | None = None
        self.pruned: list[tuple[set[int], int]] = []

    def save(
        self,
        version: int,
        state: Any,
        on_durable: Callable[[int], bool | None],
        on_failed: Callable[[Unsaved], None],
        generation: int,
        *,
        sync: bool,
        late: Container[int],
    ) -> None:
        self.sync = sync
        if self.error is None:
            self.versions.append(version)
            self.saved = Saved(tensor_bytes=90, file_bytes=100, seconds=0.5, stall_s=0.1)
            self.heard = on_durable(version)
        else:
            self.unsaved = Unsaved(version=version, reason=str(self.error))
            on_failed(self.unsaved)

    def set_aside(self, check_held: Callable[[], None], above: int) -> None:
        check_held()

    def prune(self, keep: set[int], given_up_below: int, marks: Mapping[int, bytes]) -> None:
        self.pruned.append((keep, given_up_below))

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


class Client:
    """A coordinator that is not there for the first `deaf` calls."""

    def __init__(self, deaf: int = 0) -> None:
        self.deaf = deaf
        self.fences: SwiftError | None = None
        self.unanswered = 0
        self.error: SwiftError = ServiceError("nobody answers")
        self.told: list[tuple[int, int]] = []
        self.recorded: list[bool] = []

    def heard(self) -> None:
        if self.unanswered:
            self.unanswered -= 1
            raise Unanswered("nobody answers")
        if self.fences is not None:
            raise self.fences

    @staticmethod
    def said(statement: Callable[[], None]) -> bool:
        try:
            statement()
        except Unanswered:
            return False
        return True

    def call(self, durable: pb.CheckpointRequest, patience_s: float | None = None) -> None:
        self.patience_s = patience_s
        if self.deaf:
            self.deaf -= 1
            raise self.error
        self.told.append((durable.version, durable.generation))
        self.recorded.append(durable.recorded)


def saving(
    store: Store, client: Client, complete: Sequence[int] = (), given_up: int = 0, mode: str = "async"
) -> Saving:
    state = state_of(1, updates_of())
    state.version = 17
    view = pb.View(
        generation=9,
        checkpoints=complete,
        checkpoints_from=given_up,
    )
    member: Any = SimpleNamespace(
        entered=9,
        check_held=client.heard,
        say=client.said,
        check=lambda: None,
        client=client,
        watcher=SimpleNamespace(latest=view, wait_for=lambda _test, _timeout: view),
    )
    kept: Any = store
    recording: Any = Unrecorded()
    return Saving(
        site_of(2, SessionConfig(checkpoint_mode=mode), member=member, state=state, store=kept), recording
    )


def test_training_waits_for_it_if_it_is_to() -> None:
    for mode in ("async", "sync"):
        store = Store()
        saving(store, Client(), mode=mode).save()
        assert store.sync is (mode == "sync")


def test_it_is_of_the_generation_that_the_rank_acts_in() -> None:
    """The View may be of a newer one already, which gives this state up."""
    client = Client()
    one = saving(Store(), client)
    one._site.member.watcher.latest.generation = 10
    one.save()
    assert client.told == [(17, 9)]


@pytest.mark.parametrize(
    ("error", "heard"),
    [(None, True), (ServiceError("nobody answers"), False), (Fenced("another one has it"), True)],
)
def test_a_coordinator_that_does_not_answer_is_told_again_and_holds_nobody_up(
    error: SwiftError | None, heard: bool
) -> None:
    store, client = Store(), Client(deaf=int(error is not None))
    client.error = error or client.error
    saving(store, client).save()
    assert store.heard is heard
    assert client.patience_s is not None
    assert client.patience_s <= 2.0, "the next checkpoint waits so long"


def test_no_job_begins_without_its_first_checkpoint() -> None:
    with pytest.raises(UsageError, match=r"no space; no job begins without its first checkpoint"):
        saving(Store(ServiceError("no space")), Client()).save_first()
    client = Client()
    saving(Store(), client).save_first()
    assert client.told == [(17, 9)]


@pytest.mark.parametrize("why", [Fenced("another one has it"), ServiceError("nobody answers")])
def test_who_may_not_hold_its_rank_any_more_saves_no_first_checkpoint(why: SwiftError) -> None:
    store, client = Store(), Client()
    client.fences = why
    with pytest.raises(type(why), match=str(why)):
        saving(store, client).save_first()
    assert store.versions == []


def test_whether_its_rank_is_held_is_asked_until_the_coordinator_answers() -> None:
    store, client = Store(), Client()
    client.unanswered = 3
    saving(store, client).save_first()
    assert (client.unanswered, store.versions) == (0, [17])


@pytest.mark.parametrize("away", [1, 5])
def test_no_job_begins_before_the_coordinator_knows_of_its_first_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: int
) -> None:
    """Away longer than it is told in the background."""
    monkeypatch.setattr(checkpoint_store, "_TOLD_S", 0.0)
    client = Client(deaf=away)
    store: Any = CheckpointStore(tmp_path, 2, Holding(entered=9))
    one = saving(store, client)
    if away == 1:
        one.save_first()
        assert client.told == [(17, 9)]
        assert client.patience_s is None, "as patient as Ready is"
        one.tell_untold()
        assert client.told == [(17, 9)], "once it is known nobody is asked again"
    else:
        with pytest.raises(ServiceError, match="nobody answers"):
            one.save_first()
    store.close()


@pytest.mark.parametrize("away", [0, 1])
def test_the_last_checkpoint_is_told_again_before_the_end(away: int) -> None:
    client = Client(deaf=away)
    one = saving(Store(), client)
    one.save_last()
    one.tell_untold()
    assert client.told == [(17, 9)]
    assert (client.patience_s is None) is (away == 1)


def test_what_is_not_written_is_not_told_again() -> None:
    client = Client()
    one = saving(Store(ServiceError("no space")), client)
    one.save_last()
    one.tell_untold()
    assert client.told == []


def test_a_first_checkpoint_that_the_coordinator_refuses_is_no_beginning() -> None:
    client = Client(deaf=2)
    client.error = Fenced("another one has it")
    with pytest.raises(Fenced):
        saving(Store(), client).save_first()


def test_what_cannot_be_written_later_is_said_and_training_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said: list[tuple[str, dict[str, Any]]] = []
    end = events.listen(lambda event, fields: said.append((event, dict(fields))))
    client = Client()
    one = saving(Store(ServiceError("no space")), client, complete=[0, 10])
    assert one.unsaved() is None
    one.save()
    end()
    assert said == [("checkpoint_failed", {"rank": 2, "version": 17, "reason": "no space"})]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "swift: rank 2 cannot write the checkpoint of version 17: no space; it is tried again, and the one of "
        "version 10 stands"
    )
    assert one.unsaved() == pb.UnsavedCheckpoint(version=17, generation=9, reason="no space")
    assert client.told == []


def test_what_is_complete_is_not_written_again() -> None:
    store, client = Store(), Client()
    saving(store, client, complete=[10, 17]).save()
    assert (store.versions, client.told) == ([], [])


def test_what_is_complete_or_given_up_is_pruned_once() -> None:
    store = Store()
    one = saving(store, Client(), complete=[0, 10], given_up=15)
    one.prune()
    one.prune()
    assert store.pruned == [({0, 10}, 15)]
