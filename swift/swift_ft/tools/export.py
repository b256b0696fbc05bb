"""`swift-ft export`: writes a version of a job in a format that needs no swift-ft."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from swift_ft.cli_parser import Parser, argument, checkpoint_place, command, number
from swift_ft.errors import UsageError
from swift_ft.text import job_called, scheme_of, tell


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the options, checked, with the job's checkpoint directory. Raises UsageError."""
    parser = Parser(
        prog="swift-ft export",
        description="Writes a version of a job as a directory that torch.distributed.checkpoint.load opens.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit codes: 0 done, 2 usage, 3 no version is whole (or not the one named)",
    )
    parser.add_argument(
        "--checkpoint-dir",
        type=argument(checkpoint_place),
        required=True,
        metavar="DIR",
        help="as swift-ft run was given it",
    )
    parser.add_argument("--job", type=argument(job_called), required=True, help="the job's name")
    parser.add_argument(
        "--version",
        type=number(int, 0),
        metavar="V",
        help="export this version (default: the newest one that is whole)",
    )
    parser.add_argument(
        "--ranks",
        type=number(int, 1),
        metavar="N",
        help="the job's number of ranks (default: as many as have saved something)",
    )
    parser.add_argument("target", metavar="DIRECTORY", help="what is made; it must not be there yet")
    given = parser.parse_args(argv)
    given.directory = f"{given.checkpoint_dir}/{given.job}"
    given.target = Path(given.target).absolute()
    if scheme_of(given.directory) is None and not Path(given.directory).is_dir():
        raise UsageError(
            f"there is no directory {given.directory}: --checkpoint-dir and --job must be those of swift-ft run"
        )
    if not given.target.parent.is_dir():
        raise UsageError(f"there is no directory {given.target.parent}")
    if given.target.exists() or given.target.is_symlink():
        raise UsageError(f"{given.target} is there already: give another place")
    return given


@command
def main(argv: Sequence[str]) -> int:
    config = parse(argv)
    from swift_ft.state import export  # imports torch: after what is wrong with the options was said

    ranks = config.ranks or export.world_size_of(config.directory)
    if not ranks:
        raise UsageError(f"there is no checkpoint in {config.directory}")
    if config.version is None:
        version, states = export.newest(config.directory, ranks, tell)
    else:
        version, states = config.version, export.load_states(config.directory, config.version, ranks)
    exported = export.assemble(states)
    file_bytes = export.write_dcp(config.target, exported)
    tensors, tensor_bytes = export.size_of(exported)
    print(
        f"version {version} of {ranks} ranks: {tensors} tensors, {tensor_bytes} bytes, in {file_bytes} bytes of files; "
        f"torch.distributed.checkpoint.load opens {config.target}"
    )
    return 0
