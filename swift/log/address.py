"""How people name a log server: ``HOST:PORT``, or ``MACHINE=HOST:PORT``."""

import ipaddress
import socket

from swift.errors import UsageError


def parse_server(text: str, flag: str) -> tuple[str, str]:
    """(machine, address). Where no machine is named: this one if the address is loopback, else the address's host.
    Raises UsageError for text of another form."""
    machine, named, address = text.rpartition("=")
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535 or (named and not machine):
        raise UsageError(f"{flag} {text}: write HOST:PORT, or MACHINE=HOST:PORT")
    host = host.strip("[]")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return machine or (socket.gethostname() if loopback else host), address
