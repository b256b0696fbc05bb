"""Clusters, ways and faults that tests share."""

from typing import Any

from swift_ft.lab.goodput import figures, ways
from swift_ft.lab.goodput.ways import Cluster

HOUR, DAY = 3600.0, 86400.0


def cluster(**changes: Any) -> Cluster:
    of: dict[str, Any] = {
        "ranks": 1024,
        "ranks_per_node": 8,
        "replicas": 8,
        "stages": 16,
        "microbatches": 16,
    }
    return Cluster(**(of | changes))


MTBF_S = 30 * DAY
"""Of a node."""


def way(**changes: Any) -> ways.Way:
    of: dict[str, Any] = {
        "name": ways.CHECKPOINT,
        "words": "a way",
        "stop_parts": (("stop", 100.0),),
        "work_s": 1000.0,
        "every_s": 1000.0,
        "save_s": 0.0,
    }
    return ways.Way(**(of | changes))


def request(
    cluster: Cluster, mtbf_s: float, given: dict[str, tuple[float, str]] | None = None, **more: Any
) -> ways.Request:
    return ways.Request(cluster=cluster, mtbf_s=mtbf_s, figures=figures.resolve(given or {}), **more)


def made(
    cluster: Cluster, mtbf_s: float, given: dict[str, tuple[float, str]] | None = None, **more: Any
) -> dict[str, ways.Way]:
    """The ways of a cluster, by name."""
    return {way.name: way for way in ways.Maker(request(cluster, mtbf_s, given, **more)).ways()}
