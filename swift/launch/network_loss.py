"""The network of this machine, lost and found again: ``kind=network``.

The machine is the network namespace in which the launcher runs. Its links but the loopback are set down, and up again
with the routes that they had. A launcher that is in the namespace of the whole machine is refused: it would cut off
whoever else works there. So is one that may not change its links.
"""

import os
import subprocess

from swift.errors import UsageError

_TIMEOUT_S = 10.0
_HOW = "start swift-ft run inside a network namespace of its own (docs/failures.md#network)"


def check(flag: str) -> None:
    """Raises UsageError, in one line, if this machine's network cannot or must not be cut."""
    try:
        whole_machine = os.readlink("/proc/self/ns/net") == os.readlink("/proc/1/ns/net")
    except OSError:  # of another user: then it is not ours
        whole_machine = False
    if whole_machine:
        raise UsageError(f"{flag} kind=network: this is the network of the whole machine: {_HOW}")
    try:
        links = _links()
        for link in links[:1]:
            _ip("link", "set", link, "up")
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"{flag} kind=network: links cannot be changed here ({_why(error)}): {_HOW}"
        ) from None
    if not links:
        raise UsageError(f"{flag} kind=network: there is no link but the loopback: {_HOW}")


class Network:
    """(injector) ``cut``, and later ``restore``. Both raise OSError or subprocess.SubprocessError."""

    def __init__(self) -> None:
        self._routes: dict[str, bytes] = {}
        """Of the links that are down."""

    def cut(self) -> None:
        for link in _links():
            self._routes[link] = _ip("route", "save", "dev", link)
            _ip("link", "set", link, "down")

    def restore(self) -> None:
        for link, routes in list(self._routes.items()):
            _ip("link", "set", link, "up")
            # Those that came back with the link are there already.
            subprocess.run(
                ["ip", "route", "restore"], input=routes, capture_output=True, timeout=_TIMEOUT_S, check=False
            )
            del self._routes[link]


def _links() -> list[str]:
    """All but the loopback. Not from /sys, which may show another namespace's."""
    lines = _ip("-o", "link", "show").decode().splitlines()
    names = (line.split(": ")[1].partition("@")[0] for line in lines)
    return sorted(name for name in names if name != "lo")


def _ip(*words: str) -> bytes:
    return subprocess.run(["ip", *words], capture_output=True, timeout=_TIMEOUT_S, check=True).stdout


def _why(error: Exception) -> str:
    said = getattr(error, "stderr", None)
    return " ".join(said.decode(errors="replace").split()) if said else str(error)
