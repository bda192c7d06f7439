"""What travels inside Flower's messages: a header, our own bytes, and a signature over both. Never pickle.

TLS ends where Flower's server (or a proxy before it) begins. The signature does not: only the coordinator's key makes
clients work, and only an organisation's own key makes an answer of it.
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
"""Characters of a header."""
SIGNATURE = ec.ECDSA(hashes.SHA384())


def sealed(about: Mapping[str, Any], body: bytes, key: Key) -> RecordDict:
    """Header and bytes, signed."""
    header = json.dumps(about, sort_keys=True)
    record = ConfigRecord({"about": header, "body": body, "signature": key.sign(_signed(header, body), SIGNATURE)})
    return RecordDict({RECORD: record})


def opened(content: RecordDict, key: PublicKey, limit: int = LIMIT) -> tuple[dict[str, Any], bytes]:
    """The inverse; what was not signed with this key, or was changed on its way, is a MessageError."""
    record = content.config_records.get(RECORD)
    refuse_unless(record is not None, "it is none of fedloom's")
    assert record is not None
    refuse_unless(record.keys() == {"about", "body", "signature"}, "it must have about, body and signature")
    header, body, signature = record["about"], record["body"], record["signature"]
    fit = isinstance(header, str) and isinstance(body, bytes) and isinstance(signature, bytes)
    refuse_unless(fit, "about, body or signature is of another type")
    assert isinstance(header, str)
    assert isinstance(body, bytes)
    assert isinstance(signature, bytes)
    refuse_unless(len(header) <= HEADER_LIMIT, f"its header has {len(header)} characters")
    refuse_unless(len(body) <= limit, f"it has {len(body)} bytes, and {limit} are allowed")
    try:
        key.verify(signature, _signed(header, body), SIGNATURE)
    except InvalidSignature:
        raise MessageError(
            "the message is refused: its signature is wrong; it was changed, or is a stranger's"
        ) from None
    return read_json(header, "about"), body


def name_of(content: RecordDict) -> str:
    """Names one message: an answer says what it answers, so that no other can take its place."""
    record = content.config_records[RECORD]
    header, body = record["about"], record["body"]
    assert isinstance(header, str)
    assert isinstance(body, bytes)
    return hashlib.sha256(_signed(header, body)).hexdigest()


def _signed(header: str, body: bytes) -> bytes:
    head = header.encode()
    return b"fedloom-1" + len(head).to_bytes(8, "little") + head + hashlib.sha256(body).digest()
