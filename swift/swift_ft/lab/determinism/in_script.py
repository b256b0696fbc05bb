"""Runs a script that has no session, as `python SCRIPT` would, and records its steps.

python -m swift_ft.lab.determinism.in_script SCRIPT [ARGS...]
"""

import os
import sys

from swift_ft.lab.determinism import recorder
from swift_ft.launch.worker import Program, begin_path, run_script


def main(argv: list[str]) -> None:
    script = os.path.abspath(argv[0])
    begin_path(os.path.dirname(os.path.realpath(script)))
    recorder.install(session=False)
    run_script(Program(env={}, script=script, module=False, args=argv[1:], cwd=os.getcwd()))


if __name__ == "__main__":
    main(sys.argv[1:])
