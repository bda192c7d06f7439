"""Entries of an organisation's audit log: what was asked, why it was refused, and what left."""

from typing import Any

from fedloom.core.job import Result
from fedloom.deploy.consent import RefusalError
from fedloom.deploy.limits import LimitError
from fedloom.deploy.terms import VersionError


def reason_of(refusal: Exception) -> str:
    """Return one word for a refusal: version, code, consent, limits or message."""
    if isinstance(refusal, VersionError):
        return refusal.reason
    if isinstance(refusal, RefusalError):
        return "consent"
    return "limits" if isinstance(refusal, LimitError) else "message"


def asked(about: dict[str, Any], kind: object) -> dict[str, Any]:
    """Return what a request asks for.

    Args:
        about: The header of the request, as received.
        kind: Kind of the job, or stage of secure aggregation; None for other requests.
    """
    found = {"asked": about.get("what"), "kind": kind, "run": about.get("run"), "round": about.get("round")}
    short = (int, type(None))
    return {name: value if isinstance(value, short) else f"{value!s:.100}" for name, value in found.items()}


def what_left(result: Result) -> dict[str, Any]:
    """Return what a result reveals to the server: the size of an update with its loss, or scores."""
    if result.message is not None:
        return {"tensors": len(result.message.signature), "bytes": result.message.nbytes, "loss": result.loss}
    if not result.scores:
        return {}
    return {"scores": [{"right": scores.right, "total": scores.total} for scores in result.scores]}
