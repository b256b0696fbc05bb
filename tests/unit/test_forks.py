"""What a trainer forks, a DataLoader's workers say, while this process talks to the services."""

import os
import subprocess
import sys
import textwrap

FORKS = textwrap.dedent(
    """
    import os, threading
    from concurrent.futures import ThreadPoolExecutor
    import swift_ft
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


def test_forks_are_silent() -> None:
    assert said() == ""


def test_grpc_would_speak_if_it_were_let() -> None:
    assert "skipping fork() handlers" in said(GRPC_ENABLE_FORK_SUPPORT="1")
