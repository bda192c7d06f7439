"""The application with all commands. Importing a module adds its commands."""

from fedloom.cli import board, deploy, deploy_operations, look, migrate, new, paper, report, reproduce, run, sweep, use
from fedloom.cli.base import app, join_help_lines

__all__ = [
    "app", "board", "deploy", "deploy_operations", "look", "migrate", "new", "paper", "report", "reproduce", "run",
    "sweep", "use",
]  # fmt: skip

join_help_lines(app)
