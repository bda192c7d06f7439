"""A client's place in a cohort: runs the client's code up to a `fit`, and continues it when its steps are taken."""

from collections.abc import Callable
from typing import Any

import torch

from fedloom.core.execution import launch
from fedloom.core.job import Job, Result
from fedloom.core.state import State
from fedloom.core.torch_internals import contexts_open
from fedloom.core.workspace import Eager, Steps, Workspace
from fedloom.engines.cuda.coroutine import Coroutine


class Slot:
    """The stepper of a cohort's workspace; the client in it runs as a greenlet."""

    fixed_memory = True

    def __init__(self) -> None:
        self.steps: Steps | None = None
        """Steps that the client waits for."""
        self.means: State = {}
        self.error: Exception | None = None
        """Exception raised by a step of this client."""
        self.result: Result | None = None
        self._work = Coroutine()

    def begin(self, workspace: Workspace, job: Job) -> None:
        """Run a job up to the first steps that it waits for, or to its end."""

        def work() -> None:
            self.result = launch(workspace, job)

        self._work.begin(work)

    def resume(self) -> None:
        """Continue the job after its steps have been taken."""
        self.steps = None
        self._work.resume()

    def cancel(self) -> None:
        """End the job."""
        self.steps = self.error = None
        self._work.cancel()

    def run(self, steps: Steps) -> State:
        """Pause until the cohort has taken the steps."""
        if not steps.plan.sizes or _inside_a_context(steps.workspace):
            return Eager().run(steps)
        steps.workspace.refuse_rebound()
        steps.set_mode()
        self.steps = steps
        self._work.pause()
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error  # becomes this client's result
        finally:
            del error  # its traceback references all frames up to here
        steps.workspace.refuse_rebound()
        return self.means


def guarded(steps: Steps, work: Callable[..., None], *arguments: Any) -> bool:
    """Take one client's steps unless it has failed already; store an exception as the client's error.

    Returns:
        Whether the steps were taken.
    """
    slot = steps.workspace.stepper
    assert isinstance(slot, Slot)
    if slot.error is not None:
        return False
    try:
        work(steps, *arguments)
        return True
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        slot.error = error
        return False


def _inside_a_context(workspace: Workspace) -> bool:
    """Return whether a torch context is active that belongs to the thread and would affect other clients."""
    return torch.is_autocast_enabled(workspace.device.type) or torch.is_inference_mode_enabled() or contexts_open()
