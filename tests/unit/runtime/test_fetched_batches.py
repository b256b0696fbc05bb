"""Batches that come from another rank: what loaders give in a step, written down, sent, and given again."""

import copy
import enum
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift.errors import UsageError
from swift.recovery import Assignment
from swift.runtime.config import SessionConfig
from swift.runtime.draws import Draw, Drawn, digest, message, packed, read, unpacked
from swift.runtime.fetched_batches import FetchedBatches, adopters
from swift.runtime.launched import from_environment
from swift.runtime.origin_loaders import OriginLoader, OriginLoaders
from swift.runtime.tensors import same_bits
from tests.local_backend import LocalWire, Network
from tests.unit.runtime.test_gradient_chain import in_parallel

Pair = namedtuple("Pair", "x y")


class Kind(enum.IntEnum):
    TEXT = 1


@dataclass
class Batch:
    """A trainer's own."""

    tokens: torch.Tensor


class Loader:
    """Of one origin: three batches, and again from the beginning."""

    def __init__(self, origin: int) -> None:
        self.origin, self.position = origin, 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self.position < 3:
            self.position += 1
            yield self.origin, self.position
        self.position = 0

    def __next__(self) -> tuple[int, int]:
        self.position += 1
        if self.position > 3:
            raise StopIteration
        return self.origin, self.position

    def take(self, count: int, *, twice: bool = False) -> list[tuple[int, int]]:
        return [next(self) for _ in range(count)] * (1 + twice)

    def __call__(self, number: int) -> tuple[int, int]:
        return self.origin, number

    def __getitem__(self, number: int) -> tuple[int, int]:
        return self.origin, -number

    @property
    def epoch(self) -> int:
        return 10 * self.origin

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Rank:
    """A trainer's loader at one, and what the session does with it."""

    def __init__(self, own: int, kind: type[Loader] = Loader) -> None:
        self.now = own

        def make(origin: int) -> Loader:
            assert origin == own, "nobody else can make it"
            return kind(origin)

        self.loader = OriginLoader(make, own, lambda: self.now, fetches=True)
        self.loaders = OriginLoaders()
        self.loaders.add(self.loader, "loader")

    def gives(self, step: Callable[[Any], Any]) -> tuple[Any, Drawn]:
        """In a step that is taken back."""
        before = self.loader.state_dict()
        with self.loaders.writing() as written:
            result = step(self.loader)
        self.loader.load_state_dict(before)
        return result, written

    def does(self, origin: int, drawn: Drawn, step: Callable[[Any], Any]) -> Any:
        self.loaders.take(origin, drawn)
        own, self.now = self.now, origin
        self.loaders.begin(origin)
        try:
            return step(self.loader)
        finally:
            self.now = own


def until_the_end(loader: Any) -> list[Any]:
    found = []
    try:
        while True:
            found.append(next(loader))
    except StopIteration:
        return found


STEPS: list[Callable[[Any], Any]] = [
    next,
    lambda loader: [next(loader), next(loader)],
    lambda loader: loader.take(2, twice=True),
    lambda loader: (loader.epoch, next(loader), loader.epoch),
    list,
    lambda loader: [batch for batch, _ in zip(loader, range(2), strict=False)],
    until_the_end,
    len,
    lambda loader: (loader(3), loader[3]),
    lambda loader: None,
]


@pytest.mark.parametrize("number", range(len(STEPS)))
def test_a_step_for_another_origin_is_given_what_that_ones_own_loader_gives(number: int) -> None:
    step, own, other = STEPS[number], Rank(0), Rank(1)
    wanted, written = other.gives(step)
    for _ in range(2):  # each time the same, and this rank's own does not move
        assert own.does(1, read(message(written)), step) == wanted
        assert own.loader.state_dict() == {"position": 0}
    assert step(own.loader) == step(Loader(0)), "its own batch comes from its own loader"
    assert step(other.loader) == wanted


def test_a_step_for_another_origin_begins_no_epoch_of_its_own_loader() -> None:
    begun: list[int] = []

    class Epochs(Loader):
        def __iter__(self) -> Iterator[tuple[int, int]]:
            begun.append(self.origin)
            self.position = 0
            return super().__iter__()

    own, other = Rank(0, Epochs), Rank(1, Epochs)
    _, written = other.gives(list)
    assert begun == [1]
    assert own.does(1, read(message(written)), list) == [(1, 1), (1, 2), (1, 3)]
    assert begun == [1]
    assert list(own.loader) == [(0, 1), (0, 2), (0, 3)]
    assert begun == [1, 0]


def test_a_step_for_another_origin_sets_nothing_on_its_own_loader() -> None:
    def step(loader: Any) -> Any:
        loader.seed = 7
        return loader.seed, next(loader)

    own, other = Rank(0), Rank(1)
    wanted, written = other.gives(step)
    own.loader.seed = 3
    assert own.does(1, read(message(written)), step) == wanted == (7, (1, 1))
    assert own.loader.seed == 3


def test_a_step_that_asks_for_something_else_is_refused() -> None:
    own, (_, written) = Rank(0), Rank(1).gives(lambda loader: [next(loader), loader.epoch])
    with pytest.raises(
        UsageError, match=r"for data-parallel rank 1 asks its loader for 'epoch' where .* 'next'"
    ):
        own.does(1, written, lambda loader: loader.epoch)
    with pytest.raises(UsageError, match=r"asks its loader for 'next' where .* asked for 'nothing'"):
        own.does(1, written, lambda loader: [next(loader), loader.epoch, next(loader)])
    with pytest.raises(UsageError, match=r"this rank has made 1 loaders .* one of data-parallel rank 1 0"):
        own.does(1, [], next)


VALUES = {
    "tensor": torch.arange(6.0).view(2, 3),
    "bf16": torch.arange(6.0).bfloat16(),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(7),
    "turned": torch.arange(20).view(4, 5).T,
    "a part": torch.arange(20)[3:9],
    "nan": torch.tensor([float("nan"), -0.0]),
    "nested": {"x": [torch.ones(2), (1, "two")], "y": None, 3: {4.5, float("inf")}},
    "ordered": OrderedDict(a=torch.ones(1)),
    "numpy": np.arange(3, dtype=np.int16),
    "words": ["a", b"bytes", 1 << 70],
}


def same(a: Any, b: Any) -> bool:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.stride()) == (b.dtype, b.stride()) and same_bits(a, b)
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and (a == b).all())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("name", VALUES)
def test_what_a_loader_gives_arrives_as_it_was(name: str) -> None:
    value = VALUES[name]
    given = unpacked(packed(Draw("next", value)))
    assert given.what == "next"
    assert same(given.value, value)
    assert digest([[packed(given)]]) == digest([[packed(Draw("next", copy.deepcopy(value)))]])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Batch(torch.ones(1)), "holds a Batch"),
        ({"x": lambda: 1}, "batch.x holds a function"),
        ([Pair(1, 2)], "a Pair would become something simpler"),
        ({"kind": Kind.TEXT}, "a Kind would become something simpler"),
        ((x for x in [1]), "holds a generator"),
        (torch.eye(2).to_sparse(), "sparse"),
    ],
)
def test_what_cannot_be_sent_is_refused_in_one_line(value: Any, words: str) -> None:
    with pytest.raises(
        UsageError, match="'next' of a loader, with fetch_batches=True: the batch is sent to"
    ) as told:
        packed(Draw("next", value))
    assert words in str(told.value)
    assert "\n" not in str(told.value)


def test_a_draw_is_what_it_was_before_the_trainer_changed_it() -> None:
    tensors = [torch.ones(3)]

    class Ones(Loader):
        def __next__(self) -> Any:
            return tensors[0]

    loader = OriginLoader(Ones, 0, lambda: 0, fetches=True)
    loaders = OriginLoaders()
    loaders.add(loader, "loader")
    with loaders.writing() as written:
        next(loader).mul_(5)
    assert torch.equal(unpacked(written[0][0]).value, torch.ones(3))


def test_a_view_travels_without_what_it_is_a_view_of() -> None:
    corpus = torch.zeros(10**6)
    assert len(packed(Draw("next", {"x": corpus[5:10]}))) < 2000


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=4))
def test_a_digest_tells_values_and_loaders_apart(draws: list[tuple[int, int]]) -> None:
    def of(pairs: list[tuple[int, int]], loaders: int = 1) -> bytes:
        return digest([[packed(Draw("next", torch.tensor(pair))) for pair in pairs]] * loaders)

    assert of(draws) == of(list(draws))
    assert of(draws) != of([*draws, (0, 0)])
    assert of(draws) != of(draws, 2)
    assert of([*draws, (0, 1)]) != of([*draws, (0, 2)])


@pytest.mark.parametrize("ahead", [None, 4, 7])
def test_batches_go_from_the_first_that_is_left_of_a_pipeline_to_whoever_computes_for_it(
    ahead: int | None,
) -> None:
    """3 stages, 3 replicas. Rank 1 is lost (pipeline 1; rank 4 gives), and rank 8 (pipeline 2; rank 2 gives)."""
    full, network = Assignment.grid(9, replicas=3), Network()
    members = {slot: slot for slot in range(9) if slot not in (1, 8)}
    now = full.held_by(members).rerouted()
    wanted = adopters(now)
    assert wanted == {1: [0, 2], 2: [6, 7]}
    taken: dict[int, dict[int, Drawn]] = {slot: {} for slot in members}
    drew: list[int] = []
    wrong: dict[int, list[str]] = {}

    def fetch(place: int) -> None:
        slot = now.occupied[place]

        def draw() -> Drawn:
            drew.append(slot)
            return [[packed(Draw("next", slot))]]

        loaders: Any = SimpleNamespace(
            take=lambda origin, drawn: taken[slot].update({origin: drawn}),
            position=lambda: b"%16d" % (slot == ahead),
        )
        world: Any = LocalWire(network, slot)
        wrong[slot] = FetchedBatches(slot, lambda: now, world, loaders).fetch(wanted, draw)

    in_parallel(len(members), fetch)
    assert sorted(drew) == [2, 4], "nobody else begins a step for it"
    found = {
        slot: {o: unpacked(drawn[0][0]).value for o, drawn in of.items()} for slot, of in taken.items() if of
    }
    assert found == {0: {1: 4}, 2: {1: 4}, 6: {2: 2}, 7: {2: 2}}
    assert network.left() == 0
    told = {slot for slot, words in wrong.items() if words}
    assert told == {None: set(), 4: {0, 2}, 7: {7}}[ahead], "loaders of that rank have given more"


def test_ranks_of_a_pipeline_that_draw_other_things_are_told_apart() -> None:
    now = Assignment.grid(6, replicas=2)

    def told(drawn: dict[int, int]) -> Any:
        digests = [
            torch.frombuffer(bytearray(digest([[packed(Draw("next", n))]])), dtype=torch.uint8)
            for n in drawn.values()
        ]
        world: Any = SimpleNamespace(gathered=lambda mine: digests)
        none: Any = None
        return FetchedBatches(0, lambda: now, world, none).apart([[packed(Draw("next", drawn[0]))]])

    assert told(dict.fromkeys(range(6), 7)) is None
    assert told({slot: slot % 2 for slot in range(6)}) is None, "pipelines have batches of their own"
    assert told({slot: slot % 2 + 5 * (slot == 5) for slot in range(6)}) == (1, 5)


def test_it_takes_pipelines_and_adaptive(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UsageError, match=r"fetch_batches=True with strategy='shrink': it is for strategy='adaptive'"
    ):
        SessionConfig(replicas=2, strategy="shrink", fetch_batches=True)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "SWIFT_COORDINATOR": "127.0.0.1:1",
        "SWIFT_JOB": "j",
        "SWIFT_INCARNATION": "a",
        "SWIFT_CHECKPOINT_DIR": "/nowhere",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="without pipelines: nobody else has the batches of a lost rank"):
        from_environment(SessionConfig(replicas=2, strategy="adaptive", fetch_batches=True))
    from_environment(SessionConfig(replicas=1 + 1, strategy="adaptive"))
