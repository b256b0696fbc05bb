"""What `swift-ft drill --secure` makes for one run: a CA, certificates, a signing key, tokens.

The tokens are so short-lived that the run outlives them (its ranks rest before the last step for that): they are
renewed in their files meanwhile, as `swift-ft token --renew` does it for a run of months.
"""

from pathlib import Path

from swift.drill.config import TOKEN_LIFETIME_S
from swift.security.certificates import PrivateCA
from swift.security.channel import ENV_CA, ENV_CERTIFICATE, ENV_KEY, ENV_TOKEN_FILE
from swift.security.renewal import Renewal
from swift.security.roles import Role
from swift.security.tokens import EVERY_JOB, new_key

LOG_SERVER, COORDINATOR, LAUNCHER = "logserver", "coordinator", "launcher"
"""The processes of a run that the drill starts."""


class Security:
    """Files in `directory`. Both services listen with mutual TLS and take calls with tokens only."""

    def __init__(self, directory: Path, job: str) -> None:
        directory.mkdir(parents=True, mode=0o700)
        ca = PrivateCA(directory)
        self._ca = ca.certificate
        self._server = ca.issue("server", "127.0.0.1")
        self._client = ca.issue("client")
        signing, verifying = new_key(directory)
        self._signing, self._verifying = signing, verifying.parent
        self._tokens: dict[str, Renewal] = {}
        for who, of, roles in (
            (COORDINATOR, EVERY_JOB, [Role.COORDINATOR]),
            (LAUNCHER, job, [Role.WRITER, Role.REPLAYER]),
        ):
            self._tokens[who] = Renewal(signing, directory / f"{who}.token", of, roles, TOKEN_LIFETIME_S)
        self.renew()

    def renew(self) -> list[str]:
        """(every so often) Whose tokens are new ones now."""
        return [who for who, renewal in self._tokens.items() if renewal.turn()]

    def server_flags(self) -> list[str]:
        """The flags with which a service takes callers that have a certificate and a token only."""
        return [
            "--tls-cert",
            str(self._server.certificate),
            "--tls-key",
            str(self._server.key),
            "--tls-client-ca",
            str(self._ca),
            "--token-keys",
            str(self._verifying),
        ]

    def environment(self, name: str) -> dict[str, str]:
        """Of a process and of those that it starts."""
        if name not in self._tokens:
            return {}
        return {
            ENV_CA: str(self._ca),
            ENV_CERTIFICATE: str(self._client.certificate),
            ENV_KEY: str(self._client.key),
            ENV_TOKEN_FILE: str(self._tokens[name].out),
        }
