"""`python -m swift_ft.launch`, which is `swift-ft run`."""

import os
import signal
import sys


def _leave(signum: int, frame: object) -> None:
    os._exit(128 + signum)


if __name__ == "__main__":
    # For the ranks, too. gRPC reads it on import. Processes that a trainer forks (DataLoader workers) never call gRPC,
    # whose fork handlers cannot run while our threads use it, and would print a message at every fork.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # Before there are children, and while modules are being imported, a signal simply ends this process.
    for early in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # An ignored one (nohup) stays ignored, for `swift_ft.launch.children` too.
        if early != signal.SIGHUP or signal.getsignal(early) != signal.SIG_IGN:
            signal.signal(early, _leave)
    from swift_ft.cli_parser import end_process
    from swift_ft.launch.command import main
    from swift_ft.logs import described, end_process_on_uncaught
    from swift_ft.text import outlive_readers, tell

    outlive_readers()
    # The kernel ends the ranks with this process.
    end_process_on_uncaught(lambda error: tell(f"run: {described(error)}; start it again"))
    end_process(lambda: main(sys.argv[1:]))
