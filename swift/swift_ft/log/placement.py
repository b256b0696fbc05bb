"""Placement of the ranks' streams on log servers. Pure functions; only the coordinator decides.

Writers and readers use the placement that it publishes and do not compute their own. All streams of one rank are
placed together, so that a rank waits for as few servers as possible. The rules, in this order:

1. A placed stream stays as long as its server lives: records do not move.
2. Copies lie on different machines if there are enough machines.
3. The first copy lies on the sender's machine, if a server runs there.
4. Otherwise on the server with the fewest senders; a deterministic hash breaks ties.
"""

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from swift_ft.errors import UsageError
from swift_ft.text import split_address

# Notation of a log server on command lines: ``HOST:PORT``, or ``MACHINE=HOST:PORT``.


def parse_server(text: str, flag: str) -> tuple[str, str]:
    """Returns (machine, address). Default machine: this one if the address is loopback, else the address's host.
    Raises UsageError for text of another form."""
    machine, named, address = text.rpartition("=")
    place = split_address(address)
    if place is None or (named and not machine):
        raise UsageError(f"{flag} {text[:80]}: write HOST:PORT, or MACHINE=HOST:PORT")
    host = place[0].strip("[]")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return machine or (socket.gethostname() if loopback else host), address


COPIES_MAX = 2
"""Maximum copies of a rank's streams. A trainer's ring has room for the sequences of this many."""
PATIENCE_S = 60.0
"""Seconds that a writer waits for a server before it raises an error. A server is given up earlier than that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sender:
    rank: int
    host: str
    held: tuple[int, ...] = ()
    """Servers that its streams lie on now, first copy first. Lost servers are ignored."""


def place(
    senders: Sequence[Sender], servers: Mapping[int, str], copies: int, seed: str = ""
) -> dict[int, tuple[int, ...]]:
    """Returns rank -> its servers, first copy first. `servers`: live servers -> their machine.

    The number of copies is `copies`, or the number of servers if that is smaller. `seed` differs between jobs, so that
    ties do not all go to one server.
    """
    placed = {s.rank: [server for server in s.held if server in servers][:copies] for s in senders}
    load = dict.fromkeys(servers, 0)
    for held in placed.values():
        for server in held:
            load[server] += 1
    # First copies first: a sender gets the server on its machine before second copies of others add to its load.
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
    """Returns whether two host names, with or without domain, are one machine. IP addresses are compared exactly."""
    if one == other:
        return bool(one)
    if not one or not other or one[0].isdigit() or other[0].isdigit() or ":" in one + other:
        return False
    short, long = sorted((one.lower(), other.lower()), key=len)
    return short == long or ("." not in short and long.startswith(f"{short}."))


def machines(hosts: Sequence[str]) -> int:
    known: list[str] = []
    for host in hosts:
        if not any(same_machine(host, other) for other in known):
            known.append(host)
    return len(known)


def _weight(seed: str, rank: int, server: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed}/{rank}/{server}".encode())
