"""Other people's trainers, killed at three places each: the verdict is the one that their first lines state.

The default suite runs those that are marked `quick`; `scripts/test -m matrix` all.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device import simulated
from tests.trainers.harness import header, table, verdict
from tests.trainers.harness.__main__ import judge, judge_adaptive
from tests.trainers.harness.run import Kill, Outcome, beside_plain
from tests.trainers.harness.services import Services

ALL = [(trainer, world) for trainer in header.trainers() for world in trainer.worlds]
QUICK = [(trainer, max(trainer.worlds)) for trainer in header.trainers() if trainer.quick]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    with Services(tmp_path_factory.mktemp("services")) as services:
        yield services


def _name(value: object) -> str:
    return value.name if isinstance(value, header.Trainer) else f"x{value}"


@pytest.mark.parametrize(("trainer", "world"), QUICK, ids=_name)
def test_a_trainer(trainer: header.Trainer, world: int, services: Services, tmp_path: Path) -> None:
    _check(trainer, world, services, tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("trainer", "world"), [pair for pair in ALL if pair not in QUICK], ids=_name)
def test_every_trainer(trainer: header.Trainer, world: int, services: Services, tmp_path: Path) -> None:
    _check(trainer, world, services, tmp_path)


ON_DEVICE = ("gpu_trainer", "pipeline_autocast")
"""Those of the default suite."""


@pytest.mark.skipif(simulated.compiler() is None, reason="no C++ compiler: g++ makes the simulated device")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("trainer", "wire"),
    [
        pytest.param(t, wire, marks=[] if t.name in ON_DEVICE and wire == "staged" else pytest.mark.matrix)
        for t in header.trainers()
        if t.device
        for wire in simulated.WIRES
    ],
    ids=lambda value: value if isinstance(value, str) else _name(value),
)
def test_a_trainer_on_a_device(
    trainer: header.Trainer, wire: str, services: Services, tmp_path: Path
) -> None:
    simulated.library()  # the ranks find it compiled
    device = simulated.OVER_NCCL if wire == "nccl" else simulated.NAME
    where = _check(trainer, max(trainer.worlds), services, tmp_path, device=device)
    assert simulated.sent_over_communicators(where) == (wire == "nccl")


KINDS = (
    "mlp",
    "batch_norm",
    "autocast_scaler",
    "ddp_unfreeze",
    "optimizer_in_backward",
    "tied",
    "two_updates",
    "wait_free",
)
"""Those of the default suite: each differs from the others in what happens to a gradient on its way to an update."""
PLAIN = [(trainer, world) for trainer in header.trainers() for world in trainer.plain]


@pytest.mark.parametrize(
    ("trainer", "world"),
    [
        pytest.param(t, w, marks=[] if t.name in KINDS and w == min(t.plain) else pytest.mark.matrix)
        for t, w in PLAIN
    ],
    ids=_name,
)
def test_a_trainer_beside_plain_torch(
    trainer: header.Trainer, world: int, services: Services, tmp_path: Path
) -> None:
    """In every step, and in all that it has in the end."""
    job = f"{trainer.name.replace('_', '-')}-{world}-beside-plain"
    assert beside_plain(services, tmp_path, trainer, world, job) == []


FEW = ("pipeline_moving_state",)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "trainer",
    [pytest.param(t, marks=[] if t.name in FEW else pytest.mark.matrix) for t in header.pipelines()],
    ids=_name,
)
def test_a_pipeline_whose_ranks_are_lost_for_good(
    trainer: header.Trainer, services: Services, tmp_path: Path
) -> None:
    """With two replicas, under strategy "adaptive"."""
    found, where = judge_adaptive(services, tmp_path, trainer)
    assert found.word == trainer.adaptive, f"{found}\n{(where / 'stderr').read_text()[-3000:]}"


def _check(
    trainer: header.Trainer, world: int, services: Services, tmp_path: Path, *, device: str = ""
) -> Path:
    """Returns the folder of its last run."""
    found, where = judge(services, tmp_path, trainer, world, device=device)
    expected = trainer.expected[world]
    if world in trainer.misses:
        assert found.word != expected.verdict or expected.says not in found.why, (
            "take '# misses' out of its header"
        )
        pytest.xfail(f"{trainer.because} ({found})")
    assert found.word == expected.verdict, f"{found}\n{(where / 'stderr').read_text()[-3000:]}"
    assert expected.says in found.why
    return where


# --- the folder and its harness ---


def test_there_are_enough_of_them() -> None:
    assert len(header.trainers()) >= 40
    assert len(PLAIN) >= 20


def test_the_table_in_the_documents_is_what_the_headers_say() -> None:
    text = table.PAGE.read_text()
    assert table.page(text) == text, "run scripts/trainers --table"


def test_a_header_with_another_verdict_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text('"""Odd."""\n\n# verdict: maybe\n')
    with pytest.raises(ValueError, match="'# verdict: maybe'; give one of same bits"):
        header.read(path)


def _outcome(tmp_path: Path, **fields: object) -> Outcome:
    about = {"place": [0, 0], "alike": ["model"], "digests": {"model": "a", "average": "b"}}
    given = {
        "code": 0,
        "stderr": "",
        "ends": {"rank0": about},
        "losses": {"rank0": {0: "x", 1: "y"}},
        **fields,
    }
    return Outcome(directory=tmp_path, job="j", seconds=1.0, **given)  # type: ignore[arg-type]


def test_what_counts_as_a_miss(tmp_path: Path) -> None:
    """Each of these by itself."""
    calm = _outcome(tmp_path)
    assert verdict.of_killed(calm, _outcome(tmp_path), 1).word == verdict.SAME
    other = {"place": [0, 0], "alike": ["model"], "digests": {"model": "a", "average": "c"}}
    for wrong in (
        {"ends": {"rank0": other}},
        {"ends": {}},
        {"losses": {"rank0": {0: "x", 1: "z"}}},
        {"contradictions": ["rank0 step 1"]},
        {"code": 1, "stderr": "Traceback"},
        {"code": None},
        {"code": 2, "stderr": "no line of ours"},
        {"code": 2, "stderr": "Traceback (most recent call last)\nswift: one line"},
        {"plans": [{"exact": True}] * 5},
    ):
        assert verdict.of_killed(calm, _outcome(tmp_path, **wrong), 1).word == verdict.MISS, wrong
    assert (
        verdict.of_killed(calm, _outcome(tmp_path, code=2, stderr="swift: why\n"), 1).word == verdict.REFUSED
    )
    said = {"ends": {"rank0": other}, "stderr": "swift: restored version 5; not exact\n"}
    assert verdict.of_killed(calm, _outcome(tmp_path, **said), 1).word == verdict.NAMED
    ended = "swift: job failed: rank 1 refused: parameters differ (no. 9 in a row)"
    assert verdict.of_killed(calm, _outcome(tmp_path, code=1, stderr=ended), 1).word == verdict.MISS


def test_what_was_known_before_anything_failed(tmp_path: Path) -> None:
    other = {"place": [0, 0], "alike": ["model"], "digests": {"model": "a", "average": "c"}}
    first = {"rank": 0, "version": 0, "difference": "", "why_not": ""}
    for later, killed, word in (
        ({"version": 5}, {}, verdict.SAME),
        ({"version": 5}, {"ends": {"rank0": other}}, verdict.MISS),  # equal, and silently different
        ({"version": 5, "difference": "output 0"}, {"ends": {"rank0": other}}, verdict.NAMED),
        ({"version": 5, "difference": "output 0"}, {}, verdict.NAMED),
        ({"version": 5, "why_not": "its process has ended"}, {}, verdict.MISS),
        # It waits by itself; and it is another one that waits.
        ({"version": 5, "why_not": "the replay stands still for 2 s"}, {}, verdict.SAME),
        ({"version": 5, "rank": 1, "why_not": "the replay stands still for 2 s"}, {}, verdict.MISS),
        ({"version": 10}, {}, verdict.MISS),  # not at the second checkpoint
        ({"version": 5, "difference": "lr"}, {"code": 2, "stderr": "swift: why\n"}, verdict.NAMED),
        ({"version": 5, "difference": "lr"}, {"code": 2, "stderr": "Traceback\nswift: why"}, verdict.MISS),
        ({"version": 5}, {"code": 2, "stderr": "swift: why\n"}, verdict.REFUSED),
    ):
        calm = _outcome(tmp_path, rehearsals=[first, {**first, **later}])
        assert verdict.of_killed(calm, _outcome(tmp_path, **killed), 1).word == word, (later, killed)
    none_came = _outcome(tmp_path, rehearsals=[])
    assert verdict.of_killed(none_came, _outcome(tmp_path), 1).word == verdict.MISS


def test_replicas_that_differ_are_a_miss_without_any_kill(tmp_path: Path) -> None:
    ends = {
        f"rank{n}": {"place": [0, n], "alike": ["model"], "digests": {"model": str(n), "own": str(n)}}
        for n in range(2)
    }
    assert verdict.of_undisturbed(_outcome(tmp_path, ends=ends)).word == verdict.MISS
    ends["rank1"]["digests"] = {"model": "0", "own": "1"}
    assert verdict.of_undisturbed(_outcome(tmp_path, ends=ends)).word == verdict.SAME


def test_a_kill_says_where() -> None:
    assert (
        str(Kill(place="forward", rank=1, step=3, microbatch=2)) == "rank=1,step=3,place=forward,microbatch=2"
    )
