"""What operators do with the log servers of a world, rightly or wrongly: drawn apart, so that other worlds stay as they
are. Each is a fault of `tests.sim.faults`, with a name.
"""

from swift_ft._pb import coordinator_pb2 as pb
from tests.sim.world import World


def empties(world: World) -> bool:
    """It comes back under its address, with nothing."""
    living = [name for name in world.names if name not in world.lost]
    if not living:
        return False
    world.empty_server(world.operators.choice(living))
    return True


def gives_up(world: World) -> bool:
    """One that lives, maybe with another one in its place; now and then the last one."""
    in_use = [name for name in world.servers_in_use() if world.servers()[name] is not None]
    if not in_use:
        return False
    add = _another(world) if world.operators.random() < 0.5 else ""
    world.say(pb.ChangeLogServersRequest(lost=world.operators.choice(in_use), add=add))
    return True


def adds(world: World) -> bool:
    """One more, or in the place of one that is lost: a new one, or one under an address that was lost, rightly or
    not."""
    in_use = world.servers_in_use()
    gone = [name for name in in_use if name in world.lost]
    lost = world.operators.choice(gone) if gone else ""
    if lost and world.operators.random() < 0.4:
        # Under the same address: it is given up, and then named again.
        world.bring_server(lost)
        world.say(
            pb.ChangeLogServersRequest(lost=lost),
            then=lambda: world.say(pb.ChangeLogServersRequest(add=lost)),
        )
    else:
        world.say(pb.ChangeLogServersRequest(lost=lost, add=_another(world)))
    return True


def _another(world: World) -> str:
    """It serves, or will soon."""
    in_use = world.servers_in_use()
    spare = [name for name in world.names if name not in in_use]
    name = f"log{len(world.names)}"
    if spare and world.operators.random() < 0.7:
        name = world.operators.choice(spare)
    world.bring_server(name)
    return name
