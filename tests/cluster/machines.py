"""Machines that train, each with a log server, are lost where others wait for a place: seconds from the silence on.

Machines are network namespaces: what is lost loses its cable first, then its processes. All times are of one clock.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swift_ft import events
from tests.cluster.rows import Row, row
from tests.frameworks.environment import Unavailable
from tests.integration.namespaces import Network, impossible
from tests.integration.test_machines import Logs
from tests.integration.test_partitions import Machines, World

STEPS = 250
CASES: Mapping[str, tuple[str, int, str, str]] = {
    "a machine of two is lost": ("usual", 1, "ab", "b"),
    "a machine of two is lost, with --detect fast": ("fast", 1, "ab", "b"),
    "two neighbours of four are lost at once, one copy": ("usual", 1, "abcd", "bc"),
    "two neighbours of four are lost at once, two copies": ("usual", 2, "abcd", "bc"),
}
"""case → --detect, --copies, the machines that train, those of them that are lost"""
SPARES = "ef"


def cases(only: str) -> Iterator[Row]:
    if why := impossible():
        raise Unavailable(why)
    with tempfile.TemporaryDirectory(prefix="swift-machines-") as place:
        wanted: dict[str, Any] = {}
        for number, (name, (detect, copies, machines, lost)) in enumerate(CASES.items()):
            if only not in name:
                continue
            if machines not in wanted:
                wanted[machines] = undisturbed(Path(place) / f"twin-{number}", machines)
            yield disturbed(Path(place) / str(number), name, wanted[machines], detect, copies, machines, lost)


class Site:
    """A log server on each machine that trains, a coordinator with default settings beside them, and its trace."""

    def __init__(
        self, directory: Path, machines: str, stack: contextlib.ExitStack, detect: str, copies: int
    ) -> None:
        directory.mkdir()
        (directory / "trace").mkdir()
        stack.callback(os.environ.update, dict(os.environ))
        os.environ |= {"SWIFT_EVENTS": str(directory / "trace"), "SWIFT_INSECURE": "1"}
        self.machines = machines
        self.network = Network("meta", "log", *machines, *SPARES, named=True)
        stack.callback(self.network.close)
        world = World(self.network, directory, stack)
        self.servers = Logs(world, directory, stack, machines, copies, ["--detect", detect]).servers
        self.run = Machines(world, directory / "run", self._flags, len(machines), len(machines), STEPS)
        stack.callback(self.run.close)
        self._tail = events.Tail(directory / "trace")
        self._trace: list[dict[str, Any]] = []

    def _flags(self, machine: str, _number: int) -> list[str]:
        return [f"--local-addr={self.network.host(machine)}"]

    def start(self) -> None:
        """One after the other, so that neighbours in the pipeline are neighbours in the alphabet."""
        for number, machine in enumerate(self.machines, start=1):
            self.run.start(machine, number)
            if number < len(self.machines):
                here = f"{number} of {len(self.machines)} machines are here"
                self.run.until(lambda here=here: here in self.run.output(), here)  # type: ignore[misc]

    def said(self, event: str, after: float, **fields: object) -> list[dict[str, Any]]:
        self._trace += self._tail.read()
        found = [each for each in self._trace if each["event"] == event and each["t"] > after]
        return sorted((each for each in found if fields.items() <= each.items()), key=lambda each: each["t"])


def undisturbed(directory: Path, machines: str) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        site = Site(directory, machines, stack, "usual", 1)
        site.start()
        return site.run.digests()


def disturbed(
    directory: Path, name: str, wanted: dict[str, Any], detect: str, copies: int, machines: str, lost: str
) -> Row:
    with contextlib.ExitStack() as stack:
        site = Site(directory, machines, stack, detect, copies)
        run = site.run
        site.start()
        run.until(lambda: run.said("loss"), "the first step")
        for number, spare in enumerate(SPARES[: len(lost)]):
            run.start(spare, len(machines) + number)
        waiting = f"{len(machines) + len(lost)} machines are here"
        run.until(lambda: waiting in run.output(), "the spare machines")
        silent = events.now()
        for machine in lost:
            site.network.isolate(machine)
        for machine in lost:
            site.servers[machine].kill()
            run.lose(machine)
        run.until(lambda: _running(site, silent), "the job to run again")
        figures: dict[str, object] = {
            "fenced_s": site.said("fenced", silent)[0]["t"] - silent,
            "log_servers_lost_s": site.said("log_server_lost", silent)[-1]["t"] - silent,
            "running_s": _running(site, silent) - silent,
            "generations": len(site.said("state", silent, state="FENCING")),
        }
        plans = [event["reason"] for event in site.said("plan", silent)]
        equal = run.digests() == wanted
    figures = {key: f"{value:.1f}" if isinstance(value, float) else value for key, value in figures.items()}
    return row(name, "" if equal else "other bits", **figures, plan=plans[-1] if plans else "none")


def _running(site: Site, silent: float) -> float:
    """When all lost ranks had been fenced and the job ran again; 0 if it does not yet."""
    fenced = site.said("fenced", silent)
    again = site.said("state", fenced[-1]["t"], state="RUNNING") if fenced else []
    return float(again[-1]["t"]) if again else 0.0
