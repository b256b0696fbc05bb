"""What a trainer forks, a DataLoader's workers say, while this process talks to the services."""

import ast
import os
import subprocess
import sys
import textwrap

FORKS = textwrap.dedent(
    """
    import os, threading
    from concurrent.futures import ThreadPoolExecutor
    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    server = grpc.server(ThreadPoolExecutor(4))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(f"127.0.0.1:{port}"))

    def watch(began):  # as a session's threads
        stream = stub.Watch(health_pb2.HealthCheckRequest())
        next(stream)
        began.set()
        list(stream)

    for _ in range(3):
        began = threading.Event()
        threading.Thread(target=watch, args=(began,), daemon=True).start()
        began.wait()
    for _ in range(4):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    os._exit(0)
    """
)


def said(**env: str) -> str:
    """Returns what the trainer prints, with these variables on top of those that the launcher gives it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        env={**own, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stderr


def of_launcher() -> dict[str, str]:
    """What the launcher has in its environment, which it gives to its ranks."""
    program = (
        "import os, runpy, sys; sys.argv = ['run', '--help']\n"
        "try: runpy.run_module('swift_ft.launch', run_name='__main__')\n"
        "except SystemExit: sys.stderr.write(repr({k: v for k, v in os.environ.items() if k.startswith('GRPC_')}))"
    )
    own = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=own, capture_output=True, text=True, timeout=60, check=True
    )
    return dict(ast.literal_eval(done.stderr))


def test_forks_are_silent() -> None:
    assert said(**of_launcher()) == ""


def test_grpc_would_speak_if_it_were_let() -> None:
    assert "skipping fork() handlers" in said(GRPC_ENABLE_FORK_SUPPORT="1")
