"""Masks: keys from X25519 and HKDF, expanded by AES-256 in counter mode, added to vectors in place."""

from collections.abc import Iterator

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedloom.core.message import MessageError
from fedloom.trust.secure.ring import Ring

CHUNK = 2**20
"""Bytes of a mask in memory at a time."""
KEY_BYTES = 32


def agreed_key(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """Return the key that two members derive from their X25519 key pairs.

    Args:
        private: One member's private key.
        public: The other member's public key.
        purpose: What the key is for; other purposes give independent keys.

    Raises:
        MessageError: The public key is a point of low order, with which the key would not be secret.
    """
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise MessageError("the message is refused: a member's public key is invalid") from None
    return derived_key(secret, purpose)


def derived_key(secret: bytes, purpose: bytes) -> bytes:
    """Derive a key from a secret by HKDF with SHA-256."""
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=b"fedloom secure aggregation: " + purpose).derive(secret)


def public_key(private: bytes) -> bytes:
    """Return the public key of an X25519 private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def new_private_key() -> bytes:
    """Generate an X25519 private key."""
    return X25519PrivateKey.generate().private_bytes_raw()


def add_mask(vector: Ring, key: bytes, *, subtract: bool = False) -> None:
    """Add the mask of a key to a vector, or subtract it, in place and chunk by chunk."""
    operation = np.subtract if subtract else np.add
    start = 0
    for mask in _stream(key, vector.nbytes, vector.dtype):
        part = vector[start : start + len(mask)]
        operation(part, mask, out=part)
        start += len(mask)


def _stream(key: bytes, size: int, dtype: np.dtype[np.unsignedinteger]) -> Iterator[Ring]:
    # A key is used for one mask only, so the counter can start at zero.
    encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    zeros = bytes(min(CHUNK, size))
    for start in range(0, size, CHUNK):
        yield np.frombuffer(encryptor.update(zeros[: size - start]), dtype)
