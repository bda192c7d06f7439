"""Run folders written by hand, so that every number in them is known."""

import json
from pathlib import Path
from typing import Any

import yaml

from fedloom.experiment.run_folder import FORMAT

SUMMARY = {
    "rounds": 2, "seed": 0, "clients": 2, "summary": "last",
    "best": {"global_accuracy": None, "personal_accuracy": None},
    "up_bytes": 0, "down_bytes": 0, "failed": {}, "notes": [], "seconds": 1.0,
}  # fmt: skip


def write_run(
    path: Path, method: str | dict[str, Any] = "fedavg", *, seed: int = 0, rounds: int = 2,
    history: list[dict[str, Any]] = (), clients: list[dict[str, Any]] = (), summary: dict[str, Any] | None = None,
    **data: Any,
) -> Path:  # fmt: skip
    """A folder as `fedloom run` leaves it, as far as the page reads it."""
    path.mkdir(parents=True)
    recipe = {
        "method": {"name": method} if isinstance(method, str) else method,
        "data": {"name": "nowhere", "clients": 2, "partition": "iid"} | data,
        "model": {"name": "mlp"},
        "training": {"rounds": rounds, "epochs": 1, "batch_size": 8},
        "evaluation": {"summary": "last"},
        "seed": seed,
    }
    (path / "versions.json").write_text(json.dumps({"format": FORMAT}))
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    lines = {"metrics.jsonl": history, "clients.jsonl": clients}
    for name, rows in lines.items():
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary is not None:
        (path / "summary.json").write_text(json.dumps(SUMMARY | {"method": recipe["method"]["name"]} | summary))
    return path


def a_round(number: int, **values: Any) -> dict[str, Any]:
    return {
        "round": number, "lr": 0.1, "clients": 2, "failed": {}, "loss": 1.0, "up_bytes": 1_000_000,
        "down_bytes": 2_000_000, "seconds": 0.5, "train_seconds": 0.25, **values,
    }  # fmt: skip


def evaluated(number: int, accuracy: float, std: float = 0.1, **values: Any) -> dict[str, Any]:
    found = {"evaluated": 2, "personal_accuracy": accuracy, "personal_std": std, "personal_worst": accuracy - 2 * std}
    return a_round(number, **found, **values)


def a_client(number: int, right: list[int], total: list[int], train: int = 10) -> dict[str, Any]:
    accuracy = sum(right) / sum(total) if sum(total) else None
    return {
        "client": number, "newcomer": False, "train": train, "accuracy": accuracy, "right": right, "total": total,
        "loss": 1.0,
    }  # fmt: skip


def figures(page: Any) -> dict[str, Any]:
    return {figure.name: figure for section in page.sections for figure in section.figures}
