"""Message tags, all of them: what keeps messages apart that pass between the same two members of a group.

    tags                             what                                              when
    0 …                              torch's schedules, and trainers by hand           in a step
    REPLICA_HEADER … REPLICA_CHUNK+  a state; its chunks are numbered                  in a recovery, or between steps
    BATCHES_SIZE, BATCHES            what a lost rank's loaders would have given       before a step that lacks ranks
    NOTE … INNER_GRADIENTS           a shared replay; buckets are numbered             in a replay
    REROUTED …                       what stages send each other, by microbatch        in a step that lacks ranks
    PROBE                            a message that is timed                           before a step of all ranks
    first_tag(number) …              the collectives of the group with this number     any time

The first six are never under way at once, and stay below `COLLECTIVES`. A tag is an int of C: below 2^31.
"""

import zlib

REPLICA_HEADER, REPLICA_MANIFEST, REPLICA_DIGESTS = 1, 2, 3
REPLICA_CHUNK = 16

NOTE, NOTE_PAYLOAD = 1 << 16, (1 << 16) + 1
BATCHES_SIZE, BATCHES = (1 << 16) + 2, (1 << 16) + 3
WEIGHTS = 1 << 17
GRADIENTS_MASK, GRADIENTS = (1 << 18) - 1, 1 << 18
INNER_ACTIVATIONS, INNER_GRADIENTS = 1 << 19, (1 << 19) + 1

REROUTED = 1 << 19
"""To `COLLECTIVES`."""
PROBE = REROUTED

COLLECTIVES = 1 << 20
"""So many tags each group has for its collectives."""
GROUPS = 1000
"""So many groups have numbers, and as many parts of groups."""


def group_number(label: str) -> int:
    """By which groups over the same connections keep their collectives apart. Parts have numbers of their own."""
    return zlib.crc32(label.encode()) % GROUPS + (GROUPS if "[" in label else 0)


def first_tag(number: int) -> int:
    """Of the collectives of the group with this number (0 to 2 `GROUPS` - 1)."""
    return (1 + number) * COLLECTIVES
