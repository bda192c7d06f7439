"""A lane of several clients: clients that wait in the same call of `fit` take its steps as one vectorised operation.

Method code is unaware of this: each client's code runs as a greenlet up to a `fit`, and waits there. A client that has
finished makes room for the next one, so that rows are in use although clients have different amounts of data.
"""

import warnings
from collections import deque
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, fx

from fedloom.core.batches import draw
from fedloom.core.flat_state import FlatState
from fedloom.core.job import ENCODED, Job, Result
from fedloom.core.state import copy_all_
from fedloom.core.step_cache import Rows
from fedloom.core.workspace import Steps, Workspace
from fedloom.engines.recorded.batching import batched
from fedloom.engines.recorded.checks import restored, touched, written
from fedloom.engines.recorded.lane import Lane, NewWorkspace, Shared, StepFunction, StepRun, bound, largest
from fedloom.engines.recorded.recorder import Recorder
from fedloom.engines.recorded.schedule import Piece, Remaining, pieces
from fedloom.engines.recorded.slot import Slot, guarded
from fedloom.engines.recorded.tracing import Function, compiled, trace


class Cohort(Lane):
    """Several clients in rows of the same memory. A spare row is used for steps of single clients."""

    def __init__(self, slots: int, new_workspace: NewWorkspace, recorder: Recorder, shared: Shared):
        self.slots = slots
        self._rows = Rows(slots + 1)
        self._slots = [Slot() for _ in range(slots + 1)]
        self._sent: FlatState | None = None
        super().__init__(new_workspace, recorder, shared)
        first = self.workspaces[0]
        self._parts, self._received = (
            FlatState(flat.layout, {dtype: self._block(buffer, 0, slots) for dtype, buffer in flat.buffers.items()})
            for flat in (first.flat, first.flat_received)
        )

    def _make_workspaces(self, new_workspace: NewWorkspace) -> list[Workspace]:
        return [new_workspace(stepper=slot, rows=(self._rows, i)) for i, slot in enumerate(self._slots)]

    def _block(self, tensor: Tensor, row: int, count: int) -> Tensor:
        """Return the first `count` rows for a tensor of one row, or the tensor itself if all rows share it."""
        found = self._rows.block(tensor, row, count)
        return tensor.detach() if found is None else found

    def _blocks(self, tensors: Sequence[Tensor], row: int, count: int) -> list[Tensor]:
        """Return `_block` of several tensors."""
        return [self._block(tensor, row, count) for tensor in tensors]

    def launch(self, jobs: Sequence[Job]) -> list[Result]:
        """Run jobs, as many at a time as there are slots."""
        slots = self._slots[: min(self.slots, len(jobs))]
        queue = deque(enumerate(jobs))
        results: list[Result | None] = [None] * len(jobs)
        self._sent = self._outboxes(len(jobs)) if jobs[0].kind == "update" else None
        try:
            while queue or any(slot.job is not None for slot in slots):
                self._begin(slots, queue)
                self._prepare([slot for slot in slots if slot.steps is not None and slot.left is None], len(slots))
                self._step(slots)
                self._resume(slots)
                self._collect(slots, results)
        except BaseException:
            for slot in slots:
                slot.cancel()
            self._sent = None
            raise
        finally:
            for workspace in self.workspaces:
                workspace.holds = workspace.outbox = None
        return [result for result in results if result is not None]

    def largest(self, results: Sequence[Result]) -> Tensor | None:
        """Return the largest magnitude in each message, in one operation if possible."""
        if self._sent is None or any(result.error is not None for result in results):
            return super().largest(results)
        floating = self._sent.floating()
        return largest(floating) if floating else None

    def _outboxes(self, jobs: int) -> FlatState | None:
        """Allocate memory for all clients' messages; None if not possible."""
        first = self.workspaces[0]
        if first.setup.codec.up is not None or first.setup.intercept is not None:
            return None
        return FlatState(first.sent_layout, first.sent_layout.empty(first.device, (jobs,)))

    def _begin(self, slots: list[Slot], queue: deque[tuple[int, Job]]) -> None:
        """Begin jobs in the free slots."""
        free = [i for i, slot in enumerate(slots) if slot.job is None][: len(queue)]
        coming = [queue.popleft() for _ in free]
        if len(free) > 1 and all(slot.job is None for slot in slots):
            self._spread([job for _, job in coming])
        for i, (number, job) in zip(free, coming, strict=True):
            workspace = self.workspaces[i]
            workspace.outbox = None if self._sent is None else self._sent.row(number)
            slots[i].begin(workspace, number, job)

    @torch.no_grad()
    def _spread(self, jobs: Sequence[Job]) -> None:
        """Load a message into the first workspaces at once, if all jobs have the same one without encoding."""
        message, first = jobs[0].message, self.workspaces[0]
        encoded = jobs[0].kind in ENCODED and first.setup.codec.down is not None
        if encoded or any(job.message is not message for job in jobs):
            return
        own = first.tensors
        if any(n in own and (t.shape, t.dtype) != (own[n].shape, own[n].dtype) for n, t in message.items()):
            return  # each client's load reports the error
        rows = slice(len(jobs))
        first.receive(message, self._parts.row(rows), self._received.row(rows))
        for workspace in self.workspaces[rows]:
            workspace.holds = message

    def _prepare(self, slots: list[Slot], count: int) -> None:
        """Prepare the steps that clients have reached, in few operations if all clients have reached the same call."""
        waiting = [slot.steps for slot in slots if slot.steps is not None]
        draw([steps.plan for steps in waiting])
        for slot, steps in zip(slots, waiting, strict=True):
            slot.left = Remaining(steps.plan)
        if len(waiting) < count or not _all_alike(waiting):
            for steps in waiting:
                guarded(steps, Steps.prepare)
            return
        for block in self._blocks(waiting[0].cache.flat(), 0, count):
            block.zero_()
        for steps in waiting:
            steps.cache.set_lr(steps.lr)
            guarded(steps, Steps.restore)

    def _step(self, slots: list[Slot]) -> None:
        """Take steps of the clients that wait in the same call: of the call in which most wait."""
        groups: dict[Hashable, dict[int, Steps]] = {}
        for row, slot in enumerate(slots):
            if slot.waits and slot.steps is not None:
                groups.setdefault(_call(slot.steps), {})[row] = slot.steps
        if not groups:
            return
        group = max(groups.values(), key=len)
        try:
            able = self.can_capture(next(iter(group.values())))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # raised again, in the right client, when clients run individually
            able = False
        if able:
            self._take_pieces(slots, group)
            return
        for row, steps in group.items():
            guarded(steps, _eagerly, steps.plan.steps(steps.workspace.device))
            self._left(row).clear()

    def _resume(self, slots: list[Slot]) -> None:
        """Continue the clients whose steps have been taken."""
        done = [(slot, slot.steps) for slot in slots if slot.steps is not None and not slot.waits]
        everyone = [steps for _, steps in done]
        if len(done) == len(slots) > 1 and _all_alike(everyone):
            self._keep_means(everyone)
        else:
            for slot, steps in done:
                slot.means = steps.means()
        for slot, _ in done:
            slot.resume()

    def _keep_means(self, everyone: list[Steps]) -> None:
        """Compute the means of all clients' statistics in one operation."""
        cache = everyone[0].cache
        samples = torch.tensor([steps.plan.samples for steps in everyone])
        if cache.sums.is_cuda:
            samples = samples.pin_memory().to(cache.sums.device, non_blocking=True)
        means = self._block(cache.sums, 0, len(everyone)) / samples[:, None]
        columns = {name: means[:, i].unbind() for name, i in cache.names.items()}
        for i, slot in enumerate(self._slots[: len(everyone)]):
            slot.means = {name: column[i] for name, column in columns.items()}

    def _collect(self, slots: list[Slot], results: list[Result | None]) -> None:
        """Free the slots of jobs that have ended, with their results and messages."""
        ended = [(row, slot.job) for row, slot in enumerate(slots) if slot.ended and slot.job is not None]
        if self._sent is not None:
            first = ended[0][1] if ended else 0
            if ended == [(row, first + row) for row in range(len(ended))]:
                self._sent.row(slice(first, first + len(ended))).take(self._parts.row(slice(len(ended))))
            else:
                for row, job in ended:
                    self._sent.row(job).take(self._parts.row(row))
        for row, job in ended:
            results[job] = slots[row].collect()
            self.workspaces[row].holds = self.workspaces[row].outbox = None

    def _left(self, row: int) -> Remaining:
        left = self._slots[row].left
        assert left is not None
        return left

    def _take_pieces(self, slots: list[Slot], group: dict[int, Steps]) -> None:
        """Take the clients' next steps, vectorised if enough of them are at steps of the same size."""
        rows = len(slots)
        while rows // 2 > max(group):
            rows //= 2
        waiting = {row: self._left(row) for row in group}
        order = pieces(waiting, rows)
        piece = order[0]
        if len(piece.clients) > 1:
            first = piece.clients[0]
            if self._vectorised(group[first], first, piece) is not None:
                self._take_rows(slots, group, piece, rows)
                return
            order = [Piece((row,), piece.size, piece.count) for row in piece.clients]
        taken = [waiting[piece.clients[0]].take(piece.count) for piece in order]
        if not self.recorder.records_single:
            for piece, own in zip(order, taken, strict=True):
                guarded(group[piece.clients[0]], _eagerly, torch.from_numpy(own))
            return
        self.fill(taken)
        position = 0
        for piece, own in zip(order, taken, strict=True):
            position += own.size
            if not guarded(group[piece.clients[0]], self._take_alone, piece):
                self.seek(position)  # skips rows that were not used

    def _take_rows(self, slots: list[Slot], group: dict[int, Steps], piece: Piece, count: int) -> None:
        """Take steps as operations on the first `count` rows. Those of clients that do not take part are restored."""
        row = piece.clients[0]
        steps = group[row]
        size = _width(steps, piece)
        own = {client: self._left(client).take(piece.count) for client in piece.clients}
        taken = np.stack([own.get(client, own[row]) for client in range(count)], axis=1)

        def step() -> StepFunction:
            tensors = self._blocks(touched(steps), row, count)
            function = self._fast(steps, row, piece, taken[0]) or self._vectorised(steps, row, piece)
            assert function is not None
            return bound(function, tensors)

        memory = self._blocks(written(steps), row, count)
        others = [r for r in range(count) if r not in own and slots[r].job is not None]
        self.fill([taken])
        with restored([block[r] for r in others for block in memory]):
            self.take(StepRun((*_kind(steps, piece), count), step, count, size, lambda: memory), piece.count)

    def _take_alone(self, steps: Steps, piece: Piece) -> None:
        """Take steps of one client in the spare row, so that one graph serves all clients."""
        spare = self.workspaces[-1]
        cache = spare.step_cache(steps.cache.site, steps.cache.parts, tuple(steps.cache.optimizers))
        cache.hold_like(steps.cache)
        moved = Steps(spare, cache, steps.step, steps.plan, steps.lr)
        source, target = _memory(steps), _memory(moved)
        copy_all_(target, source)

        def step() -> StepFunction:
            alone = bound(self._traced(steps, piece), [tensor.detach() for tensor in touched(moved)])
            return lambda rows: alone(rows[0])

        key = (*_kind(steps, piece), "alone")
        self.take(StepRun(key, step, 1, _width(steps, piece), lambda: written(moved)), piece.count)
        copy_all_(source, target)

    def _traced(self, steps: Steps, piece: Piece) -> fx.GraphModule:
        kind = _kind(steps, piece)
        if kind not in self.shared.traced:
            steps.set_mode()  # the method may have changed modes
            self.shared.traced[kind] = trace(steps, _example(steps, piece))
        return self.shared.traced[kind]

    def _batched(self, steps: Steps, row: int, piece: Piece, fused: bool = False) -> Function:
        """Return the step of one client as a function of blocks with a row for each of several clients."""
        shared = [self._rows.block(tensor, row, 2) is None for tensor in touched(steps)]
        return batched(self._traced(steps, piece), [*shared, False], fused)

    def _vectorised(self, steps: Steps, row: int, piece: Piece) -> Function | None:
        """Return the step of several clients, tried on two; None, with a warning, if vmap does not support it."""
        kind = _kind(steps, piece)
        if kind not in self.shared.functions:
            try:
                function = self._batched(steps, row, piece)
                with restored(self._blocks(written(steps), row, 2)):
                    bound(function, self._blocks(touched(steps), row, 2))(_example(steps, piece).repeat(2, 1))
                self.shared.functions[kind] = function
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # vmap does not support all operations
                self.shared.functions[kind] = None
                warnings.warn(
                    f"engine.cohort: some training steps are not vectorised over clients: {error}", stacklevel=2
                )
        return self.shared.functions[kind]

    def _fast(self, steps: Steps, row: int, piece: Piece, rows: np.ndarray) -> Function | None:
        """Return the compiled step, for all slots and steps that are taken often; otherwise None."""
        if not self.shared.compile or len(rows) < self.slots or piece.count == 1:
            return None
        key = (*_kind(steps, piece), len(rows), "compiled")
        if key not in self.shared.functions:
            function = self._batched(steps, row, piece, fused=True)
            example = torch.from_numpy(rows).to(steps.workspace.device)
            with restored(self._blocks(written(steps), row, len(rows))):
                tensors = self._blocks(touched(steps), row, len(rows))
                self.shared.functions[key] = compiled(function, [*tensors, example])
        return self.shared.functions[key]


def _eagerly(steps: Steps, rows: Iterable[Tensor]) -> None:
    steps.set_mode()
    for row in rows:
        steps.step(row)


def _call(steps: Steps) -> tuple[Hashable, ...]:
    """Return what is equal for clients whose steps can be vectorised."""
    data = None if steps.cache.data is None else tuple(t.shape for t in steps.cache.data)
    return steps.cache.site, steps.plan.batches, data


def _all_alike(several: Sequence[Steps]) -> bool:
    return len({_call(steps) for steps in several}) == 1


def _kind(steps: Steps, piece: Piece) -> tuple[Hashable, ...]:
    return *_call(steps), piece.size


def _example(steps: Steps, piece: Piece) -> Tensor:
    """Return the row of some step of this size."""
    start = next(start for start, size, _ in steps.plan.runs() if size == piece.size)
    return torch.from_numpy(steps.plan.part(start, piece.size, 1)[0]).to(steps.workspace.device)


def _width(steps: Steps, piece: Piece) -> int:
    return 1 + piece.size * steps.plan.batches


def _memory(steps: Steps) -> list[Tensor]:
    """Return all memory that a client's steps read or write, as few tensors."""
    workspace, cache = steps.workspace, steps.cache
    flat = (*workspace.flat.buffers.values(), *workspace.flat_received.buffers.values())
    return [*flat, *cache.flat(), cache.lr, *(cache.data or ())]
