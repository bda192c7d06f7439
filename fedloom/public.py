"""What `import fedloom` gives."""

from fedloom.api import compare, resume, resume_comparison, run, table
from fedloom.client import Client
from fedloom.data.batch import Batch
from fedloom.errors import UserError
from fedloom.experiment import Experiment
from fedloom.message import Message
from fedloom.methods import Method
from fedloom.methods import get as method
from fedloom.recipe import Recipe
from fedloom.runs.sweeping import sweep
from fedloom.server import Server
from fedloom.task import Task
from fedloom.use.trained import load
from fedloom.use.trained_model import load_model

__all__ = [
    "Batch", "Client", "Experiment", "Message", "Method", "Recipe", "Server", "Task", "UserError",
    "compare", "load", "load_model", "method", "resume", "resume_comparison", "run", "sweep", "table",
]  # fmt: skip
