"""A network device of this machine that is down for a while: ``kind=network``.

The machine is the network namespace in which the launcher runs. The device is one that was named, never another one: it
is set down, and up again with the routes that it had. A launcher in the first namespace of the machine is refused,
because it would cut off whoever else works there; so is one that may not change the device.
"""

import os
import subprocess

from swift.errors import UsageError

_TIMEOUT_S = 10.0
_HOW = "start swift-ft run inside a network namespace of its own (docs/failures.md#network)"


def check(link: str, flag: str) -> None:
    """Raises UsageError, in one line, if that device cannot or must not be set down."""
    try:
        if os.readlink("/proc/self/ns/net") == os.readlink("/proc/1/ns/net"):
            raise UsageError(f"{flag} kind=network: this is the network of the whole machine: {_HOW}")
    except OSError:  # another user's: then it is not ours
        pass
    try:
        routes = _routes(link)
        _ip("link", "set", link, "up")
        restore(link, routes)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        why = " ".join(said.decode(errors="replace").split()) if said else str(error)
        raise UsageError(f"{flag} kind=network: {link} cannot be changed here ({why}): {_HOW}") from None


def cut(link: str) -> list[str]:
    """Sets it down. Its routes, for `restore`. OSError, subprocess.SubprocessError."""
    routes = _routes(link)
    _ip("link", "set", link, "down")
    return routes


def restore(link: str, routes: list[str]) -> None:
    """OSError, subprocess.SubprocessError."""
    _ip("link", "set", link, "up")
    for route in sorted(
        routes, key=lambda route: "via" in route.split()
    ):  # gateways are reached by the others
        _ip("route", "replace", *route.split(), "dev", link)


def _routes(link: str) -> list[str]:
    """Those of IPv4, as the command takes them."""
    shown = _ip("-4", "route", "show", "dev", link).decode().splitlines()
    return [" ".join(word for word in line.split() if word != "linkdown") for line in shown]


def _ip(*words: str) -> bytes:
    return subprocess.run(["ip", *words], capture_output=True, timeout=_TIMEOUT_S, check=True).stdout
