"""A member of `swift-ft bench shrink`, of a `swift_ft.Communicator` (run by swift-ft run) or of MPI (by mpiexec).

    shrink_members.py swift|mpi DIRECTORY

The last member kills itself, and the others continue without it, until two are left. The victim writes the time to
DIRECTORY just before; the others write when the error came, when they had shrunk, and when they had agreed. Times are
those of the machine's monotonic clock.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

LEFT_MIN = 2
PAUSE_S = 0.3
"""Pause before a kill, so that the effects of the last loss are over and the others wait in the barrier."""


class SwiftMembers:
    errors: type[Exception] = RuntimeError

    def __init__(self) -> None:
        import swift_ft

        self.communicator = swift_ft.Communicator.from_env()

    def size(self) -> int:
        return self.communicator.size

    def rank(self) -> int:
        return self.communicator.rank

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier()

    def recover(self) -> None:
        self.communicator.revoke()
        self.communicator.shrink()

    def agree(self) -> None:
        self.communicator.agree(1)


class MpiMembers:
    def __init__(self) -> None:
        import torch  # noqa: F401  (a trainer's process has it, and the kernel takes its time to end such a large one)
        from mpi4py import MPI

        self._returns = MPI.ERRORS_RETURN
        self.errors: type[Exception] = MPI.Exception
        self._use(MPI.COMM_WORLD.Dup())

    def _use(self, world: Any) -> None:
        self._world = world
        world.Set_errhandler(self._returns)

    def size(self) -> int:
        return int(self._world.Get_size())

    def rank(self) -> int:
        return int(self._world.Get_rank())

    def barrier(self) -> None:
        self._world.Barrier()

    def recover(self) -> None:
        self._world.Revoke()
        self._use(self._world.Shrink())

    def agree(self) -> None:
        self._world.Agree(1)


def main() -> None:
    system, directory = sys.argv[1], Path(sys.argv[2])
    if system == "swift":
        swift_members = SwiftMembers()
        with swift_members.communicator:
            _run(directory, swift_members)
        return
    _run(directory, MpiMembers())
    # Skips Open MPI's finalization, which is not measured here: with lost members it may hang.
    os._exit(0)


def _run(directory: Path, members: SwiftMembers | MpiMembers) -> None:
    while members.size() > LEFT_MIN:
        before, last = members.size(), members.rank() == members.size() - 1
        members.barrier()
        if last:
            time.sleep(PAUSE_S)
            _write(directory / f"{before}-killed.json", {"killed": time.monotonic()})
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            members.barrier()
            raise SystemExit("the barrier ended, though a member never came to it")
        except members.errors:
            error = time.monotonic()
        members.recover()
        shrunk = time.monotonic()
        members.agree()
        agreed = time.monotonic()
        said = {"error": error, "shrunk": shrunk, "agreed": agreed}
        _write(directory / f"{before}-{members.rank()}.json", said)


def _write(path: Path, said: dict[str, float]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(said))
    part.rename(path)


if __name__ == "__main__":
    main()
