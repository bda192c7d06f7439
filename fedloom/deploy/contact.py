"""First contact of an organisation with the server: whether it may connect, and otherwise why not."""

import json
import ssl
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from fedloom.deploy.certificates import Key
from fedloom.deploy.door import AHEAD, CLIENT_HEADER, HELLO, VERSIONS_HEADER, accepts_clock, clock_difference
from fedloom.deploy.terms import FederationTerms

TIMEOUT_SECONDS = 5.0
EXPIRED, NOT_YET_VALID, OTHER_HOST = 10, 9, (62, 64)
"""OpenSSL's codes for a certificate that cannot be verified."""
REASONS = ("key", "revoked", "signature", "clock", "duplicate", "starting", "version", "code")
NOTABLE_SECONDS = 1.0
"""Difference between both clocks above which it is logged."""


@dataclass(frozen=True)
class Contact:
    """Answer of the server to a client that asks whether it may connect."""

    reason: str = ""
    """Empty if the client may connect; otherwise `unreachable`, `certificate`, or the server's reason."""
    why: str = ""
    clock_ahead: float | None = None
    """Seconds by which this machine's clock is ahead of the server's, if measured."""
    expires: datetime | None = None
    """End of the server's certificate."""

    @property
    def admitted(self) -> bool:
        """Whether the client may connect."""
        return not self.reason

    @property
    def clock_warning(self) -> str | None:
        """A line about a clock that is still accepted, but not right."""
        if not self.admitted or self.clock_ahead is None or abs(self.clock_ahead) < NOTABLE_SECONDS:
            return None
        return (
            f"this machine's clock is {clock_difference(self.clock_ahead)} the server's; from {AHEAD} s ahead, it is "
            "refused: set it by NTP"
        )


def ask(
    federation: FederationTerms,
    authority: Path,
    key: Key,
    client: str,
    versions: dict[str, str],
    *,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Contact:
    """Ask the server whether this organisation may connect.

    The server ends an earlier connection of this client, so do not ask while a SuperNode runs.

    Args:
        federation: The terms of the federation.
        authority: The certificate of the federation's CA.
        key: The organisation's private key.
        client: Random name of this client process.
        versions: This side's versions.
        now: This machine's clock.

    Returns:
        Whether it may connect, with the reason if not.
    """
    host = f"[{federation.host}]" if ":" in federation.host else federation.host
    url, sent = f"https://{host}:{federation.port}{HELLO}", now()
    signed = sent.isoformat()
    headers = {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(key.public_key())).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, signed.encode())).decode(),
        TIMESTAMP_HEADER: signed, CLIENT_HEADER: client, VERSIONS_HEADER: json.dumps(versions),
    }  # fmt: skip
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except (ssl.SSLError, OSError) as error:
        why = f"'{authority}' is missing or damaged ({error}): get the federation's ca.pem again"
        return Contact("certificate", why)
    try:
        with httpx.Client(verify=context, timeout=TIMEOUT_SECONDS) as http:
            response = http.get(url, headers=headers)
            expires = _expiry(response)
            answer = response.json()
            if not isinstance(answer, dict):
                raise ValueError("the answer is not an object")
    except httpx.HTTPError as error:
        return _no_answer(error, url, authority, now)
    except (ValueError, RecursionError):
        return Contact("unreachable", f"{federation.host}:{federation.port} is not a server of fedloom")
    received, theirs = now(), _time(answer)
    middle = sent + (received - sent) / 2
    ahead = None if theirs is None else (middle - theirs).total_seconds()
    if response.status_code == 200:
        return Contact(clock_ahead=ahead, expires=expires)
    reason = answer.get("reason")
    return Contact(reason if reason in REASONS else "unreachable", str(answer.get("why"))[:500], ahead)


def _expiry(response: httpx.Response) -> datetime | None:
    """Return the end of the certificate of the server that sent a response."""
    found = response.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()
    return None if not found else datetime.fromtimestamp(ssl.cert_time_to_seconds(found["notAfter"]), UTC)


def _time(answer: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(answer["time"])
    except (KeyError, TypeError, ValueError):
        return None


def _no_answer(error: httpx.HTTPError, url: str, authority: Path, now: Callable[[], datetime]) -> Contact:
    """Return why the server did not answer."""
    cause = _certificate_error(error)
    if cause is None:
        return Contact("unreachable", f"{url.removesuffix(HELLO)} does not answer: {error or type(error).__name__}")
    if cause.verify_code in (EXPIRED, NOT_YET_VALID):
        ahead = _unverified_clock(url, now)
        dates = "has expired" if cause.verify_code == EXPIRED else "is not valid yet"
        what = f"the server's certificate, or {authority.name}, {dates}"
        if ahead is not None and not accepts_clock(ahead):
            clock = f"this machine's clock is {clock_difference(ahead)} the server's"
            return Contact("clock", f"{clock}, so that {what} on this machine; set both by NTP", ahead)
        return Contact("certificate", f"{what}: renew it at the server (fedloom deploy renew)", ahead)
    if cause.verify_code in OTHER_HOST:
        return Contact("certificate", f"the server's certificate is for another host: {cause.verify_message}")
    return Contact(
        "certificate", f"the server's certificate is not from this federation's CA ({cause.verify_message}); is "
        f"{authority.name} the federation's?",
    )  # fmt: skip


def _certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Return the error of OpenSSL behind an HTTP error, if there is one."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _unverified_clock(url: str, now: Callable[[], datetime]) -> float | None:
    """Return how far this machine's clock is ahead of that of the unverified server; only for a message to people."""
    try:  # not at `HELLO`, where the server would log a request without a key as a stranger's
        date = httpx.get(url.removesuffix(HELLO), verify=False, timeout=TIMEOUT_SECONDS).headers["date"]
        return (now() - parsedate_to_datetime(date)).total_seconds()
    except (httpx.HTTPError, KeyError, ValueError):
        return None
