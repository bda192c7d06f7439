"""Facts about methods: summary, what they send and keep, which protections apply, hyperparameters."""

from inspect import cleandoc
from typing import Any

from fedloom import methods
from fedloom.trust.privacy import uncovered
from fedloom.trust.robust import unprotected
from fedloom.trust.secure.settings import unsummable


def method_info(name: str) -> dict[str, Any]:
    """Describe a method as `fedloom methods NAME --json` prints it.

    Args:
        name: A registered method, one with additions (`fedavg+ft`), or a class in a file (`mine.py:Mine`).

    Raises:
        UserError: There is no such method, or its file may not be imported.
    """
    method = methods.get(name)
    summary, *details = cleandoc(method.__doc__ or "").split("\n")
    return {
        "name": method.name,
        "what": summary,
        "more": " ".join(details).strip(),
        "shares": list(method.shares),
        "sends": list(method.sends),
        "receives": list(method.receives),
        "keeps": [*method.keeps, *(f"{layer.__name__.lstrip('_')} layers" for layer in method.keeps_layers)],
        "server_keeps": list(method.server_keeps),
        "leaves": [] if method.pooled else list(method.up),
        "reveals": {part: text for part, text in method.reveals.items() if part in method.up},
        "robust": unprotected(method) is None,
        "not_robust": unprotected(method),
        "private": uncovered(method) is None,
        "not_private": uncovered(method),
        "secure": unsummable(method) is None,
        "not_secure": unsummable(method),
        "global": method.has_global,
        "paper": _paper(type(method)),
        "parameters": [
            {"name": n, "default": default, "what": methods.field_docs(type(method)).get(n, "")}
            for n, default in methods.hyperparameters(type(method)).items()
        ],
    }


def _paper(kind: type[methods.Method]) -> str:
    """Return the method's paper. A paper that is inherited from another method is marked as that of the base method."""
    above = [base for base in kind.__mro__[1:] if issubclass(base, methods.Method) and base.paper == kind.paper]
    bases = [base for base in above if methods.METHODS.get(base.name) is base]  # not abstract
    inherited = "paper" not in vars(kind) and kind.paper and bases
    return f"built on {bases[0].__name__}: {kind.paper}" if inherited else kind.paper
