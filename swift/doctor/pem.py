"""Certificates and keys in PEM files, as far as the doctor looks at them. ValueError: it is not one."""

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key


def read_certificate(data: bytes) -> tuple[float, float]:
    """(valid from, valid to) in seconds since 1970; of several, the one that ends first. Raises ValueError for
    anything else."""
    try:
        certificates = x509.load_pem_x509_certificates(data)
    except ValueError:
        raise ValueError("not a certificate in PEM") from None
    first = min(certificates, key=lambda certificate: certificate.not_valid_after_utc)
    return first.not_valid_before_utc.timestamp(), first.not_valid_after_utc.timestamp()


def read_key(data: bytes) -> PrivateKeyTypes:
    try:
        return load_pem_private_key(data, None)
    except TypeError:
        raise ValueError("the key is encrypted: give one without a passphrase") from None
    except ValueError:
        raise ValueError("not a private key in PEM") from None


def same_key(certificate: bytes, key: bytes) -> bool | None:
    """None: the certificate cannot be read, which is said elsewhere."""
    try:
        mine = x509.load_pem_x509_certificates(certificate)[0].public_key()
    except ValueError:
        return None
    theirs = read_key(key).public_key()
    plain = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return mine.public_bytes(*plain) == theirs.public_bytes(*plain)
