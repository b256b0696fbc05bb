"""The frame of both servers' programs: common flags, exit codes, signals, what is announced."""

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from swift_ft import events, logs
from swift_ft.cli_parser import Parser, add_metrics_arguments, end_quietly, write_address
from swift_ft.errors import ServiceError, SwiftError
from swift_ft.logs import end_process_on_uncaught
from swift_ft_services import listening


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--address-file", type=Path, help="host:port is written to this file once it serves")
    listening.add_flags(parser)
    add_metrics_arguments(parser)
    logs.add_arguments(parser)


def run(
    name: str, parse: Callable[[], argparse.Namespace], serve: Callable[[argparse.Namespace], None]
) -> int:
    """Serves until a signal. Returns the exit code. An error is one line in the log."""
    events.configure(name)
    log = logs.Log(name, logs.TEXT, logging.WARNING)
    try:
        arguments = parse()
        log = logs.from_arguments(name, arguments)
        log.start()
        end_process_on_uncaught(log.uncaught)
        serve(arguments)
    except SwiftError as error:
        log.fatal(str(error))
        return error.exit_code
    except OSError as error:
        log.fatal(str(error))
        return ServiceError.exit_code
    except KeyboardInterrupt:  # before it served
        return 130
    return 0


def take_signals(stop: Callable[[], object]) -> None:
    """Makes the first SIGTERM or SIGINT call `stop` (in a thread), and the next one kill the process.

    Called before any other thread is started. A separate thread waits for the signals, because the main one may be
    blocked; the kill is done by the kernel. Everything acknowledged is durable.
    """
    numbers = {signal.SIGTERM, signal.SIGINT}
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # here and in every thread started later

    def wait() -> None:
        number = signal.sigwait(numbers)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        events.emit("signal", number=int(number))
        stop()
        threading.Event().wait()  # the only thread that a second signal can be delivered to

    threading.Thread(target=wait, name="signals", daemon=True).start()


def announce(arguments: argparse.Namespace, who: str, port: int, protection: Mapping[str, bool]) -> None:
    """Announces the address: in a file if one was requested, as an event, and where the log is text as a line."""
    address = f"{arguments.listen.rpartition(':')[0]}:{port}"
    if arguments.address_file is not None:
        write_address(arguments.address_file, address)
    store = getattr(arguments, "store", None)
    where = f"directory {arguments.directory}" if store is None else f"store {store}"
    events.emit("serving", address=address, directory=str(arguments.directory or store), **protection)
    if arguments.log_format == logs.TEXT:
        print(f"{who} on {address}, {where}", flush=True)


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Ends the process without waiting for its threads: what it has acknowledged is durable."""
    os.umask(0o077)  # its files are readable only by its user
    exit_code = end_quietly(main)
    sys.stderr.flush()
    os._exit(exit_code)
