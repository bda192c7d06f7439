"""Networks of a run: remarks for the summary, and checks if clients have different networks."""

from collections.abc import Iterator

from fedloom.core.errors import UserError
from fedloom.core.features import notes_of
from fedloom.core.flat_state import nbytes
from fedloom.core.frozen import fixed_paths, frozen_part
from fedloom.core.message import Signature
from fedloom.core.protocols import is_network
from fedloom.core.setup import Setup
from fedloom.core.state import under
from fedloom.core.workspace import Workspace
from fedloom.methods import METHODS, Method

REMEDY = "choose one network for all clients, or a method that shares nothing of the extractor"


def refuse_different_networks(setup: Setup, method: Method, distance: str | None = None) -> None:
    """Check that clients with different networks can be trained together; a single network always can.

    Args:
        setup: The setup of the run.
        method: The method.
        distance: The recipe's `evaluation.distance`.

    Raises:
        UserError: The method has a global model, shares a part of the extractor, or shares a part that has different
            shapes in the networks; or distances are to be measured between tensors of different shapes.
    """
    if len(setup.variants) == 1:
        return
    kinds = setup.task.network.kinds
    where = f"model = [{setup.task.network.title}]: clients have different networks, but {method.name}"
    shared = [_shared(variant) for variant in setup.variants]
    if inside := next((name for names in shared for name, extracts in names.items() if extracts), None):
        raise UserError(f"{where} shares '{inside}', a part of the extractor; {REMEDY} ({_examples()})")
    if method.has_global or method.pooled:
        raise UserError(f"{where} has a global model, which is one network; {REMEDY} ({_examples()})")
    for number, variant in enumerate(setup.variants[1:], 1):
        other = kinds[number].title
        if (different := _difference(setup.shapes, variant.shapes, [*shared[0], *shared[number]])) is not None:
            raise UserError(
                f"{where} shares '{different}', which has {_shape(setup.shapes, different)} with "
                f"{kinds[0].title} and {_shape(variant.shapes, different)} with {other}; give the networks "
                "representations of the same width, for example with the option 'project: 128' of each network"
            )
        kept = [name for name in setup.shapes if distance is not None and under(name, (distance,))]
        if (different := _difference(setup.shapes, variant.shapes, kept)) is not None:
            raise UserError(
                f"evaluation.distance = '{distance}': {different} has {_shape(setup.shapes, different)} with "
                f"{kinds[0].title} and {_shape(variant.shapes, different)} with {other}; remove the field"
            )


def remarks(server: Workspace) -> list[str]:
    """Return remarks about the networks: loaded weights, frozen parts, cached features."""
    setup = server.setup
    return [
        *setup.task.network.notes(setup.task.shape, setup.task.classes),
        *(note for workspace in server.variants for note in _frozen(workspace)),
        *(note for variant in setup.variants for note in notes_of(variant.feature_caches)),
    ]


def _frozen(workspace: Workspace) -> Iterator[str]:
    """Yield remarks about frozen parts, and about a method that shares nothing because of them."""
    fixed = {name: tensor for name, tensor in workspace.tensors.items() if under(name, workspace.fixed)}
    if fixed:
        parts = dict.fromkeys(str(frozen_part(name, workspace.fixed)) for name in fixed)
        field = "model.lora" if "lora" in workspace.setup.task.network.options else "model.freeze"
        yield (
            f"{field}: {', '.join(parts)}: {len(fixed)} tensors ({nbytes(fixed):,} bytes) stay fixed; "
            "they are not trained, sent or stored for clients"
        )
    if workspace.setup.method.up and not workspace.sent:
        method = workspace.setup.method
        yield f"{method.name} has nothing to send (nothing to train in {', '.join(method.up)}), so clients learn alone"


def _shared(setup: Setup) -> dict[str, bool]:
    """Return the names of the tensors that travel or that the server keeps, and which of them extractors contain."""
    parts, method = setup.build(), setup.method
    paths, fixed = (*method.up, *method.down, *method.server_keeps), fixed_paths(parts)
    extractors = tuple(f"{path}.extractor" for path, module in parts.named_modules() if is_network(module))
    names = [name for name in parts.named_tensors() if under(name, paths) and not under(name, fixed)]
    return {name: under(name, extractors) for name in names}


def _difference(one: Signature, other: Signature, names: list[str]) -> str | None:
    """Return the first of some tensors whose type or shape differs between two networks; None if they are equal."""
    return next((name for name in names if one.get(name) != other.get(name)), None)


def _shape(shapes: Signature, name: str) -> str:
    return f"shape {list(shapes[name][1])}" if name in shapes else "no such tensor"


def _examples() -> str:
    """Return the names of methods that share nothing of the extractor, as far as their classes tell."""
    return ", ".join(sorted(_without_extractor()))


def _without_extractor() -> Iterator[str]:
    for name in METHODS:
        kind = METHODS.find(name)
        paths = (*_declared(kind.shares), *_declared(kind.sends), *_declared(kind.receives))
        if kind.has_global is False and not any(under("model.extractor", (path,)) for path in paths):
            yield name


def _declared(paths: object) -> tuple[str, ...]:
    """Return a class attribute that lists parts; a property, which depends on hyperparameters, counts as empty."""
    return paths if isinstance(paths, tuple) else ()
