"""Owners of a recovery group that agree, and helpers of a copy of it, which compute as a small pipeline."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import Schedule1F1B

from swift_ft.comm.worker_thread import Broken
from swift_ft.errors import ReplayRefused
from swift_ft.log.record import RecordKey
from swift_ft.planner import Help
from swift_ft.planner.groups import RecoveryGroups
from swift_ft.state.tensors import same_bits
from swift_ft.train.replay_helper import CopyPipeline, InCopy
from swift_ft.train.shared_replay import StepAction, Together, ahead, copy_of, send_away
from tests.local_backend import LocalWire, Network
from tests.unit.runtime import shared_replay_world as world
from tests.unit.runtime.shared_replay_world import Log, Part, Rank, loss_fn, one_at_a_time
from tests.unit.runtime.test_gradient_chain import in_parallel

RANKS = (4, 1, 6)
STEP = 7


def among(ranks: tuple[int, ...], say: Any) -> list[Any]:
    """What each of the ranks gets to know, `say(together, place)`."""
    network = Network()

    def one(place: int) -> Any:
        rank = ranks[place]
        return say(Together(rank, ranks, LocalWire(network, rank)), place)

    found = in_parallel(len(ranks), one)
    assert network.left() == 0
    return found


class TestAgreement:
    @pytest.mark.parametrize("ranks", [(2,), (3, 2), RANKS])
    def test_all_know_what_each_has_said(self, ranks: tuple[int, ...]) -> None:
        def say(together: Together, place: int) -> Any:
            return [together.agree([turn, place]) for turn in range(3)]

        wanted = [[[turn, place] for place in range(len(ranks))] for turn in range(3)]
        assert among(ranks, say) == [wanted] * len(ranks)

    def test_a_copy_of_which_one_declines_is_left_out_by_all(self) -> None:
        able = [[0, 1, 3], [0, 2, 3], [3, 0]]
        declined = [{"7": "no room"}, {"8": "another module"}, {}]
        wanted = ([0, 3], {"7": "no room", "8": "another module"})
        found = among(RANKS, lambda together, place: together.choose(sorted(able[place]), declined[place]))
        assert found == [wanted] * 3

    def test_an_owner_that_cannot_share_ends_it_for_all(self) -> None:
        """It sends its helpers away, the others theirs."""
        network = Network()
        help = Help(owner=1, helpers=(9,), until=9, together=RANKS)

        def one(place: int) -> Any:
            wire = LocalWire(network, RANKS[place])
            if place == 1:
                return send_away(1, help, wire, 2, "of its schedule")
            return Together(RANKS[place], RANKS, wire).choose([0], {})

        able, declined = in_parallel(3, one)[0]
        assert (able, declined) == ([], {"1": "of its schedule"})
        assert network.left() == 2  # what the helper is told: a note's length, and the note

    def test_the_first_that_lacks_memory(self) -> None:
        found = among(RANKS, lambda together, place: together.first_reason(["", "5 MiB", "6 MiB"][place]))
        assert found == [{"1": "5 MiB"}] * 3
        assert among(RANKS, lambda together, _place: together.first_reason("")) == [{}] * 3

    def test_a_step_is_shared_by_all_or_by_none(self) -> None:
        found = among(RANKS, lambda together, place: together.at(STEP, range(3, 5), "hooks" * (place == 1)))
        assert found == ["rank 1: hooks"] * 3
        assert among(RANKS, lambda together, _place: together.at(STEP, range(3, 5), "")) == [""] * 3

    def test_an_owner_by_itself_asks_nobody(self) -> None:
        assert Together(4, (4,), SimpleNamespace()).at(STEP, range(2), "hooks") == "hooks"  # type: ignore[arg-type]

    @pytest.mark.parametrize("other", [(STEP + 1, range(3, 5)), (STEP, range(2, 5)), (STEP, range(3, 4))])
    def test_owners_that_would_leave_other_microbatches_to_others_refuse(self, other: Any) -> None:
        def say(together: Together, place: int) -> str:
            step, own = other if place == 2 else (STEP, range(3, 5))
            with pytest.raises(ReplayRefused, match=r"disagree on shares of a step: rank 4: .* rank 6: "):
                together.at(step, own, "")
            return "refused"

        assert among(RANKS, say) == ["refused"] * 3

    def test_helpers_of_a_copy_that_were_given_other_microbatches_refuse(self) -> None:
        def say(together: Together, place: int) -> str:
            with pytest.raises(ReplayRefused, match="disagree on microbatches of one copy"):
                together.compare([5, place, 3])
            return "refused"

        assert among(RANKS, say) == ["refused"] * 3
        among(RANKS, lambda together, _place: together.compare([5, 0, 3]))


def test_who_is_in_a_copy() -> None:
    planned = [
        Help(owner=2, helpers=(1, 6), until=9, together=(2, 3)),
        Help(owner=3, helpers=(4, 0), until=9, together=(2, 3)),
        Help(owner=8, helpers=(7, 9), until=9),
    ]
    copies = {rank: copy_of(rank, planned) for rank in (1, 4, 6, 0, 7, 9)}
    assert copies == {1: (1, 4), 4: (1, 4), 6: (6, 0), 0: (6, 0), 7: (7,), 9: (9,)}
    assert copy_of(5, planned) == (5,)


MICROBATCHES = 6


def calm(index: int) -> Part:
    return Part(index, dropout=0.0)


@pytest.fixture
def shapes() -> Iterator[Any]:
    with world.told_shapes() as store:
        yield store


class Copy:
    """Helpers of stages 0 and 1 of three, of which stage 2 is another group."""

    def __init__(self, store: Any, network: Network) -> None:
        self.log = Log()
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(MICROBATCHES, world.ROWS, world.WIDTH, generator=generator)
        self.gradients = torch.randn(MICROBATCHES, world.ROWS, world.WIDTH, generator=generator)
        for mb in range(MICROBATCHES):
            self.log.put("s2.B", RecordKey(STEP, mb, 256), self.gradients[mb])
        self.ranks = [Rank(stage, store, calm, Schedule1F1B, MICROBATCHES) for stage in (0, 1)]
        self.schedules = [self._schedule(rank, network) for rank in self.ranks]

    def _schedule(self, rank: Rank, network: Network) -> Any:
        rank.channel.groups = RecoveryGroups.parse("0-1,2")
        rank.channel.begin_replay(self.log, STEP, ())  # type: ignore[arg-type]
        rank.channel.begin_step(STEP)
        return InCopy(
            rank.stages, MICROBATCHES, loss_fn, CopyPipeline(LocalWire(network, rank.rank), rank.rank, (0, 1))
        )

    def run(self, numbers: range) -> None:
        def one(place: int) -> None:
            each = [StepAction(place, kind, mb) for mb in numbers for kind in "FB"]
            self.schedules[place].run(
                ahead(each, 1 - place),
                lambda stage, mb: ((self.inputs[mb],) if stage == 0 else (), {}),
                lambda _mb: None,
            )

        in_parallel(2, one)

    def alone(self, numbers: range) -> tuple[list[Part], dict[int, torch.Tensor]]:
        """The same microbatches, one after the other, by nobody's schedule."""
        first, second, sent = calm(0), calm(1), {}
        for mb in numbers:
            between = first(self.inputs[mb])
            arrived = between.detach().requires_grad_()
            out = second(arrived)
            out.backward(self.gradients[mb])
            between.backward(arrived.grad)
            sent[mb] = out.detach()
        return [first, second], sent


class TestCopy:
    @pytest.mark.parametrize("numbers", [range(6), range(4, 6), range(2, 3)])
    def test_gradients_and_sends_are_those_of_one_process(
        self,
        numbers: range,
        shapes: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        one_at_a_time(threading.RLock(), monkeypatch)
        network = Network()
        copy = Copy(shapes, network)
        copy.run(numbers)
        modules, sent = copy.alone(numbers)
        for rank, module in zip(copy.ranks, modules, strict=True):
            for (name, mine), theirs in zip(rank.module.named_parameters(), module.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None)
                assert mine.grad is None or same_bits(mine.grad, theirs.grad), name
        first, last = copy.ranks
        assert {key.microbatch for stream, key in last.captured.sent if stream == "s1.F"} == set(numbers)
        for (_, key), tensor in last.captured.sent.items():
            assert same_bits(tensor, sent[key.microbatch])
        # Nothing that passes inside is given to the log; what comes in over the end is read once.
        assert not [stream for stream, _ in [*first.captured.sent, *last.captured.sent] if stream == "s1.B"]
        assert not [stream for stream, _ in first.captured.sent if stream == "s0.F"]
        assert copy.log.read == [("s2.B", RecordKey(STEP, mb, 256)) for mb in numbers]
        assert network.left() == 0

    def test_a_stage_is_ahead_by_those_behind_it_and_no_further(
        self,
        shapes: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        done: list[tuple[int, str, int]] = []
        copy = Copy(shapes, Network())
        for rank in copy.ranks:
            for name in ("forward_one_chunk", "backward_one_chunk"):
                inner = getattr(rank.stage, name)

                def told(
                    mb: int, *more: Any, _inner: Any = inner, _is: Any = (rank.rank, name[0]), **k: Any
                ) -> Any:
                    done.append((*_is, mb))
                    return _inner(mb, *more, **k)

                setattr(rank.stage, name, told)
        copy.run(range(4))
        orders = [[what + str(mb) for stage, what, mb in done if stage == place] for place in (0, 1)]
        assert orders == [
            ["f0", "f1", "b0", "f2", "b1", "f3", "b2", "b3"],
            ["f0", "b0", "f1", "b1", "f2", "b2", "f3", "b3"],
        ]

    def test_a_lost_connection_is_not_the_modules_error(self, shapes: Any) -> None:
        """Nobody is to blame for what a notice has ended."""
        copy = Copy(shapes, Network())

        def lost(*_arguments: Any) -> Any:
            return SimpleNamespace(
                wait=lambda: (_ for _ in ()).throw(RuntimeError("Connection closed by peer"))
            )

        copy.schedules[1]._inner._post.receive = lost
        with pytest.raises(Broken, match="closed by peer"):
            copy.schedules[1].run([StepAction(1, "F", 0)], lambda _stage, _mb: ((), {}), lambda _mb: None)
