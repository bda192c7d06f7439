"""Content of Flower's messages: a header, a body of bytes, and a signature over both; never pickle.

TLS ends at Flower's server, or at a proxy in front of it. Signatures hold end to end: clients execute only requests
signed with the coordinator's key, and the server accepts an organisation's answers only if signed with its key.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, RecordDict

from fedloom.core.message import LIMIT, MessageError, read_json, refuse_unless
from fedloom.deploy.certificates import Key, PublicKey

RECORD = "fedloom"
HEADER_LIMIT = 2**20
"""Largest number of characters of a header."""
SIGNATURE = ec.ECDSA(hashes.SHA384())


def sealed(about: Mapping[str, Any], body: bytes, key: Key) -> RecordDict:
    """Sign a header and a body, and pack them into a Flower record.

    Args:
        about: The header; values must be serialisable as JSON.
        body: The content.
        key: The sender's private key.

    Returns:
        The content of a Flower message.
    """
    header = json.dumps(about, sort_keys=True)
    record = ConfigRecord({"about": header, "body": body, "signature": key.sign(_signed(header, body), SIGNATURE)})
    return RecordDict({RECORD: record})


def opened(content: RecordDict, key: PublicKey, limit: int = LIMIT) -> tuple[dict[str, Any], bytes]:
    """Verify and unpack the content of a Flower message.

    Args:
        content: The content of the message.
        key: The sender's public key.
        limit: Largest size of the body in bytes.

    Returns:
        The header and the body.

    Raises:
        MessageError: If the content is malformed, too large, modified, or signed with another key.
    """
    record = content.config_records.get(RECORD)
    refuse_unless(record is not None, "it is not a message of fedloom")
    assert record is not None
    refuse_unless(record.keys() == {"about", "body", "signature"}, "it must have about, body and signature")
    header, body, signature = record["about"], record["body"], record["signature"]
    fit = isinstance(header, str) and isinstance(body, bytes) and isinstance(signature, bytes)
    refuse_unless(fit, "about, body or signature has the wrong type")
    assert isinstance(header, str)
    assert isinstance(body, bytes)
    assert isinstance(signature, bytes)
    refuse_unless(
        len(header) <= HEADER_LIMIT, f"its header has {len(header)} characters, and {HEADER_LIMIT} are allowed"
    )
    refuse_unless(len(body) <= limit, f"it has {len(body)} bytes, and {limit} are allowed")
    try:
        key.verify(signature, _signed(header, body), SIGNATURE)
    except InvalidSignature:
        raise MessageError(
            "the message is refused: its signature is wrong; it was modified, or signed with an unknown key"
        ) from None
    return read_json(header, "about"), body


def name_of(content: RecordDict) -> str:
    """Return a hash that identifies a message; an answer names the request that it answers, so it cannot be swapped."""
    record = content.config_records[RECORD]
    header, body = record["about"], record["body"]
    assert isinstance(header, str)
    assert isinstance(body, bytes)
    return hashlib.sha256(_signed(header, body)).hexdigest()


def _signed(header: str, body: bytes) -> bytes:
    head = header.encode()
    return b"fedloom-1" + len(head).to_bytes(8, "little") + head + hashlib.sha256(body).digest()
