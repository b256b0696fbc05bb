"""The values that ``swift-ft run`` passes to a rank in its environment variables."""

import os
from dataclasses import dataclass, replace

from swift.errors import UsageError
from swift.names import check_job
from swift.recovery import Assignment, quickest
from swift.recovery.types import QUICKEST
from swift.runtime.config import SessionConfig

ENV_CHECKPOINT_DIR = "SWIFT_CHECKPOINT_DIR"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Which process of which job this is, from its environment variables."""

    rank: int
    """The number of its slot."""
    world_size: int
    coordinator: str
    """host:port"""
    job: str
    incarnation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """A rank's part in the job of a session."""

    place: Place
    assignment: Assignment
    """Of the full world: no slot is vacant."""
    config: SessionConfig
    """As the number of ranks decides it."""
    checkpoint_dir: str
    """The job's own folder in the directory of `--checkpoint-dir`, which jobs may share."""


def place_from_environment() -> Place:
    """Raises UsageError: this process was not started by ``swift-ft run``."""
    try:
        place = Place(
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            coordinator=os.environ["SWIFT_COORDINATOR"],
            job=os.environ["SWIFT_JOB"],
            incarnation=os.environ["SWIFT_INCARNATION"],
        )
    except KeyError as error:
        raise UsageError(f"{error.args[0]} is not set; start the trainer with `swift-ft run`") from None
    check_job(place.job)  # it becomes a part of a path
    return place


def from_environment(config: SessionConfig) -> Launched:
    """Reads the environment. Raises UsageError: this process was not started by ``swift-ft run``, or `config` does not
    fit the number of ranks."""
    place = place_from_environment()
    checkpoints = os.environ.get(ENV_CHECKPOINT_DIR, "")
    if not checkpoints:
        raise UsageError(
            "the job has no directory for checkpoints: name it with `swift-ft run --checkpoint-dir DIR`"
        )
    try:
        assignment = Assignment.grid(place.world_size, replicas=config.replicas, shards=config.shards)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if config.lost_shard == QUICKEST:
        config = replace(config, lost_shard=quickest(assignment.stage_groups, config.replicas))
    if config.shrinks and place.world_size == 1:
        raise UsageError(f"strategy={config.strategy!r} with one rank: nobody is left to go on without it")
    if config.finishes_cut_steps and assignment.stage_groups > 1:
        raise UsageError(
            f"strategy='lossy-forward' with {assignment.stage_groups} pipeline ranks: only replicas of a whole model "
            "finish a step so; use strategy='rollback'"
        )
    if config.drops and assignment.stage_groups > 1:
        raise UsageError(
            f"lost_shard='drop' with {assignment.stage_groups} pipeline ranks: the other ranks of a lost one's "
            "pipeline would have nothing to do; use lost_shard='redistribute'"
        )
    if config.fetch_batches and assignment.stage_groups == 1:
        raise UsageError(
            "fetch_batches=True without pipelines: nobody else has the batches of a lost rank; leave it out, and make "
            "loaders that any rank can make"
        )
    if config.steps_to_snapshot and place.world_size == 1:
        raise UsageError(
            f"strategy={config.strategy!r} with snapshots and one rank: no other one can keep a copy of its state; "
            "start more ranks, or use "
            "strategy='checkpoint'"
        )
    return Launched(
        place=place,
        assignment=assignment,
        config=config,
        checkpoint_dir=os.path.join(checkpoints, place.job),
    )
