"""Which log servers keep the streams that a rank writes. Pure; decided by the coordinator alone.

Writers and readers follow what it publishes and compute nothing themselves. All streams of one rank go together,
so that a rank waits for as few servers as can be. The rules, in this order:

1. What is placed stays, as long as its server lives: records do not move.
2. Copies lie on different machines while there are enough of them.
3. The first copy lies on the sender's machine, if a server is there.
4. Else on the server with the least streams; the same hash for everybody breaks ties.
"""

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from swift_ft.errors import UsageError
from swift_ft.text import port_number

# How people name a log server: ``HOST:PORT``, or ``MACHINE=HOST:PORT``.


def parse_server(text: str, flag: str) -> tuple[str, str]:
    """(machine, address). Where no machine is named: this one if the address is loopback, else the address's host.
    Raises UsageError for text of another form."""
    machine, named, address = text.rpartition("=")
    host, colon, port = address.rpartition(":")
    if not colon or not host or port_number(port) is None or (named and not machine):
        raise UsageError(f"{flag} {text[:80]}: write HOST:PORT, or MACHINE=HOST:PORT")
    host = host.strip("[]")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return machine or (socket.gethostname() if loopback else host), address


COPIES_MAX = 2
"""Of what a rank writes: a trainer's ring has room for the sequences of so many."""
PATIENCE_S = 60.0
"""How long a writer waits for a server before it tells its caller. Whoever gives a server up does so before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sender:
    """A rank, as a writer of streams."""

    rank: int
    host: str
    held: tuple[int, ...] = ()
    """The servers that its streams lie on now, first copy first; those that are lost do not count."""


def place(
    senders: Sequence[Sender], servers: Mapping[int, str], copies: int, seed: str = ""
) -> dict[int, tuple[int, ...]]:
    """rank -> its servers, first copy first. `servers`: those that live -> their machine.

    As many copies as asked for, or as there are servers. `seed` differs from job to job, so that ties do not all
    fall on one server.
    """
    placed = {s.rank: [server for server in s.held if server in servers][:copies] for s in senders}
    load = dict.fromkeys(servers, 0)
    for held in placed.values():
        for server in held:
            load[server] += 1
    # First copies first: whoever sits beside a server gets it before others' second copies make it look busy.
    for number in range(copies):
        for sender in sorted(senders, key=lambda s: s.rank):
            mine = placed[sender.rank]
            free = [server for server in servers if server not in mine]
            if len(mine) > number or not free:
                continue
            taken = [servers[server] for server in mine]
            chosen = min(
                free,
                key=lambda server: (
                    any(same_machine(servers[server], other) for other in taken),
                    not (not mine and same_machine(servers[server], sender.host)),
                    load[server],
                    _weight(seed, sender.rank, server),
                ),
            )
            mine.append(chosen)
            load[chosen] += 1
    return {rank: tuple(held) for rank, held in placed.items()}


def same_machine(one: str, other: str) -> bool:
    """Host names, with or without their domain. A number (10.0.0.7) is only like itself."""
    if one == other:
        return bool(one)
    if not one or not other or one[0].isdigit() or other[0].isdigit() or ":" in one + other:
        return False
    short, long = sorted((one.lower(), other.lower()), key=len)
    return short == long or ("." not in short and long.startswith(f"{short}."))


def machines(hosts: Sequence[str]) -> int:
    """How many different ones."""
    known: list[str] = []
    for host in hosts:
        if not any(same_machine(host, other) for other in known):
            known.append(host)
    return len(known)


def _weight(seed: str, rank: int, server: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed}/{rank}/{server}".encode())
