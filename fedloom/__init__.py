"""fedloom: personalised, representation-based federated learning. One short file a method; any engine beneath it."""

from fedloom.api import compare, resume, run, table
from fedloom.client import Client
from fedloom.data.batch import Batch
from fedloom.errors import UserError
from fedloom.experiment import Experiment
from fedloom.message import Message
from fedloom.methods import Method
from fedloom.methods import get as method
from fedloom.recipe import Recipe
from fedloom.server import Server
from fedloom.task import Task
from fedloom.trained import load
from fedloom.trained_model import load_model

__all__ = [
    "Batch", "Client", "Experiment", "Message", "Method", "Recipe", "Server", "Task", "UserError",
    "compare", "load", "load_model", "method", "resume", "run", "table",
]  # fmt: skip
