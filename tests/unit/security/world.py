"""Keys, certificates and a log server in the test's process that wants them."""

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft._pb import log_pb2
from swift_ft.credentials import Credentials
from swift_ft.log.record import RecordKey
from swift_ft.tokens import COORDINATOR, LOG, Role, SigningKey, new_key, write_file
from swift_ft.tools.credentials import CertificateAuthority
from swift_ft_services.authorization import CallLimits
from swift_ft_services.logserver.state import EngineConfig
from swift_ft_services.program import Protection
from tests.log_client import LogWriter
from tests.unit.log.service import InProcess

DOCUMENT = Path(__file__).parents[3] / "docs" / "security.md"
JOB = "job"
RANK = (Role.WRITER, Role.REPLAYER)


class Keys:
    """A signing key, and tokens in files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.signing, verifying = new_key(directory)
        self.verifying = verifying.parent
        self.key = SigningKey.load(self.signing, "--key")

    def mint(
        self, roles: Iterable[Role], job: str = JOB, lifetime_s: float = 600, generation: int | None = None
    ) -> str:
        return self.key.mint(job, roles, lifetime_s, generation_max=generation)

    def file(self, name: str, token: str) -> Path:
        path = self.directory / f"{name}.token"
        write_file(path, token.encode(), secret=True)
        return path

    def client(self, token: str, name: str = "client") -> Credentials:
        return Credentials(token_file=self.file(name, token))


class Guarded(InProcess):
    """A log server with a gate. Job "job" has generation 1. A context manager."""

    def __init__(
        self,
        keys: Keys | None,
        *,
        ca: CertificateAuthority | None = None,
        mutual: bool = False,
        config: EngineConfig | None = None,
        limits: CallLimits | None = None,
        audit: Path | None = None,
        revoked: Path | None = None,
    ) -> None:
        pair = ca.issue("server", "127.0.0.1", "localhost") if ca is not None else None
        self.protection = Protection(
            listen="127.0.0.1:0",
            certificate=pair.certificate if pair else None,
            key=pair.key if pair else None,
            client_ca=ca.certificate if ca is not None and mutual else None,
            token_keys=keys.verifying if keys is not None else None,
            limits=limits or CallLimits(),
            audit=audit,
            revoked=revoked,
            service="logserver",
        )
        self.gate = self.protection.gate()
        super().__init__(None, config, protection=self.protection, gate=self.gate)


def append(writer: LogWriter, step: int) -> None:
    writer.append("s0.F", RecordKey(step, 0, 0), "uint8", (4,), b"abcd")


def put(writer: LogWriter, step: int) -> None:
    append(writer, step)
    writer.flush(20)


REQUESTS: dict[str, Callable[[str], Any]] = {
    LOG + "Append": lambda job: log_pb2.AppendRequest(
        opens=[log_pb2.Open(job=job, stream="s0.F", generation=1)]
    ),
    LOG + "Read": lambda job: log_pb2.ReadRequest(job=job, stream="s0.F"),
    LOG + "Digests": lambda job: log_pb2.DigestsRequest(job=job, stream="s0.F"),
    LOG + "Inventory": lambda job: log_pb2.InventoryRequest(job=job),
    LOG + "Fence": lambda job: log_pb2.FenceRequest(job=job, generation=1),
    LOG + "Trim": lambda job: log_pb2.TrimRequest(job=job),
    LOG + "Reset": lambda job: log_pb2.ResetRequest(job=job, generation=1),
    LOG + "Status": lambda job: log_pb2.StatusRequest(job=job),
    LOG + "Drop": lambda job: log_pb2.DropRequest(job=job, force=True),
    COORDINATOR + "Join": lambda job: pb.JoinRequest(
        job=job, member=pb.Member(rank=0, incarnation="other"), world_size=1
    ),
    COORDINATOR + "Watch": lambda job: pb.WatchRequest(job=job),
    COORDINATOR + "Heartbeat": lambda job: pb.HeartbeatRequest(job=job, incarnation="i"),
    COORDINATOR + "Report": lambda job: pb.ReportRequest(job=job, incarnation="i", generation=1),
    COORDINATOR + "Ready": lambda job: pb.ReadyRequest(job=job, incarnation="i", generation=1),
    COORDINATOR + "Refuse": lambda job: pb.RefuseRequest(job=job, incarnation="i", generation=1),
    COORDINATOR + "CheckpointDurable": lambda job: pb.CheckpointRequest(job=job, incarnation="i"),
    COORDINATOR + "AskCheckpoint": lambda job: pb.AskCheckpointRequest(
        job=job, incarnation="i", generation=1
    ),
    COORDINATOR + "Measure": lambda job: pb.MeasureRequest(job=job, incarnation="i"),
    COORDINATOR + "Share": lambda job: pb.ShareRequest(job=job, incarnation="i", generation=1),
    COORDINATOR + "Meet": lambda job: pb.MeetRequest(job=job, run="r", leaves=True),
    COORDINATOR + "Measurements": lambda job: pb.MeasurementsRequest(job=job),
    COORDINATOR + "MemberExited": lambda job: pb.ExitRequest(job=job, incarnation="i", exit_code=1),
    COORDINATOR + "Suspect": lambda job: pb.SuspectRequest(job=job, incarnation="i", generation=1),
    COORDINATOR + "Finish": lambda job: pb.FinishRequest(job=job, incarnation="i"),
    COORDINATOR + "ChangeLogServers": lambda job: pb.ChangeLogServersRequest(job=job, add="127.0.0.1:1"),
    COORDINATOR + "Differs": lambda job: pb.DiffersRequest(job=job, reason="because"),
    COORDINATOR + "Rehearsed": lambda job: pb.RehearsedRequest(job=job),
    COORDINATOR + "Revoke": lambda job: pb.RevokeRequest(job=job, incarnation="i", generation=1),
    COORDINATOR + "Vote": lambda job: pb.VoteRequest(job=job, incarnation="i", generation=1, kind=pb.AGREE),
    COORDINATOR + "Fail": lambda job: pb.FailRequest(job=job, reason="because"),
    COORDINATOR + "Status": lambda job: pb.StatusRequest(job=job),
    COORDINATOR + "Stop": lambda job: pb.StopRequest(job=job, run="r", reason="because"),
    COORDINATOR + "Jobs": lambda job: pb.JobsRequest(),
}
"""Method of both services -> a request of a job."""


def documented_roles() -> dict[str, set[Role]]:
    """Who may call what, as docs/security.md says: method -> roles."""
    found: dict[str, set[Role]] = {}
    for row in re.findall(r"^\| `(\w+)`[^|]*\|([^|]*)\|([^|]*)\|$", DOCUMENT.read_text(), re.MULTILINE):
        for service, calls in zip((LOG, COORDINATOR), row[1:], strict=True):
            for call in re.findall(r"`(\w+)`", calls):
                found.setdefault(service + call, set()).add(Role(row[0]))
    return found


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    assert isinstance(error, grpc.Call)
    return error.code()


def touched(path: Path, data: bytes) -> None:
    """Written again, with a time that differs."""
    before = path.stat().st_mtime_ns
    while path.stat().st_mtime_ns == before:
        write_file(path, data, secret=path.suffix != ".pem")
        time.sleep(0.001)
