"""A program of Python on a machine with a small file system: `python -m tests.integration.on_tmpfs BYTES DIR -m MODULE
ARGS...` mounts one at DIR, where nobody else sees it. It is gone with the process."""

import os
import subprocess
import sys

import pytest

_SCRIPT = 'mount -t tmpfs -o size="$0" tmpfs "$1" && shift && exec "$@"'
_ALONE = ("unshare", "--mount", "--propagation", "private", "sh", "-c", _SCRIPT)


def skip_where_impossible(place: str) -> None:
    tried = subprocess.run([*_ALONE, "1m", place, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"a file system cannot be mounted here: {tried.stderr.strip()}")


if __name__ == "__main__":
    size, place, *rest = sys.argv[1:]
    os.execvp(_ALONE[0], [*_ALONE, size, place, sys.executable, "-P", *rest])
