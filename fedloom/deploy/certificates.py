"""Certificates and keys of a federation: its CA, the server's certificate, and a key pair for each party."""

import os
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import NameOID

from fedloom.core.errors import UserError
from fedloom.experiment.files import write_whole

Key = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
LOOPBACK = ("localhost", "127.0.0.1", "::1")
AUTHORITY_DAYS, SERVER_DAYS = 3652, 365
"""Validity of the CA's certificate (ten years) and of the server's."""
WARNING_DAYS = 30
"""Days before the end of a certificate from which both sides warn."""


def new_key() -> Key:
    """Generate a private key on the curve P-384, which Flower's nodes use."""
    return ec.generate_private_key(ec.SECP384R1())


def make_authority(name: str, days: int = AUTHORITY_DAYS, key: Key | None = None) -> tuple[Key, x509.Certificate]:
    """Create a certificate authority for one federation, or a new certificate for its key.

    Args:
        name: Name of the federation.
        days: Validity of the certificate.
        key: The key of an existing CA, whose certificate is renewed; by default a new key.

    Returns:
        The private key and the self-signed certificate.
    """
    key = key or new_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fedloom CA of {name}"[:64])])
    certificate = (
        _unsigned(subject, subject, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(certificates=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    return key, certificate


def make_server_certificate(
    authority: tuple[Key, x509.Certificate], host: str, days: float = SERVER_DAYS
) -> tuple[Key, x509.Certificate]:
    """Create the server's TLS certificate.

    It is valid for `host` and for loopback addresses, which Flower's processes use to talk to each other.

    Args:
        authority: Key and certificate of the CA.
        host: Name or address of the server.
        days: Validity of the certificate; it ends at the latest with the CA's.

    Returns:
        The private key and the certificate.
    """
    ca_key, ca = authority
    key = new_key()
    days = min(days, (ca.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
    names = [_name(one) for one in dict.fromkeys((host, *LOOPBACK))]
    certificate = (
        _unsigned(subject, ca.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(_usage(certificates=False), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    return key, certificate


def write_certificate(path: Path, certificate: x509.Certificate) -> None:
    """Write a certificate as PEM."""
    write_whole(path, certificate.public_bytes(Encoding.PEM))


def write_tls_key(path: Path, key: Key) -> None:
    """Write a private key as PEM, readable only by its owner."""
    write_secret(path, tls_key_bytes(key))


def write_key_pair(folder: Path, name: str, key: Key) -> None:
    """Write NAME.key (readable only by its owner) and NAME.pub in OpenSSH format, which Flower reads."""
    write_secret(folder / f"{name}.key", key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    (folder / f"{name}.pub").write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))


def tls_key_bytes(key: Key) -> bytes:
    """Return a private key as PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def read_tls_key(path: Path) -> Key:
    """Read a private key in PEM, such as `ca.key`.

    Raises:
        UserError: If the file cannot be read or is not an ECDSA key.
    """
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"'{path}' is not a private key ({error}); give the federation's ca.key") from None
    if not isinstance(key, Key):
        raise UserError(f"'{path}' is not an ECDSA key; give the federation's ca.key")
    return key


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate in PEM.

    Raises:
        UserError: If the file cannot be read or is not a certificate.
    """
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"'{path}' is not a certificate ({error}); `fedloom deploy init` and `renew` write it"
        ) from None


def expiry_warning(name: str, end: datetime) -> str | None:
    """Return a line about a certificate that has expired or will within 30 days; otherwise None.

    Args:
        name: Name of the certificate, `server.pem` or `ca.pem`.
        end: End of its validity.
    """
    left = (end - datetime.now(UTC)) / timedelta(days=1)
    if left > WARNING_DAYS:
        return None
    remedy = "run fedloom deploy renew" + (" --authority and send ca.pem to all" if name == "ca.pem" else "")
    when = f"has expired on {end:%Y-%m-%d %H:%M} UTC" if left <= 0 else f"expires on {end:%Y-%m-%d}, in {left:.0f} days"
    return f"{name} {when}: {remedy}"


def write_secret(path: Path, data: bytes) -> None:
    """Create a file that only its owner can read; existing files are not overwritten."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def read_key(path: Path) -> Key:
    """Read a private key in OpenSSH format.

    Raises:
        UserError: If the file cannot be read, is not an ECDSA key, or is readable by other users.
    """
    try:
        open_to_others = path.stat().st_mode & 0o077
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise UserError(f"'{path}' is not a private key ({error}); `fedloom deploy init` creates keys") from None
    if open_to_others:
        raise UserError(f"'{path}' can be read by other users: run chmod 600 {path}")
    if not isinstance(key, Key):
        raise UserError(f"'{path}' is not an ECDSA key: create one with ssh-keygen -t ecdsa -b 384")
    return key


def read_public_key(path: Path) -> PublicKey:
    """Read a public key in OpenSSH format.

    Raises:
        UserError: If the file cannot be read or is not an ECDSA key.
    """
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"'{path}' is not a public key ({error}); `fedloom deploy init` creates keys") from None
    if not isinstance(key, PublicKey):
        raise UserError(f"'{path}' is not an ECDSA key: create one with ssh-keygen -t ecdsa -b 384")
    return key


def _unsigned(subject: x509.Name, issuer: x509.Name, key: Key, days: float) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(days=min(days, 0), hours=-1))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, key_cert_sign=certificates, crl_sign=certificates, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)
