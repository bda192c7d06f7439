"""The application with all commands. Importing a module adds its commands."""

from fedloom.cli import board, deploy, deploy_operations, look, migrate, new, paper, report, reproduce, run, sweep, use
from fedloom.cli.base import app, flow

__all__ = [
    "app", "board", "deploy", "deploy_operations", "look", "migrate", "new", "paper", "report", "reproduce", "run",
    "sweep", "use",
]  # fmt: skip

flow(app)
