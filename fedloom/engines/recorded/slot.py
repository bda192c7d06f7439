"""A client's place in a cohort: runs the client's code up to a `fit`, and continues it when its steps are taken."""

from collections.abc import Callable
from typing import Any

import torch

from fedloom.core.execution import launch
from fedloom.core.job import Job, Result
from fedloom.core.state import State
from fedloom.core.torch_internals import contexts_open
from fedloom.core.workspace import Eager, Steps, Workspace
from fedloom.engines.recorded.coroutine import Coroutine
from fedloom.engines.recorded.schedule import Remaining


class Slot:
    """The stepper of a cohort's workspace; the client in it runs as a greenlet."""

    fixed_memory = True

    def __init__(self) -> None:
        self.job: int | None = None
        """Number of the job that the slot runs; None if it is free."""
        self.steps: Steps | None = None
        """Steps that the client waits for."""
        self.left: Remaining | None = None
        """Those of them that have not been taken; None before they are prepared."""
        self.means: State = {}
        self.error: Exception | None = None
        """Exception raised by a step of this client."""
        self.result: Result | None = None
        self._work = Coroutine()

    def begin(self, workspace: Workspace, number: int, job: Job) -> None:
        """Run a job up to the first steps that it waits for, or to its end."""

        def work() -> None:
            self.result = launch(workspace, job)

        self.job = number
        self._work.begin(work)

    @property
    def waits(self) -> bool:
        """Whether the job waits for steps."""
        return bool(self.left)

    @property
    def ended(self) -> bool:
        """Whether the job has ended, so that its result can be collected."""
        return self.job is not None and self.steps is None

    def resume(self) -> None:
        """Continue the job after its steps have been taken."""
        self.steps = self.left = None
        self._work.resume()

    def collect(self) -> Result:
        """Return the result of the job that has ended, and free the slot."""
        result = self.result
        assert result is not None
        self.job = self.result = None
        self.means = {}
        return result

    def cancel(self) -> None:
        """End the job."""
        self._work.cancel()  # first: its clean-up code may call `fit`
        self.job = self.steps = self.left = self.error = self.result = None
        self.means = {}

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
        if slot.left is not None:
            slot.left.clear()
        return False


def _inside_a_context(workspace: Workspace) -> bool:
    """Return whether a torch context is active that belongs to the thread and would affect other clients."""
    return torch.is_autocast_enabled(workspace.device.type) or torch.is_inference_mode_enabled() or contexts_open()
