"""The peers' environments: what is not swift's own is installed apart from it, and never into its environment."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from shutil import rmtree
from types import MappingProxyType

PACKAGES: Mapping[str, tuple[str, str, Sequence[str]]] = MappingProxyType(
    {
        "torchft": ("torchft", "torchft==0.2.0", ()),
        "nvrx": ("nvidia_resiliency_ext.inprocess", "nvidia-resiliency-ext==0.4.1", ("packaging",)),
    }
)
"""Peer -> the module that it needs, the package that has it, and what that package needs and does not name."""
INSTALL_S = 1200.0


class Missing(Exception):
    """Why a peer cannot be had, in one line."""


def python_of(peer: str, directory: Path) -> str:
    """The interpreter of the peer's environment in `directory`, which is made if it is not there. Raises Missing."""
    module, package, more = PACKAGES[peer]
    place = directory / peer
    python = place / "bin" / "python"
    if not python.exists():
        torch = f"torch=={metadata.version('torch').partition('+')[0]}"
        words = [str(python), "-m", "pip", "install", "--quiet", torch, "numpy", package, *more]
        print(f"installing {package} for {peer} in {place}", file=sys.stderr, flush=True)
        try:
            _run([sys.executable, "-m", "venv", str(place)], "venv")
            _run(words, f"pip install {package}")
        except BaseException:
            rmtree(place, ignore_errors=True)  # half an environment would be taken for a whole one
            raise
    _run([str(python), "-c", f"import {module}"], f"import {module}")
    return str(python)


def version_of(peer: str, python: str) -> str:
    """Of the package, with its torch."""
    name = PACKAGES[peer][1].partition("==")[0]
    words = f"import importlib.metadata as m, torch; print(m.version({name!r}), 'torch', torch.__version__)"
    return _run([python, "-c", words], f"the version of {name}").strip()


def _run(words: Sequence[str], what: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{what}: {error}") from None
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise Missing(f"{what}: {lines[-1].strip() if lines else f'exit code {done.returncode}'}")
    return done.stdout
