"""Descriptions of methods for the command line: purpose, messages, supported protection, hyperparameters."""

from inspect import cleandoc
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from fedloom import methods
from fedloom.trust.privacy import uncovered
from fedloom.trust.robust import unprotected


def list_one(out: Console, row: dict[str, Any]) -> None:
    """Print a method's entry in the list: name, purpose, what it shares and keeps, hyperparameters, paper."""
    travels = [f"{verb} {', '.join(row[verb])}" for verb in ("shares", "sends", "receives", "keeps") if row[verb]]
    parameters = ", ".join(f"{p['name']}={p['default']}" for p in row["parameters"])
    out.print(f"[bold]{row['name']}[/bold]")
    for line in (row["what"], " · ".join(travels), parameters, row["paper"]):
        if line:
            out.print(Padding(Text(line), (0, 0, 0, 4)))


def method_info(name: str) -> dict[str, Any]:
    """Return the description of one method, as printed by `methods --json`."""
    method = methods.get(name)
    return {
        "name": method.name,
        "what": (method.__doc__ or "").split("\n")[0],
        "more": " ".join(cleandoc(method.__doc__ or "").split("\n")[1:]).strip(),
        "shares": list(method.shares),
        "sends": list(method.sends),
        "receives": list(method.receives),
        "keeps": list(method.keeps),
        "leaves": [] if method.pooled else list(method.up),
        "reveals": {part: says for part, says in method.reveals.items() if part in method.up},
        "robust": unprotected(method) is None,
        "not_robust": unprotected(method),
        "private": uncovered(method) is None,
        "not_private": uncovered(method),
        "global": method.has_global,
        "paper": _paper(type(method)),
        "parameters": [
            {"name": n, "default": default, "what": methods.field_docs(type(method)).get(n, "")}
            for n, default in methods.hyperparameters(type(method)).items()
        ],
    }


def _paper(kind: type[methods.Method]) -> str:
    """Return the method's paper; for a paper inherited from a base method, name that method too."""
    owner = next(one for one in kind.__mro__ if "paper" in vars(one))
    return kind.paper if owner is kind or not kind.paper else f"built on {owner.__name__}: {kind.paper}"


def explain(out: Console, row: dict[str, Any]) -> None:
    """Print the full description of one method."""
    lines = [row["more"]] if row["more"] else []
    for name in ("paper", "shares", "sends", "receives", "keeps"):
        value = row[name] if isinstance(row[name], str) else ", ".join(row[name])
        if value:
            lines.append(f"{name}: {value}")
    leaves = ", ".join(row["leaves"]) or "no tensors"
    lines.append(
        f"leaves a client: {leaves}; number of samples, losses and test results; no images, no individual labels"
    )
    lines += [f"{part} reveals: {says}" for part, says in row["reveals"].items()]
    for name, section in (("robust", "robust rules"), ("private", "differential privacy")):
        lines.append(f"{section}: " + ("yes" if row[name] else f"no, it {row['not_' + name]}"))
    lines += [f"{one['name']} = {one['default']}  {one['what']}" for one in row["parameters"]]
    out.print(f"[bold]{row['name']}[/bold]  {escape(row['what'])}", highlight=False)
    for line in lines:
        out.print(Padding(Text(line), (0, 0, 0, 2)))
