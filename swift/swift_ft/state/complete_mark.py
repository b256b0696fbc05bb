"""The mark of a complete checkpoint, by which a job goes on if its coordinator's state is lost.

The coordinator knows which versions are complete, and nobody else. So the lowest rank marks them beside their shards:

::

    v<version>/complete.json    {"checksum": xxh3 of the rest as JSON, "complete": {…}}

A mark is removed before the first shard of its version is: by whoever prunes it, and by all ranks that restore an older
one. So a mark stands for a version of which every rank's shard is there.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import xxhash

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import ServiceError, UsageError
from swift_ft.state.checkpoint_place import Place, place_at
from swift_ft.text import parse_json

SHARED_BY = ("replicas", "shards", "tensor_parallel")
"""Settings that determine which rank has which part of a checkpoint."""
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "job": str,
    "version": int,
    "generation": int,
    "world_size": int,
    "config": dict,
    "inexact_since": (int, type(None)),
    "inexact_reason": str,
}


def _checksum(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def mark_of(version: int, view: pb.View, config: Mapping[str, str]) -> bytes:
    inexact = view.HasField("inexact_since") and view.inexact_since <= version
    content = {
        "job": view.job,
        "version": version,
        "generation": view.generation,
        "world_size": view.world_size,
        "config": {name: config[name] for name in SHARED_BY if name in config},
        "inexact_since": view.inexact_since if inexact else None,
        "inexact_reason": view.inexact_reason if inexact else "",
    }
    return json.dumps({"checksum": _checksum(content), "complete": content}).encode() + b"\n"


def _read(place: Place, version: int) -> dict[str, Any] | None:
    """Returns what a version's mark says; None if there is none. Raises UsageError if it is damaged."""
    where = f"the mark of version {version} in {place.where}"
    try:
        text = place.marked(version)
        whole = None if text is None else parse_json(text)
    except (OSError, UsageError, ServiceError) as error:
        raise UsageError(f"{where} cannot be read: {error}") from None
    if whole is None:
        return None
    content = whole.get("complete") if isinstance(whole, dict) else None
    if not isinstance(content, dict) or whole.get("checksum") != _checksum(content):
        raise UsageError(f"{where} is damaged: its checksum does not match")
    kinds = {name: isinstance(content.get(name), kind) for name, kind in _KINDS.items()}
    texts = content["config"].items() if kinds["config"] else [(0, 0)]
    if not all(kinds.values()) or not all(isinstance(word, str) for pair in texts for word in pair):
        raise UsageError(f"{where} was written by another version of swift-ft")
    if content["version"] != version or content["generation"] < 0:
        raise UsageError(f"{where} is of version {content['version']}: it was moved here")
    return content


def places(own: Place, given: str) -> list[Place]:
    """Returns where a job's checkpoints may be: its own place, and what --from-checkpoints names, which is that of
    --checkpoint-dir of an earlier run, or the job's own folder in it. Raises UsageError."""
    job = own.where.rpartition("/")[2]
    named = [place_at(f"{given}/{job}"), place_at(given)] if given else []
    return [own, *(place for place in named if place.where != own.where)]


def place_of(own: Place, given: str, version: int) -> Place | None:
    """Returns the place in which this version is complete; None if it is in none."""
    return next((place for place in places(own, given) if place.marked(version) is not None), None)


def find(own: Place, given: str, rank: int) -> pb.Found:
    """Returns the job's complete checkpoints, from the place that has the newest one, and what is wrong with others.
    `own`: the job's place, which ends with its name. Raises UsageError."""
    problems: list[str] = []
    best: tuple[Place, list[dict[str, Any]]] | None = None
    generation = 0
    for place in places(own, given):
        marks = list(_marks(place, own.where.rpartition("/")[2], problems))
        shards = [shard for version in place.versions() for shard in place.shards(version, rank)]
        saved = [shard.generation for shard in shards if shard.whole]
        generation = max([generation, *(mark["generation"] for mark in marks), *saved])
        if marks and (best is None or marks[-1]["version"] > best[1][-1]["version"]):
            best = place, marks
    found = pb.Found(generation=generation, problem="; ".join(problems)[:2000])
    if best is None:
        return found
    newest = best[1][-1]
    alike = ("world_size", "config")
    found.versions.extend(
        mark["version"] for mark in best[1] if all(mark[name] == newest[name] for name in alike)
    )
    found.world_size, found.place = newest["world_size"], best[0].where
    found.config.update(newest["config"])
    if newest["inexact_since"] is not None:
        found.inexact_since, found.inexact_reason = newest["inexact_since"], newest["inexact_reason"]
    return found


def _marks(place: Place, job: str, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the content of the job's marks, by version. Version 0 is left out: it is where a job begins anyway."""
    for version in place.versions():
        try:
            mark = _read(place, version)
        except UsageError as error:
            problems.append(str(error))
            continue
        if mark is not None and mark["job"] != job:
            problems.append(f"{place.where} has checkpoints of job {mark['job']}: say --job {mark['job']}")
        elif mark is not None and version:
            yield mark
