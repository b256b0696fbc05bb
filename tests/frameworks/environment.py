"""A virtual environment with one framework. All else, this checkout and torch among it, is `.venv`'s."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".frameworks"
PINS: dict[str, tuple[str, ...]] = {
    "loaders": ("torchdata==0.11.0", "datasets==4.7.0", "torchtitan==0.3.0"),
    "lightning": ("lightning==2.6.6",),
    "transformers": ("transformers==5.24.0", "accelerate==1.15.0"),
    "torchtitan": ("torchtitan==0.3.0", "triton==3.9.0"),
}
"""framework → packages"""
INTEGRATIONS = {"lightning": "lightning", "transformers": "huggingface", "torchtitan": "torchtitan"}
"""framework → module of `swift_ft.integrations`; loaders need none"""
_INSTALL_LIMIT_S = 1800.0


class Unavailable(Exception):
    """A package cannot be had here. The message is one line."""


def ensure(framework: str, pins: tuple[str, ...] = ()) -> Path:
    """Returns the interpreter of the framework's environment, which is made if its pins have changed. `pins`: if they
    are not those of `PINS`. Raises Unavailable."""
    place = FOLDER / framework
    python, stamp = place / "bin" / "python", place / "installed"
    pins = pins or PINS[framework]
    wanted = "\n".join((sys.prefix, *pins))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"{framework}: installing {', '.join(pins)}", file=sys.stderr, flush=True)
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "of_the_checkout.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    # An empty file of constraints takes the place of one that this machine's configuration may name.
    environment = os.environ | {"PIP_CONSTRAINT": os.devnull}
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=_INSTALL_LIMIT_S
    )
    if done.returncode:
        raise Unavailable(f"pip: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    stamp.write_text(wanted)
    return python
