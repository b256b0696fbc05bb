"""What to do about a connection that is not made: gRPC's own words for a server that wants TLS are "Socket closed"."""

import socket
import ssl

from swift.security.channel import ENV_CA, Credentials

_LOOK_S = 1.0
_NOT_BELIEVED = ("CERTIFICATE_VERIFY_FAILED", "certificate signature failure", "Peer name")
_UNSPECIFIC = ("Socket closed", "reset", "eadline", "in time", "within", "Broken pipe", "no reason given")


def advice(address: str, reason: str, credentials: Credentials | None = None) -> str:
    """What is to be done, as far as it can be found out; empty: nobody can tell, or ``said`` tells. May look there, for
    a second."""
    credentials = credentials or Credentials.from_environment()
    if credentials.ca is None:
        if any(words in reason for words in _UNSPECIFIC) and speaks_tls(address):
            return f"it wants TLS: name the CA of its certificate in {ENV_CA}"
        return ""
    if any(words in reason for words in _NOT_BELIEVED):
        return (
            f"its certificate is not signed by the CA in {ENV_CA}, {credentials.ca}, or names another address: "
            "give the CA that has signed it, and an address that it names"
        )
    doubtful = "WRONG_VERSION_NUMBER" in reason or any(words in reason for words in _UNSPECIFIC)
    if doubtful and not speaks_tls(address) and _listens(address):
        return f"it does not speak TLS: start it with --tls-cert and --tls-key, or unset {ENV_CA}"
    return ""


def advised(address: str, reason: str, credentials: Credentials | None = None) -> str:
    """``said``, and what to do about it."""
    more = advice(address, reason, credentials)
    return f"{reason}: {more}" if more else reason


def speaks_tls(address: str) -> bool:
    """Whoever it is: nothing is believed of him."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with _connected(address) as connection:
            _shake_hands(context, connection)
    except (OSError, ValueError):
        return False
    return True


def _shake_hands(context: ssl.SSLContext, connection: socket.socket) -> None:
    """By hand: ``wrap_socket`` of a connection that has just been reset leaves its socket open (Python 3.11)."""
    received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    handshake = context.wrap_bio(received, to_send)
    while True:
        try:
            handshake.do_handshake()
            return
        except ssl.SSLWantReadError:
            connection.sendall(to_send.read())
            if data := connection.recv(1 << 14):
                received.write(data)
            else:
                received.write_eof()


def _listens(address: str) -> bool:
    try:
        _connected(address).close()
    except (OSError, ValueError):
        return False
    return True


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), _LOOK_S)
