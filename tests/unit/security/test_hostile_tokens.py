"""Tokens of every wrong kind, at a server: denied with a status, one line of the trail each, and nothing else."""

import base64
import hmac
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swift_ft._pb import log_pb2
from swift_ft.tokens import TOKEN_BYTES_MAX
from swift_ft_services import authorization
from tests.patience import eventually
from tests.unit.security.test_gate import call
from tests.unit.security.world import JOB, Guarded, Keys

FENCE = log_pb2.FenceRequest(job=JOB, generation=1).SerializeToString()
ODD: tuple[Any, ...] = (None, True, 0, -1, 1.5, "", "x", [], [[]], [None], {}, {"a": 1})
DEEP = "[" * 1500 + "]" * 1500


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def trail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(authorization, "_DENIALS_PER_S", 1e6)
    return tmp_path / "audit.jsonl"


@pytest.fixture
def server(keys: Keys, trail: Path) -> Iterator[Guarded]:
    with Guarded(keys, audit=trail) as server:
        yield server


def part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def signed(keys: Keys, claims: str, header: str = "", key: Ed25519PrivateKey | None = None) -> str:
    """Whatever both say, as text: what no library would write."""
    header = header or json.dumps({"alg": "EdDSA", "kid": keys.key.name})
    body = f"{part(header.encode())}.{part(claims.encode())}"
    return f"{body}.{part((key or keys.key.private).sign(body.encode()))}"


def said(**other: Any) -> dict[str, Any]:
    good = {"aud": "swift", "exp": int(time.time()) + 600, "job": JOB, "roles": ["coordinator"]}
    return {**good, **other}


def wrong_claims() -> Iterator[str]:
    for name in ("job", "exp", "aud"):
        for value in ODD:
            if (name, value) != ("exp", 1.5):
                yield json.dumps(said(**{name: value}))
    for value in ODD:  # of the right type and empty: a bearer who may do nothing
        yield json.dumps(said(roles=value))
    yield json.dumps(said(roles=["king"]))
    for name in ("gen", "sub", "jti", "nbf", "iat"):
        for value in ([], [[]], {}, {"a": 1}, "x" if name in ("gen", "nbf", "iat") else 7):
            yield json.dumps(said(**{name: value}))
    for value in ("7", True, 1.5):
        yield json.dumps(said(gen=value))
    for name in ("aud", "exp", "job", "roles"):
        yield json.dumps({claim: value for claim, value in said().items() if claim != name})
    text = json.dumps(said())
    exp = f'"exp": {said()["exp"]}'
    for number in (
        "1e400",
        "-1e400",
        "NaN",
        "Infinity",
        "-1",
        "0",
        f"{'9' * 3000}",
        f'"{"9" * 12}"',
        "1e-300",
    ):
        yield text.replace(exp, f'"exp": {number}')
    yield json.dumps(said(nbf=time.time() + 3600))
    yield json.dumps(said(iat=time.time() + 3600))
    yield json.dumps(said(gen=0))
    yield text.replace('"job": "job"', '"job": "other", "job": "job"')
    yield text.replace('"job": "job"', '"job": "job", "\\u006aob": "job"')
    yield text.replace('"roles": ["coordinator"]', '"roles": ["writer"], "roles": ["coordinator"]')
    yield text.replace(exp, f'"exp": 1, {exp}')
    yield text.replace('["coordinator"]', f"[{DEEP[:1200]}]")
    yield text[:-1] + f', "x": {DEEP[500:2500]}}}'
    yield from ("", "null", "[]", "7", '"x"', "{", "{}", "\x00", text + text, "[" * 3000)


def wrong_headers(keys: Keys) -> Iterator[str]:
    name = keys.key.name
    for kid in (
        None,
        7,
        [],
        {},
        "",
        "x" * 2000,
        f"../signing/{name}",
        f"./{name}",
        f"{name}\n",
        f"{name}.pem",
    ):
        yield json.dumps({"alg": "EdDSA", "kid": kid})
    for alg in (None, 7, [], {}, "", "none", "None", "HS256", "ES256", "EdDSA ", "eddsa"):
        yield json.dumps({"alg": alg, "kid": name})
    for crit in (None, "exp", [], ["exp"], ["b64"], [7], {}):
        yield json.dumps({"alg": "EdDSA", "kid": name, "crit": crit, "exp": 1, "b64": False})
    yield json.dumps({"alg": "EdDSA", "kid": name, "crit": ["x"], "x": 1})
    yield f'{{"alg": "none", "alg": "EdDSA", "kid": "{name}"}}'
    yield f'{{"alg": "EdDSA", "kid": "x", "kid": "{name}"}}'
    yield f'{{"alg": "EdDSA", "kid": "{name}", "x": {DEEP[200:2800]}}}'
    yield from ("null", "[]", "7", "{", "\x00", "[" * 2900, '{"a":' * 500, "")


def wrong_tokens(keys: Keys) -> Iterator[str]:
    yield from (signed(keys, claims) for claims in wrong_claims())
    good = json.dumps(said())
    yield from (
        signed(keys, good, header) if header else f".{part(b'{}')}." for header in wrong_headers(keys)
    )
    token = signed(keys, good)
    head, claims, signature = token.split(".")
    yield from (
        f"{token}.{signature}",
        f"{head}.{claims}.{signature}.{signature}",
        f"{head}.{claims}.{signature}{signature}",
        f"{head}.{claims}.",
        f"{head}.{claims}",
        f"{head}..{signature}",
        f"{claims}.{head}.{signature}",
        f"{head}.{claims}.{part(bytes(64))}",
        f"{head}.{claims}.{part(b'x' * 63)}",
        f"{token} ",
        f" {token}",
        f"{token},{token}",
        f"{token}=",
        "." * 3000,
        "x" * (TOKEN_BYTES_MAX + 1),
    )
    yield signed(keys, good, key=Ed25519PrivateKey.generate())
    body = f"{part(json.dumps({'alg': 'HS256', 'kid': keys.key.name}).encode())}.{part(good.encode())}"
    public = (keys.verifying / keys.signing.name).read_bytes()
    yield f"{body}.{part(hmac.digest(public, body.encode(), 'sha256'))}"  # signed with what everybody has


def test_each_is_denied_with_one_line_of_the_trail(
    server: Guarded, keys: Keys, trail: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    wrong, known = list(wrong_tokens(keys)), []
    for number, token in enumerate(wrong):
        code, _, _ = call(server.address, "Fence", FENCE, token)
        assert code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED), (number, token)
        known += [token] * (code is grpc.StatusCode.PERMISSION_DENIED)
    assert len(known) == 3, f"another job's, without a role, of generation 0: {known}"
    eventually(lambda: len(trail.read_text().splitlines()) >= len(wrong))
    lines = [json.loads(line) for line in trail.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["denied"] * len(wrong)
    assert caplog.records == []
    assert call(server.address, "Fence", FENCE, signed(keys, json.dumps(said())))[0] is grpc.StatusCode.OK


@pytest.mark.parametrize("subject", ['anna\n{"outcome": "allowed"}', "x\x1b[2J\u202e", "s" * 2000, "\ud83d"])
def test_a_subject_writes_no_line_of_its_own(server: Guarded, keys: Keys, trail: Path, subject: str) -> None:
    token = signed(keys, json.dumps(said(sub=subject, jti=f"id\n{subject[:9]}")))
    assert call(server.address, "Fence", FENCE, token)[0] is grpc.StatusCode.OK
    eventually(trail.read_text)
    (line,) = [json.loads(line) for line in trail.read_text().splitlines()]
    assert line["outcome"] == "allowed"
    assert line["subject"].isprintable()
    assert line["token"].startswith("id ")
    assert len(line["subject"]) <= 128


def test_tokens_that_no_field_has_room_for_are_no_calls(server: Guarded, keys: Keys) -> None:
    """A subject of a MiB: gRPC itself takes no such field, and the next call goes on as before."""
    token = signed(keys, json.dumps(said(sub="s" * (1 << 20))))
    assert call(server.address, "Fence", FENCE, token)[0] in (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNAVAILABLE,
    )
    assert call(server.address, "Fence", FENCE, signed(keys, json.dumps(said())))[0] is grpc.StatusCode.OK
