"""One call of grpc.health.v1 to a service: its status, and how it says that it is protected."""

from dataclasses import dataclass
from typing import cast

import grpc
from grpc_health.v1 import health_pb2

from swift_ft.credentials import SECURITY_KEY, Credentials, advised, open_channel
from swift_ft.errors import ServiceError
from swift_ft.text import one_line


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """Answer to one ``grpc.health.v1`` check."""

    status: str
    """SERVING, NOT_SERVING, …"""
    tls: bool
    mutual_tls: bool
    tokens: bool
    insecure: bool
    """True if it listens off loopback without TLS or without tokens: it was started with --insecure."""


def check_service(
    address: str, service: str = "", timeout_s: float = 5.0, credentials: Credentials | None = None
) -> Health:
    """Runs one health check. Needs no token. Raises ServiceError without an answer, UsageError as
    `Credentials.check`."""
    channel = open_channel(address, (("grpc.enable_http_proxy", 0),), credentials)
    ask = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    try:
        answer, call = ask.with_call(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    except grpc.RpcError as error:
        details = cast("grpc.Call", error).details()  # a failed call raises the call itself
        why = advised(address, one_line(details), credentials)
        raise ServiceError(f"{address} does not answer a health check: {why}") from None
    finally:
        channel.close()
    words: set[str] = set()
    for key, value in call.trailing_metadata() or ():
        if key == SECURITY_KEY and isinstance(value, str):
            words = set(value.split(","))
    return Health(
        status=_named(answer.status),
        tls="tls" in words,
        mutual_tls="mutual-tls" in words,
        tokens="tokens" in words,
        insecure="insecure" in words,
    )


def _named(status: int) -> str:
    known = health_pb2.HealthCheckResponse.ServingStatus
    return str(known.Name(status)) if status in known.values() else f"STATUS_{status}"
