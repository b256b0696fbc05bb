"""Machines that are network namespaces: processes on a switch of their own, whose cables can be pulled.

A namespace has no name. It lives as long as a process in it, and that one ends when its standard input does: with
the test's process, however that ends, goes everything that was made. Nothing is added to the network outside.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.patience import eventually

TIMEOUT_S = 20.0
NOBODY = "02:00:00:00:00:99"
"""An Ethernet address that no machine has."""


def impossible() -> str:
    """Why networks cannot be made here."""
    for program in ("ip", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"no {program}: network namespaces cannot be made"
    command = ["unshare", "--net", "--uts", "ip", "link", "add", "b0", "type", "bridge"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces with a bridge cannot be made here: {tried.stderr.strip()}"
    return ""


def skip_where_impossible() -> None:
    if why := impossible():
        pytest.skip(why)


class Network:
    """One namespace for each machine and one for the switch between them."""

    def __init__(self, *machines: str, named: bool = False, own: str = "") -> None:
        """`named`: each has its name for a host name, by which services tell machines apart. `own`: the one of
        `machines` that is the namespace of this process (`alone`)."""
        self._number = {name: number for number, name in enumerate(machines, start=1)}
        self._keepers: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for name in ("switch", *machines):
                if name != own:
                    self._keepers[name] = self._keep()
                self.ip(name, "link", "set", "lo", "up")
            self.ip("switch", "link", "add", "b0", "type", "bridge")
            self.ip("switch", "link", "set", "b0", "up")
            for name in machines:
                self._plug(name)
            for name in machines if named else ():
                self._name(name)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _keep() -> "subprocess.Popen[bytes]":
        """A process in a new namespace, which ends at the end of its input."""
        keeper = subprocess.Popen(["unshare", "--net", "--uts", "cat"], stdin=subprocess.PIPE)
        mine, its = (Path(f"/proc/{who}/ns/net") for who in ("self", keeper.pid))
        eventually(lambda: keeper.poll() is not None or os.readlink(its) != os.readlink(mine), "a namespace")
        assert keeper.poll() is None, "no namespace"
        return keeper

    def _plug(self, name: str) -> None:
        port, pid = self._port(name), str(self._pid(name))
        self.ip("switch", "link", "add", port, "type", "veth", "peer", "name", "e0", "netns", pid)
        self.ip("switch", "link", "set", port, "master", "b0", "up")
        self.ip(name, "address", "add", f"{self.host(name)}/24", "dev", "e0")
        self.ip(name, "link", "set", "e0", "up")

    def _name(self, name: str) -> None:
        named = ["sh", "-c", "echo $0 > /proc/sys/kernel/hostname", name]
        subprocess.run([*self.inside(name), *named], timeout=TIMEOUT_S, check=True)

    def _pid(self, name: str) -> int:
        return self._keepers[name].pid if name in self._keepers else os.getpid()

    def _port(self, name: str) -> str:
        return f"p{self._number[name]}"

    def host(self, name: str) -> str:
        return f"10.77.0.{self._number[name]}"

    def inside(self, name: str) -> Sequence[str]:
        """Words that let a command run on that machine."""
        own = f"/proc/{self._pid(name)}/ns"
        return ("nsenter", f"--net={own}/net", f"--uts={own}/uts")

    def ip(self, name: str, *words: str) -> None:
        done = subprocess.run(
            [*self.inside(name), "ip", *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stderr

    # -- cables -----------------------------------------------------------------------------------------

    def isolate(self, name: str) -> None:
        """Its cable is pulled."""
        self.ip("switch", "link", "set", self._port(name), "down")

    def rejoin(self, name: str) -> None:
        self.ip("switch", "link", "set", self._port(name), "up")

    def lose(self, sender: str, receiver: str) -> None:
        """What one sends to the other goes to nobody, and nobody is told; the other way is open."""
        self.ip(
            sender,
            *("neigh", "replace", self.host(receiver), "lladdr", NOBODY, "dev", "e0", "nud", "permanent"),
        )

    def find(self, sender: str, receiver: str) -> None:
        """Undoes `lose`."""
        self.ip(sender, "neigh", "del", self.host(receiver), "dev", "e0")

    def close(self) -> None:
        """After the processes in it."""
        for keeper in self._keepers.values():
            assert keeper.stdin is not None
            keeper.stdin.close()
        for keeper in self._keepers.values():
            keeper.wait(TIMEOUT_S)
