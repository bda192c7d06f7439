"""Which fields of a recipe name Python objects that exist in this process only."""

from fedloom.config.recipe import Recipe
from fedloom.core.registry import OBJECT


def local_object(recipe: Recipe) -> str | None:
    """Return the first field whose value was passed as a Python object, as `model.name = 'object-Net-…'`.

    Methods count if their class is part of a script, a notebook or a function. Returns None if there is no such field.
    """
    fields = [
        ("data.name", recipe.data.name),
        ("data.partition", recipe.data.partition),
        *(("model.name", network.name) for network in recipe.model.each),
        ("training.optimizer.name", recipe.training.optimizer.name),
    ]
    for field, name in fields:
        if name.startswith(OBJECT):
            return f"{field} = '{name}'"
    kind = type(recipe.make_method()).plain
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        return f"method.name = '{recipe.method.name}'"
    return None
