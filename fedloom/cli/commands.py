"""The application with all commands. Importing a module adds its commands."""

from fedloom.cli import deploy, look, new, report, reproduce, run, sweep, use
from fedloom.cli.base import app, flow

__all__ = ["app", "deploy", "look", "new", "report", "reproduce", "run", "sweep", "use"]

flow(app)
