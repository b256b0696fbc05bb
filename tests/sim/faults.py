"""What goes wrong in a world, when, and for how long: all of it drawn from the world's seed."""

import functools
import random
from collections.abc import Callable

from tests.sim import operators
from tests.sim.server import at
from tests.sim.trainer import Trainer
from tests.sim.world import FAULTS_UNTIL_S, World

_LAST_S = 9.0
"""Most jobs would end soon after it without faults."""


def inject(world: World) -> None:
    chance = world.kernel.random
    if world.log_lost_s or world.operated:
        lose_servers(world)
    if world.operated:
        operate(world)
    if chance.random() < 0.05:
        return  # nothing fails: a world that must not need it
    for _ in range(chance.randint(1, 7)):
        name, fault = chance.choices(FAULTS, WEIGHTS)[0]
        world.kernel.after(chance.uniform(0.3, _LAST_S), _begin, world, name, fault)
    if chance.random() < 0.3:
        world.network.loss = 0.05
    if chance.random() < 0.3:
        world.network.duplicates = 0.05
    if chance.random() < 0.2:
        world.network.slow_s = chance.choice((0.1, 1.0))


def lose_servers(world: World) -> None:
    """For good, in worlds where they can be replaced: one, or now and then all but one; maybe with a rank."""
    chance = world.places
    for _ in range(chance.choice((0, 1, 1, 1, 2))):
        at_s, name = chance.uniform(0.3, _LAST_S), chance.choice(world.names)
        lose = functools.partial(World.lose_server, name=name)
        world.kernel.after(at_s, _begin, world, "a log server lost for good", lose)
        if world.operated:
            world.kernel.after(at_s + world.operators.uniform(0.1, 6.0), _begin, world, *OPERATIONS[0])
        _maybe_with_a_rank(world, chance, at_s, (0.0, 1.0))


def operate(world: World) -> None:
    """Operators, and what they do not know of: at any time, so also while a recovery is under way."""
    chance = world.operators
    for _ in range(chance.randint(1, 4)):
        at_s = chance.uniform(0.3, _LAST_S)
        world.kernel.after(at_s, _begin, world, *chance.choice(OPERATIONS))
        _maybe_with_a_rank(world, chance, at_s, (-1.0, 0.0, 1.0))


def _maybe_with_a_rank(world: World, chance: random.Random, at_s: float, around_s: tuple[float, ...]) -> None:
    if chance.random() < 0.5:
        at_s = max(0.3, at_s + chance.choice(around_s) * chance.random())
        world.kernel.after(at_s, _begin, world, "a rank killed", _rank_killed)


def _begin(world: World, name: str, fault: Callable[[World], bool]) -> None:
    if not world.calm and not world.state.is_over and fault(world):
        world.kernel.count(f"fault: {name}")
        world.kernel.note("fault: {}", name)


def _rank(world: World) -> Trainer | None:
    living = [trainer for trainer in world.trainers if trainer.alive]
    return world.kernel.random.choice(living) if living else None


def _rank_killed(world: World) -> bool:
    trainer = _rank(world)
    if trainer is not None:
        world.kill_trainer(trainer, told=world.kernel.chance(0.85))
    return trainer is not None


def _rank_paused(world: World) -> bool:
    trainer = _rank(world)
    if trainer is not None:
        trainer.pause(world.kernel.between(0.3, 8.0))
    return trainer is not None


def _two_ranks_killed(world: World) -> bool:
    return _rank_killed(world) and _rank_killed(world)


def _connection_broken(world: World) -> bool:
    trainer = _rank(world)
    if trainer is not None:
        for link in trainer.writer.links.values():
            link.break_call()
    return trainer is not None


def _cut(world: World, one: str, other: str) -> None:
    world.network.cut(one, other)
    until_s = min(world.kernel.between(0.3, 6.0), FAULTS_UNTIL_S - world.kernel.now)

    def heal() -> None:
        if not world.calm:
            world.network.heal(one, other)

    world.kernel.after(until_s, heal)


def _rank_and_log_cut(world: World) -> bool:
    trainer = _rank(world)
    if trainer is not None:
        _cut(world, trainer.name, world.kernel.random.choice(world.names))
        for link in trainer.writer.links.values():
            link.break_call()
    return trainer is not None


def _rank_and_coordinator_cut(world: World) -> bool:
    trainer = _rank(world)
    if trainer is not None:
        _cut(world, trainer.name, "coordinator")
    return trainer is not None


def _coordinator_and_log_cut(world: World) -> bool:
    _cut(world, "coordinator", world.kernel.random.choice(world.names))
    return True


def _a_server(world: World) -> str:
    return world.kernel.random.choice(world.names)


def _server_killed(world: World) -> bool:
    world.kill_server(_a_server(world), power=False)
    return True


def _power_cut(world: World) -> bool:
    world.kill_server(_a_server(world), power=True)
    return True


def _server_paused(world: World) -> bool:
    server = world.servers()[_a_server(world)]
    if server is not None:
        server.pause(world.kernel.between(0.3, 4.0))
    return server is not None


def _killed_in_the_middle(world: World) -> bool:
    world.disk(_a_server(world)).crash_in = world.kernel.random.randint(0, 12)
    return True


def _disk_full(world: World) -> bool:
    disk = world.disk(_a_server(world))
    disk.full = True

    def a_person_frees_some() -> None:
        disk.full = False

    world.kernel.after(world.kernel.between(0.5, 5.0), a_person_frees_some)
    return True


def _sync_fails(world: World) -> bool:
    name = _a_server(world)
    disk = world.disk(name)
    disk.failing = True

    def a_person_replaces_it() -> None:
        if disk.failing:
            disk.failing = False
            world.kill_server(name, power=True)

    world.kernel.after(world.kernel.between(0.5, 4.0), a_person_replaces_it)
    return True


def _byte_rots(world: World) -> bool:
    name = _a_server(world)
    stream = world.disk(name).rot()
    world.checkers.damaged |= {at(name, stream)} if stream else set()
    return bool(stream)


def _coordinator_killed(world: World) -> bool:
    coordinator = world.coordinator()
    if coordinator is not None:
        world.coordinator_died()
    return coordinator is not None


def _coordinator_killed_between_effects(world: World) -> bool:
    coordinator = world.coordinator()
    if coordinator is not None:
        coordinator.crash_in = world.kernel.random.randint(0, 12)
    return coordinator is not None


def _coordinator_paused(world: World) -> bool:
    coordinator = world.coordinator()
    if coordinator is not None:
        coordinator.pause(world.kernel.between(0.5, 6.0))
    return coordinator is not None


def _coordinator_taken_over(world: World) -> bool:
    coordinator = world.coordinator()
    if coordinator is not None:
        world.take_over()
    return coordinator is not None


_ALL: tuple[tuple[str, Callable[[World], bool], int], ...] = (
    ("a rank killed", _rank_killed, 10),
    ("two ranks killed", _two_ranks_killed, 3),
    ("a rank paused", _rank_paused, 6),
    ("a connection broken", _connection_broken, 8),
    ("a rank cut off from a log server", _rank_and_log_cut, 3),
    ("a rank cut off from the coordinator", _rank_and_coordinator_cut, 3),
    ("the coordinator cut off from a log server", _coordinator_and_log_cut, 3),
    ("a log server killed", _server_killed, 4),
    ("a log server without power", _power_cut, 5),
    ("a log server killed in the middle of its disk's work", _killed_in_the_middle, 12),
    ("a log server paused", _server_paused, 2),
    ("a disk full", _disk_full, 3),
    ("a disk whose syncs fail", _sync_fails, 2),
    ("a byte rotten", _byte_rots, 3),
    ("the coordinator killed", _coordinator_killed, 3),
    ("the coordinator killed between two effects", _coordinator_killed_between_effects, 3),
    ("the coordinator paused", _coordinator_paused, 2),
    ("the coordinator taken over by another one", _coordinator_taken_over, 3),
)
FAULTS = [(name, fault) for name, fault, _ in _ALL]
WEIGHTS = [weight for _, _, weight in _ALL]
OPERATIONS: tuple[tuple[str, Callable[[World], bool]], ...] = (
    ("an operator adds a log server", operators.adds),
    ("an operator gives up a log server that lives", operators.gives_up),
    ("a log server comes back with an empty disk", operators.empties),
)
"""In some worlds."""
