"""A lane of several clients: clients that reach the same call of `fit` take its steps as one vectorised operation.

Method code is unaware of this: each client's code runs as a greenlet up to a `fit`, and waits there.
"""

import warnings
from collections.abc import Hashable, Sequence
from itertools import takewhile

import torch
from torch import Tensor, fx

from fedloom.core.batches import draw
from fedloom.core.flat_state import FlatState
from fedloom.core.job import ENCODED, Job, Result
from fedloom.core.state import copy_all_
from fedloom.core.step_cache import Rows
from fedloom.core.workspace import Steps, Workspace
from fedloom.engines.cuda.batching import batched
from fedloom.engines.cuda.graphs import Recorder
from fedloom.engines.cuda.lane import Lane, NewWorkspace, Shared, StepFunction, StepRun, bound, largest
from fedloom.engines.cuda.schedule import Piece, pieces
from fedloom.engines.cuda.slot import Slot, guarded
from fedloom.engines.cuda.tracing import Function, compiled, trace
from fedloom.engines.recording import restored, touched, written


class Cohort(Lane):
    """Several clients in rows of the same memory. A spare row is used for steps of single clients."""

    def __init__(self, slots: int, new_workspace: NewWorkspace, recorder: Recorder, shared: Shared):
        self.slots = slots
        self._rows = Rows(slots + 1)
        self._slots = [Slot() for _ in range(slots + 1)]
        self._sent: FlatState | None = None
        self._jobs = 0
        super().__init__(new_workspace, recorder, shared)
        first = self.workspaces[0]
        self._parts, self._received = (
            FlatState(flat.layout, {dtype: self._all(buffer) for dtype, buffer in flat.buffers.items()})
            for flat in (first.flat, first.flat_received)
        )

    def _make_workspaces(self, new_workspace: NewWorkspace) -> list[Workspace]:
        return [new_workspace(stepper=slot, rows=(self._rows, i)) for i, slot in enumerate(self._slots)]

    def _all(self, tensor: Tensor, count: int | None = None) -> Tensor:
        """Return the rows of the first clients for a tensor of the first one, or the tensor itself if it is shared."""
        found = self._rows.block(tensor, self.slots if count is None else count)
        return tensor.detach() if found is None else found

    def _blocks(self, tensors: Sequence[Tensor], count: int) -> list[Tensor]:
        """Return `_all` of several tensors."""
        return [self._all(tensor, count) for tensor in tensors]

    def launch(self, jobs: Sequence[Job]) -> list[Result]:
        """Run jobs concurrently, the longest first, so that the number of active clients only decreases."""
        self._jobs = len(jobs)
        slots = self._slots[: len(jobs)]
        sent = self._sent = self._outboxes(len(jobs)) if jobs[0].kind == "update" else None
        try:
            self._spread(jobs)
            for slot, workspace, job in zip(slots, self.workspaces, jobs, strict=False):
                slot.begin(workspace, job)
            while waiting := [(i, slot, slot.steps) for i, slot in enumerate(slots) if slot.steps is not None]:
                self._serve([(i, steps) for i, _, steps in waiting])
                for _, slot, _ in waiting:
                    slot.resume()
            if sent is not None:
                sent.take(self._parts.row(slice(len(jobs))))
        except BaseException:
            for slot in slots:
                slot.cancel()
            raise
        finally:
            for workspace in self.workspaces:
                workspace.holds = workspace.outbox = None
        results = [slot.result for slot in slots if slot.result is not None]
        assert len(results) == len(jobs)
        for slot in slots:
            slot.result, slot.means = None, {}
        return results

    def largest(self, results: Sequence[Result]) -> Tensor | None:
        """Return the largest magnitude in each message, in one operation if possible."""
        if self._sent is None or len(results) != self._jobs or any(result.error is not None for result in results):
            return super().largest(results)
        floating = self._sent.floating()
        return largest(floating) if floating else None

    def _outboxes(self, jobs: int) -> FlatState | None:
        """Allocate memory for all clients' messages, filled in one operation at the end; None if not possible."""
        first = self.workspaces[0]
        if first.setup.codec.up is not None or first.setup.intercept is not None:
            return None
        sent = FlatState(first.sent_layout, first.sent_layout.empty(first.device, (jobs,)))
        for i, workspace in enumerate(self.workspaces[:jobs]):
            workspace.outbox = sent.row(i)
        return sent

    @torch.no_grad()
    def _spread(self, jobs: Sequence[Job]) -> None:
        """Load a message into all workspaces at once, if all clients receive the same one without encoding."""
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

    def _serve(self, requests: list[tuple[int, Steps]]) -> None:
        """Take the steps that clients wait for, vectorised over the first clients that wait in the same call."""
        first = requests[0][1]
        alike = takewhile(lambda pair: pair[1][0] == pair[0] and _alike(pair[1][1], first), enumerate(requests))
        group = [steps for _, (_, steps) in alike]
        for number, steps in requests[len(group) :]:
            self._serve_group(number, [steps])
        if group:
            self._serve_group(0, group)

    def _serve_group(self, number: int, group: list[Steps]) -> None:
        """Take the steps of clients, of which the first has the slot `number`."""
        self._prepare(number, group)
        try:
            able = self.can_capture(group[0])
        except torch.OutOfMemoryError:
            raise
        except Exception:  # raised again, in the right client, when clients run individually
            able = False
        if able:
            self._take_pieces(group)
        else:
            for steps in group:
                guarded(steps, _eagerly)
        self._keep_means(number, group)

    def _prepare(self, number: int, group: list[Steps]) -> None:
        """Zero statistics and optimizers of all clients in few operations, and set their learning rates."""
        if number or len(group) == 1:
            for steps in group:
                steps.prepare()
            return
        first = group[0].cache
        for block in self._blocks(first.flat(), len(group)):
            block.zero_()
        for steps in group:
            steps.cache.set_lr(steps.lr)
            steps.restore()

    def _keep_means(self, number: int, group: list[Steps]) -> None:
        first = group[0].cache
        if number or len(group) == 1:
            for i, steps in enumerate(group, start=number):
                self._slots[i].means = steps.means()
            return
        samples = torch.tensor([steps.plan.samples for steps in group])
        if first.sums.is_cuda:
            samples = samples.pin_memory().to(first.sums.device, non_blocking=True)
        means = self._all(first.sums, len(group)) / samples[:, None]
        columns = {name: means[:, i].unbind() for name, i in first.names.items()}
        for i, slot in enumerate(self._slots[: len(group)]):
            slot.means = {name: column[i] for name, column in columns.items()}

    def _take_pieces(self, group: list[Steps]) -> None:
        """Take clients' steps, vectorised where several clients reach steps of the same size."""
        plans = [steps.plan for steps in group]
        draw(plans)
        order: list[Piece] = []
        for piece in pieces(plans):
            vectorised = piece.together and self._vectorised(group, piece) is not None
            order += [piece] if vectorised or not piece.together else piece.one_by_one()
        rows = [piece.rows(plans) for piece in order]
        self.fill(rows)
        position = 0
        for piece, own in zip(order, rows, strict=True):
            position += own.size
            if piece.together:
                self._take_rows(group, piece)
                continue
            steps = group[piece.clients[0]]
            if not guarded(steps, self._take_alone, piece):
                self.seek(position)  # skips rows that were not used

    def _take_rows(self, group: list[Steps], piece: Piece) -> None:
        """Take steps of the first clients as one vectorised operation."""
        first, clients = group[0], len(piece.clients)

        def step() -> StepFunction:
            tensors = self._blocks(touched(first), clients)
            function = self._fast(group, piece) or self._vectorised(group, piece)
            assert function is not None
            return bound(function, tensors)

        key = (*_kind(first, piece), clients)
        run = StepRun(key, step, clients, _width(first, piece), lambda: self._blocks(written(first), clients))
        self.take(run, piece.count)

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
            row = torch.from_numpy(steps.plan.part(piece.start[0], piece.size, 1)[0]).to(steps.workspace.device)
            steps.set_mode()  # the method may have changed modes
            self.shared.traced[kind] = trace(steps, row)
        return self.shared.traced[kind]

    def _batched(self, first: Steps, piece: Piece, fused: bool = False) -> Function:
        """Return the step of one client as a function of blocks with a row for each of several clients."""
        shared = [self._rows.block(tensor, 2) is None for tensor in touched(first)]
        return batched(self._traced(first, piece), [*shared, False], fused)

    def _vectorised(self, group: list[Steps], piece: Piece) -> Function | None:
        """Return the step of several clients, tried on two; None, with a warning, if vmap does not support it."""
        first, kind = group[0], _kind(group[0], piece)
        if kind not in self.shared.functions:
            try:
                function = self._batched(first, piece)
                row = torch.from_numpy(first.plan.part(piece.start[0], piece.size, 1)[0]).to(first.workspace.device)
                with restored(self._blocks(written(first), 2)):
                    bound(function, self._blocks(touched(first), 2))(row.repeat(2, 1))
                self.shared.functions[kind] = function
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # vmap does not support all operations
                self.shared.functions[kind] = None
                warnings.warn(
                    f"engine.cohort: some training steps are not vectorised over clients: {error}", stacklevel=2
                )
        return self.shared.functions[kind]

    def _fast(self, group: list[Steps], piece: Piece) -> Function | None:
        """Return the compiled step, for a full cohort and steps that are taken often; otherwise None."""
        first, clients = group[0], len(piece.clients)
        if not self.shared.compile or clients < self.slots or piece.count == 1:
            return None
        key = (*_kind(first, piece), clients, "compiled")
        if key not in self.shared.functions:
            function = self._batched(first, piece, fused=True)
            rows = torch.from_numpy(piece.rows([steps.plan for steps in group])[0]).to(first.workspace.device)
            with restored(self._blocks(written(first), clients)):
                self.shared.functions[key] = compiled(function, [*self._blocks(touched(first), clients), rows])
        return self.shared.functions[key]


def _eagerly(steps: Steps) -> None:
    steps.set_mode()
    for row in steps.plan.steps(steps.workspace.device):
        steps.step(row)


def _alike(one: Steps, other: Steps) -> bool:
    """Return whether two clients' steps can be vectorised."""
    shapes = [None if s.cache.data is None else [t.shape for t in s.cache.data] for s in (one, other)]
    return one.cache.site == other.cache.site and one.plan.batches == other.plan.batches and shapes[0] == shapes[1]


def _kind(steps: Steps, piece: Piece) -> tuple[Hashable, ...]:
    data = None if steps.cache.data is None else tuple(t.shape for t in steps.cache.data)
    return steps.cache.site, piece.size, steps.plan.batches, data


def _width(steps: Steps, piece: Piece) -> int:
    return 1 + piece.size * steps.plan.batches


def _memory(steps: Steps) -> list[Tensor]:
    """Return all memory that a client's steps read or write, as few tensors."""
    workspace, cache = steps.workspace, steps.cache
    flat = (*workspace.flat.buffers.values(), *workspace.flat_received.buffers.values())
    return [*flat, *cache.flat(), cache.lr, *(cache.data or ())]
