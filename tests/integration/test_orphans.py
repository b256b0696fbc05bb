"""Nobody is left of a machine's job whose launcher was killed with its ranks: what outlives them ends by itself."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from swift_ft import events
from swift_ft.lab.drill.cluster import LAUNCHER, LOG_SERVER, with_environment
from swift_ft.log.sidecar import DRAIN_S
from tests.integration.forked import ForkedCluster
from tests.integration.trainer_world import TRAINERS
from tests.patience import eventually

RANKS = 2


@pytest.mark.timeout(180)
def test_sidecars_outlive_their_ranks_and_the_launcher_no_longer_than_they_may(tmp_path: Path) -> None:
    """They still have records, which the log server does not take."""
    cluster = ForkedCluster(
        tmp_path,
        ranks=RANKS,
        spares=1,
        trainer=[str(TRAINERS / "busy.py")],
        trainer_arguments=["1000000", "-1", "0"],
    )
    with cluster:
        seen = cluster.tail.read()

        def steps(more: int) -> Callable[[], bool]:
            """Whether each rank has begun so many more."""
            known = len(seen)

            def begun() -> bool:
                assert cluster.poll() is None, cluster.output_tail()
                seen.extend(cluster.tail.read())
                ranks = [event["rank"] for event in seen[known:] if event["event"] == "step_begin"]
                return all(ranks.count(rank) >= more for rank in range(RANKS))

            return begun

        eventually(steps(3), cluster.output_tail, 60.0)
        services = cluster.pids
        launcher = services.pop(LAUNCHER)
        os.kill(services[LOG_SERVER], signal.SIGSTOP)
        try:
            eventually(steps(3), cluster.output_tail, 60.0)
            ranks = {event["pid"] for event in seen if event["event"] == "step_begin"}
            sidecars = {event["sidecar_pid"] for event in seen if event["event"] == "sidecar_started"}
            assert len(ranks) == len(sidecars) == RANKS
            for pid in (launcher, *ranks):
                os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()

            def left() -> set[int]:
                return {*with_environment(events.ENV_EVENTS_DIR, str(tmp_path / "events"))} - {
                    *services.values()
                }

            eventually(lambda: left() == sidecars, left)
            eventually(lambda: not left(), left, killed + DRAIN_S + 5.0 - time.monotonic())
        finally:
            os.kill(services[LOG_SERVER], signal.SIGCONT)
