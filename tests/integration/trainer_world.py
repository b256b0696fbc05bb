"""A trainer of the tests' own, run through a whole cluster: its digests, trace and output."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_ft import events
from tests.integration.forked import CalmCluster, ForkedCluster, Forks

TRAINERS = Path(__file__).parent / "trainers"
_PATIENCE_S = 150.0

Run = dict[str, Any]
Event = dict[str, Any]


def run_trainer(
    directory: Path,
    trainer: str,
    *arguments: object,
    ranks: int,
    faults: list[dict[str, Any]],
    code_wanted: int = 0,
    spares: int | None = None,
    make: type[ForkedCluster] = ForkedCluster,
    settings: Mapping[str, str] | None = None,
    saved: int = 0,
    launcher_flags: Sequence[str] = (),
    ready: Callable[[list[Event]], bool] = lambda _seen: True,
) -> Run:
    """``digests`` by file name, ``events`` and ``output`` of one run; a warm spare for every fault.

    Faults with "hold" die at the same moment, once all of them stand where they are to die, the checkpoint of version
    `saved` is complete, and `ready` says so of all events so far.
    """
    cluster = make(
        directory,
        ranks=ranks,
        spares=len(faults) if spares is None else spares,
        trainer=[str(TRAINERS / trainer)],
        trainer_arguments=[str(argument) for argument in arguments],
        faults=json.dumps([{"id": f"f{index}", **fault} for index, fault in enumerate(faults)]),
        digests_every=True,
        launcher_flags=launcher_flags,
        settings=settings,
    )
    with cluster:
        held = [f"f{index}" for index, fault in enumerate(faults) if fault.get("hold")]
        output = until_over(cluster, code_wanted, held, saved, ready)
    return found_in(directory, output)


def undisturbed(forks: Forks, directory: Path, trainer: str, *arguments: object, ranks: int) -> Run:
    """The same of a run in which nothing is going to fail."""
    cluster = CalmCluster(
        forks,
        directory,
        ranks=ranks,
        trainer=[str(TRAINERS / trainer)],
        trainer_arguments=[str(argument) for argument in arguments],
        digests_every=True,
    )
    with cluster:
        output = until_over(cluster)
    return found_in(directory, output)


def until_over(
    cluster: ForkedCluster,
    code_wanted: int = 0,
    held: Sequence[str] = (),
    saved: int = 0,
    ready: Callable[[list[Event]], bool] = lambda _seen: True,
) -> str:
    """What its processes have said last. `held`: faults that are let go when all of them wait, that checkpoint is
    complete and all is ready."""
    deadline = time.monotonic() + _PATIENCE_S
    complete, seen = 0, list[Event]()
    while (code := cluster.poll()) is None:
        assert time.monotonic() < deadline, cluster.output_tail()
        if held:
            seen += cluster.tail.read()
            complete = max((e["version"] for e in seen if e["event"] == "checkpoint_complete"), default=0)
            there = all((cluster.fault_directory / f"{name}.reached").exists() for name in held)
            if there and complete >= saved and ready(seen):
                for name in held:
                    (cluster.fault_directory / f"{name}.go").touch()
                held = ()
        time.sleep(0.01)
    output = cluster.output_tail()
    assert code == code_wanted, output
    return output


def found_in(directory: Path, output: str) -> Run:
    digests = {path.name: json.loads(path.read_text()) for path in (directory / "digests").glob("*.json")}
    return {"digests": digests, "events": events.read(directory / "events"), "output": output}


def named(run: Run, event: str) -> list[Event]:
    return [each for each in run["events"] if each["event"] == event]


def survived(run: Run, twin: Run, ranks: int, steps: int, victims: list[int]) -> list[list[Event]]:
    """The ranks of every plan, of a run in which every bit is the twin's and survivors kept their processes."""
    assert sorted(event["rank"] for event in named(run, "fault")) == sorted(victims)
    told = [*named(run, "ready"), *named(run, "finished")]
    for rank in range(ranks):
        pids = {event["pid"] for event in told if event["who"] == f"rank{rank}"}
        assert len(pids) == 1 + victims.count(rank), f"rank {rank}"
    check_same(run, twin)
    assert {f"rank{rank}-v{steps}.json" for rank in range(ranks)} <= run["digests"].keys()
    return [event["ranks"] for event in named(run, "plan")]


def check_same(run: Run, twin: Run) -> None:
    """Of every version, and at a recovery, all that was digested is as in `twin`."""
    for name, digests in run["digests"].items():
        assert digests == twin["digests"][name.removesuffix(".json").split("-g")[0] + ".json"], name
