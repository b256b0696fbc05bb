"""`swift-ft token`: creates keys, and tokens signed with them; with --renew it keeps running and renews a token."""

import signal
import uuid
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from swift_ft import tokens
from swift_ft.cli_parser import Parser, command
from swift_ft.credentials import Renewal
from swift_ft.errors import UsageError
from swift_ft.text import job_called, tell
from swift_ft.tokens import Owner, Role, write_file

HOURS_MAX = 24 * 366
_LOOK_EVERY_S = 1.0


def parse(argv: Sequence[str]) -> Namespace:
    """Returns the options, checked: either `new_key`, or key, job and roles. Raises UsageError."""
    parser = Parser(prog="swift-ft token", description="Makes signing keys, and job tokens signed with them.")
    add = parser.add_argument
    add(
        "--new-key",
        type=Path,
        metavar="DIR",
        help="make a key pair: DIR/signing/KID.pem, DIR/verifying/KID.pem",
    )
    add("--key", type=Path, metavar="FILE", help="the signing key, or a link to it")
    add("--job", default="", metavar="NAME", help="the job, or '*' for every job")
    add(
        "--role",
        action="append",
        default=[],
        metavar="ROLE",
        help=f"{', '.join(Role)}; repeat the flag or use commas for several",
    )
    add("--hours", type=float, default=24.0, metavar="H", help="lifetime of the token (default %(default)g)")
    add(
        "--generation",
        type=int,
        metavar="G",
        help="the token is valid until the job's generation is above G, that is until its next recovery (default: in "
        "every generation)",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the token to this file, mode 0600, instead of to the terminal",
    )
    add(
        "--renew",
        action="store_true",
        help="run until SIGTERM: write a new token whenever half of --hours is over, or the key has changed",
    )
    add(
        "--owner",
        default="",
        metavar="USER[:GROUP]",
        help="(as root) the owner of the file of --out; default: you",
    )
    add(
        "--subject",
        default="",
        metavar="NAME",
        help="the bearer, a person or a machine, as the servers' audit trails name it",
    )
    given = parser.parse_args(argv)
    given.roles = frozenset(_role(word) for words in given.role for word in words.split(","))
    given.owner = Owner.parse(given.owner, "token: --owner") if given.owner else None
    _check(given)
    return given


def _check(given: Namespace) -> None:
    if given.new_key is not None:
        if given.key is not None or given.job or given.roles or given.renew or given.owner:
            raise UsageError("token: --new-key makes a key and nothing else; leave the other flags out")
        return
    if given.key is None or not given.job or not given.roles:
        raise UsageError("token: give --new-key DIR, or --key FILE --job NAME --role ROLE")
    if given.job != tokens.EVERY_JOB:
        given.job = job_called(given.job)
    if not 0 < given.hours <= HOURS_MAX:
        raise UsageError(f"token: --hours {given.hours:g}: more than 0, at most {HOURS_MAX}")
    if len(given.subject) > tokens.SUBJECT_MAX or not given.subject.isprintable():
        raise UsageError(f"token: --subject: at most {tokens.SUBJECT_MAX} characters that can be printed")
    if given.generation is not None and given.generation < 1:
        raise UsageError(f"token: --generation {given.generation}: they start at 1")
    if given.renew and given.out is None:
        raise UsageError("token: --renew rewrites a file: name it with --out FILE")
    if given.owner and given.out is None:
        raise UsageError("token: --owner is the owner of a file: name it with --out FILE")
    if given.renew and given.generation is not None:
        raise UsageError("token: --generation is for one generation, --renew for a whole run: leave one out")


def _role(word: str) -> Role:
    try:
        return Role(word.strip())
    except ValueError:
        raise UsageError(f"token: --role {word}: there are {', '.join(Role)}") from None


def run(config: Namespace) -> None:
    """Runs the command: creates a key or a token, or renews one until interrupted. Raises UsageError for an unusable
    file."""
    if config.new_key is not None:
        try:
            signing, verifying = tokens.new_key(config.new_key)
        except OSError as error:
            raise UsageError(
                f"token: --new-key {config.new_key}: {error.strerror}; name a directory that can be written"
            ) from None
        print(f"keep secret, mint with it: {signing}\ngive to servers (--token-keys): {verifying.parent}")
        return
    job, roles, lifetime_s = config.job, config.roles, config.hours * 3600
    if config.renew:
        renewal = Renewal(config.key, config.out, job, roles, lifetime_s, config.owner, config.subject)
        _keep(renewal, config.hours)
        return
    key = tokens.SigningKey.load(config.key, "--key")
    token_id = uuid.uuid4().hex
    token = key.mint(
        job, roles, lifetime_s, generation_max=config.generation, subject=config.subject, token_id=token_id
    )
    tell(f"the token's id, by which it can be revoked (--revoked): {token_id}")
    if config.out is None:
        print(token)
    else:
        write_file(config.out, f"{token}\n".encode(), secret=True, owner=config.owner)


def _keep(renewal: Renewal, hours: float) -> None:
    """Renews the token until SIGTERM or SIGINT. Errors at the start are raised; later ones are printed, and it tries
    again."""
    stop = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    problem = ""
    try:
        renewal.turn()
        tell(f"{renewal.out}: written, good for {hours:g} h; renewed at half of that")
        while signal.sigtimedwait(stop, _LOOK_EVERY_S) is None:
            problem = _turn(renewal, hours, problem)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _turn(renewal: Renewal, hours: float, problem: str) -> str:
    """Renews the token if it is due. Returns what prevents that, which is printed unless it is the `problem` of the
    turn before."""
    try:
        if renewal.turn():
            tell(f"{renewal.out}: renewed, good for {hours:g} h")
        return ""
    except (UsageError, OSError) as error:
        now = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        if now != problem:
            tell(f"{renewal.out}: not renewed, tried again every {_LOOK_EVERY_S:g} s: {now}")
        return now


@command
def main(argv: Sequence[str]) -> int:
    run(parse(argv))
    return 0
