"""Which recipes a real federation can run."""

from fedloom.config.local_objects import local_object
from fedloom.config.recipe import Recipe
from fedloom.core.errors import UserError
from fedloom.data.federation import read_split
from fedloom.trust.faults import Faults


def deployable(recipe: Recipe) -> Recipe:
    """Return the recipe if a real federation can run it.

    Raises:
        UserError: If the recipe needs pooled data, attacks, faults, validation images or several labels per image.
    """
    method = recipe.make_method()
    if (field := local_object(recipe)) is not None:
        raise UserError(
            f"{field}: is a Python object of this process, which organisations cannot read or check; write it into a "
            "file and name it: path/to/file.py:Name"
        )
    if method.pooled:
        raise UserError(f"method.name = '{method.name}': pools all data in one place; choose a federated method")
    if method.overrides("generalise"):
        raise UserError(
            f"method.name = '{method.name}': its evaluation gathers several clients' data in one place, which a "
            "federation cannot do; choose another method"
        )
    if recipe.attack is not None:
        raise UserError("attack: is only for simulations on one machine; remove the section")
    if recipe.faults != Faults():
        raise UserError("faults: are only for simulations on one machine; remove the section")
    if recipe.model.each[0] is not recipe.model:
        raise UserError(
            "model.networks: deployments do not support different networks per organisation yet; name one network"
        )
    if recipe.model.weights is not None:
        raise UserError(
            f"model.weights = '{recipe.model.weights}': is a file on one machine; deployments do not support it yet, "
            "remove the field"
        )
    if recipe.data.normalise == "given":
        raise UserError("data.normalise = 'given': deployments do not support it yet; use half")
    if recipe.data.normalise not in (None, "half"):
        raise UserError(
            f"data.normalise = '{recipe.data.normalise}': is measured over all clients' images, which no party has; "
            "use half"
        )
    if recipe.make_objective().multilabel:
        raise UserError(
            f"objective.name = '{recipe.make_objective().name}': organisations have images of one class each, and the "
            "noise of their answers is made for them; deployments do not support several labels yet, use "
            "objective.name = labels or binary"
        )
    if read_split(recipe.data.split).validation or recipe.training.patience is not None:
        patience = recipe.training.patience
        field = f"data.split = '{recipe.data.split}'" if patience is None else f"training.patience = {patience}"
        raise UserError(
            f"{field}: organisations do not evaluate on validation images, because each further answer reveals more "
            "about their images; choose settings and the number of rounds in a simulation, and use data.split = "
            "pooled:0.75 without training.patience"
        )
    return recipe
