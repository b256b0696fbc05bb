"""What a service says of itself to anybody: whether it serves, and how it is protected."""

from dataclasses import dataclass
from typing import cast

import grpc
from grpc_health.v1 import health_pb2

from swift.errors import ServiceError
from swift.security.advice import advised
from swift.security.channel import Credentials, open_channel
from swift.words import one_line

SECURITY_KEY = "swift-security"


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """One answer of ``grpc.health.v1``."""

    status: str
    """SERVING, NOT_SERVING, …"""
    tls: bool
    mutual_tls: bool
    tokens: bool
    insecure: bool
    """It listens off loopback without TLS or without tokens: somebody said --insecure."""


def check(
    address: str, service: str = "", timeout_s: float = 5.0, credentials: Credentials | None = None
) -> Health:
    """Asks once. Needs no token. ServiceError: no answer; UsageError: see `Credentials.check`."""
    channel = open_channel(address, (("grpc.enable_http_proxy", 0),), credentials)
    ask = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    try:
        answer, call = ask.with_call(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    except grpc.RpcError as error:
        details = cast("grpc.Call", error).details()  # what a failed call raises is the call itself
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
