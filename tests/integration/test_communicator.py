"""`swift_ft.Communicator`, as a script of its own uses it: real processes, real gRPC, real SIGKILL.

The scenarios are in communicator_members.py. Those under the names of ULFM's tests are after ICLDisco/ulfm-testing
(`api/`), and the next ones after torch's test/distributed/test_c10d_fault_tolerance.py: each is written anew for what
this class promises. Two things differ from MPI. A loss ends what goes on in every group that the lost member was in,
so who goes on with some of the others has a group of their own. And there is no receive from anybody.
"""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.coordinator_world import Coordinator
from tests.integration.forked import shared
from tests.integration.logserver_world import python

MATRIX = pytest.mark.matrix
MEMBERS = Path(__file__).parent / "communicator_members.py"
Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Any:
    running = Coordinator(tmp_path_factory.mktemp("coordinator") / "state").start()
    yield running
    running.stop()


def run(
    coordinator: Coordinator,
    directory: Path,
    scenario: str,
    members: int,
    *,
    restarts: int = 0,
    **environment: str,
) -> tuple[Seen, str]:
    """What those have seen that came to the end, in the last scenario, by slot; and what was printed."""
    everything, printed = run_all(
        coordinator, directory, [scenario], members, restarts=restarts, **environment
    )
    return everything[scenario], printed


def run_all(
    coordinator: Coordinator,
    directory: Path,
    scenarios: list[str],
    members: int,
    *,
    restarts: int = 0,
    **environment: str,
) -> tuple[dict[str, Seen], str]:
    """The same of each scenario, one after the other by the same processes."""
    out = directory / "seen"
    out.mkdir()
    words = ["--nproc-per-node", members, "--coordinator", coordinator.address, "--max-restarts", restarts]
    words += [MEMBERS, ",".join(scenarios), out]
    output = directory / "output.txt"
    launcher = shared().run("tests.integration.forked_launcher", words, environment, output, output)
    code = launcher.wait(110.0)
    printed = output.read_text()
    assert code == 0, printed
    told = [json.loads(path.read_text()) for path in out.iterdir()]
    return {
        name: sorted((one[name] for one in told), key=lambda one: int(one["slot"])) for name in scenarios
    }, printed


def of(seen: Seen, key: str) -> list[Any]:
    return [one[key] for one in seen]


CALM = ["unlike", "used_group", "revoke"]


@pytest.fixture(scope="module")
def calm(coordinator: Coordinator, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """All scenarios without a loss, by the same four members."""
    return run_all(coordinator, tmp_path_factory.mktemp("calm"), CALM, 4)[0]


# --- after ULFM's tests ---


def test_revoke(calm: dict[str, Seen]) -> None:
    for one in calm["revoke"]:
        assert one["before"] == one["other"] == [15.0] * 10
        assert one["revoked"] == [True] * 10
        assert one["error"] == [""] * 10


def test_err_any(coordinator: Coordinator, tmp_path: Path) -> None:
    seen, _ = run(coordinator, tmp_path, "err_any", 5)

    (master,) = [one for one in seen if one["slot"] == 0]
    assert master["heard"] == [2, 4]
    assert master["lost"] == [1, 3]
    assert master["acknowledged"] == [1, 3]


def test_getack(coordinator: Coordinator, tmp_path: Path) -> None:
    seen, _ = run(coordinator, tmp_path, "getack", 4)

    assert of(seen, "slot") == [0, 1]
    for one in seen:
        assert one["before"] == [0b000, [3]]
        assert one["one_acknowledged"] == [0b000, [3]]
        assert one["all_acknowledged"] == [0b000, []]
        assert one["failures"] == one["acknowledged"] == [2, 3]
        assert one["another"] == [0b100, [2]]
        assert one["in_the_end"] == [0b100, []]


@pytest.mark.matrix
def test_revshrinkkill(coordinator: Coordinator, tmp_path: Path) -> None:
    (alone,), _ = run(coordinator, tmp_path, "revshrinkkill", 5)

    assert alone["size"] == 1
    assert alone["slots"] == [0]
    assert alone["barriers"] > 0


def test_buddycr(coordinator: Coordinator, tmp_path: Path) -> None:
    seen, _ = run(coordinator, tmp_path, "buddycr", 3, restarts=1)

    assert of(seen, "state") == [slot + 6.0 for slot in range(3)]
    assert of(seen, "alike") == [True] * 3
    assert of(seen, "slots") == [[0, 1, 2]] * 3


# --- after torch's tests ---


def test_a_group_of_an_older_generation_is_refused(calm: dict[str, Seen]) -> None:
    assert of(calm["used_group"], "failed") == [[True, True]] * 4
    assert of(calm["used_group"], "total") == [15.0] * 4


def test_shrink_without_one_that_has_left(coordinator: Coordinator, tmp_path: Path) -> None:
    seen, _ = run(coordinator, tmp_path, "shrink_middle", 3)

    seen = [one for one in seen if "total" in one]
    assert of(seen, "slots") == [[0, 2]] * 2
    assert of(seen, "rank") == [0, 1]
    assert of(seen, "total") == [5.0] * 2
    assert of(seen, "broadcast") == [[42.0] * 4] * 2
    assert of(seen, "ring") == [1.0, 0.0]


def test_late_join(coordinator: Coordinator, tmp_path: Path) -> None:
    seen, _ = run(coordinator, tmp_path, "late_join", 3, restarts=1, MAY_JOIN=str(tmp_path / "may_join"))

    assert of(seen, "total") == [7.0] * 3
    assert of(seen, "rank") == [0, 1, 2]
    assert [one["meanwhile"] for one in seen if "meanwhile" in one] == [5.0] * 2
    steps = [one["steps"] for one in seen if one["steps"]]
    assert len(set(steps)) == 1, "all have let it in after the same step"


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=MATRIX), pytest.param(2, marks=MATRIX)])
def test_a_loss_in_a_collective_is_seen_by_all_alike(
    coordinator: Coordinator, tmp_path: Path, victim: int
) -> None:
    seen, _ = run(coordinator, tmp_path, "consistent", 3, VICTIM=str(victim))

    assert of(seen, "failed") == [True] * 2
    assert of(seen, "agreed") == [[0b111 & ~sum(1 << slot for slot in of(seen, "slot")), [victim]]] * 2
    assert of(seen, "rank") == [0, 1]
    assert of(seen, "total") == [7.0 - (1 << victim)] * 2


# --- a loss in the middle ---


@pytest.mark.parametrize(
    "where",
    [
        "agree:after",
        *(
            pytest.param(where, marks=MATRIX)
            for where in (
                "shrink:before",
                "agree:before",
                "revoke:before",
                "revoke:after",
                "shrink:after",
                "grow:before",
                "grow:after",
            )
        ),
    ],
)
def test_a_member_dies_inside(coordinator: Coordinator, tmp_path: Path, where: str) -> None:
    seen, _ = run(coordinator, tmp_path, "dies_in", 4, WHERE=where)

    assert of(seen, "slot") == [0, 1, 2]
    assert of(seen, "slots") == [[0, 1, 2]] * 3
    assert of(seen, "total") == [7.0] * 3
    if where.startswith("agree"):
        assert of(seen, "agreed") == [[0, [3]]] * 3 or of(seen, "agreed") == [[0, []]] * 3
    if where.startswith("revoke"):
        assert of(seen, "failed") == [True] * 3


def test_the_coordinator_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    own, go_on, done = Coordinator(tmp_path / "state").start(), tmp_path / "go_on", threading.Event()

    def kill_and_start() -> None:
        try:
            while not go_on.with_suffix(".begun").exists() and not done.is_set():
                time.sleep(0.01)
            for number in range(4):
                done.wait(0.5 + 0.37 * number)
                assert own.process is not None
                own.process.kill()
                own.wait_killed()
                own.start()
        finally:
            go_on.touch()

    killer = threading.Thread(target=kill_and_start)
    killer.start()
    try:
        seen, _ = run(own, tmp_path, "through_restarts", 3, GO_ON=str(go_on))
    finally:
        done.set()
        killer.join()
        own.stop()

    assert len(seen) == 3
    assert len({json.dumps(one["answers"]) for one in seen}) == 1
    assert seen[0]["answers"] == list(range(1, len(seen[0]["answers"]) + 1))
    shrunk = (1 + len(seen[0]["answers"])) // 3  # the answer that has ended it counts as well
    assert len({one["generation"] for one in seen}) == 1
    # One more where the coordinator was killed while they were being connected.
    assert 1 + shrunk <= seen[0]["generation"] <= 1 + shrunk + 4
    assert shrunk > 0


# --- mistakes ---


def test_members_that_call_different_things_are_told_so(calm: dict[str, Seen]) -> None:
    for one in calm["unlike"]:
        assert "rank 0 has called grow, rank 1 has called agree" in one["error"]


def test_without_a_launcher_it_says_what_to_do(tmp_path: Path) -> None:
    done = python(MEMBERS, "revoke", tmp_path)

    assert "start the script with `swift-ft run --standalone --nproc-per-node N " in done.stderr
