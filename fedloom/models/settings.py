"""The `model` section of a recipe."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from fedloom.core.checking import Named, expand_name, refusal
from fedloom.core.errors import UserError
from fedloom.models.factory import check
from fedloom.models.lora import LoraSettings, from_rank


def _model_section(value: Any) -> Any:
    """Expand the short forms of `model`, a name or a list of networks, and name the first of several networks."""
    if isinstance(value, (list, tuple)):
        if not value:
            raise refusal("model = []: must name at least one network")
        value = {"networks": value}
    several: Any = value.get("networks") or value.get("by_client") if isinstance(value, Mapping) else None
    if isinstance(several, Mapping):
        several = list(several.values())
    first = expand_name()(several[0]) if isinstance(several, (list, tuple)) and several else None
    name = first.get("name") if isinstance(first, Mapping) else None
    return expand_name(name if isinstance(name, str) else "mlp")(value)


class NetworkSettings(Named):
    """A network, and its options."""

    head: str | None = Field(
        None,
        description="dotted name of the last layer of a plain nn.Module, such as fc or classifier.6; default: its last "
        "linear layer, if that is the last layer that runs",
    )
    weights: str | None = Field(
        None,
        description="file of initial weights (safetensors, or torch.save of a state dict); tensors with other shapes, "
        "such as the head, are skipped; default: random weights",
    )
    freeze: Annotated[tuple[str, ...], BeforeValidator(lambda names: [names] if isinstance(names, str) else names)] = (
        Field(
            (),
            description="parts of the network that stay fixed: [extractor], or dotted names such as extractor.conv1; "
            "they are not trained, sent or stored for clients",
        )
    )
    lora: Annotated[LoraSettings | None, BeforeValidator(from_rank)] = Field(
        None,
        description="low-rank adapters, or their rank: the extractor's weights stay fixed, and adapters on its layers "
        "are trained instead; default: none",
    )
    project: int | None = Field(
        None,
        ge=1,
        description="width to which a linear layer projects the representation, so that different networks have "
        "representations of the same width; default: no such layer",
    )

    @property
    def options(self) -> dict[str, Any]:
        """Options of the network, and the fields of this section that are set."""
        common = {name: getattr(self, name) for name in NetworkSettings.model_fields if name not in ("name", "lora")}
        if self.lora is not None:
            common["lora"] = self.lora.model_dump(mode="json", exclude_defaults=True) | {"rank": self.lora.rank}
        return super().options | {name: value for name, value in common.items() if value}


_Network = Annotated[NetworkSettings, BeforeValidator(expand_name("mlp"))]


class ModelSettings(NetworkSettings):
    """The recipe section `model`: the network and its options, or the networks of different clients."""

    networks: tuple[_Network, ...] = Field(
        (),
        description="several networks that are dealt to clients in turn, each a name or a section such as this one; "
        "`model: [cnn2, mlp]` is short for it. For methods that share nothing of the extractor",
    )
    by_client: Annotated[
        dict[str, _Network],
        BeforeValidator(lambda given: {str(k): v for k, v in given.items()} if isinstance(given, Mapping) else given),
    ] = Field(
        {},
        description="networks by name or number of the client instead; the key `others` stands for all other clients",
    )

    @property
    def each(self) -> tuple[NetworkSettings, ...]:
        """The networks that clients have; usually one."""
        return self.networks or tuple(self.by_client.values()) or (self,)


def _model_exists(model: ModelSettings) -> ModelSettings:
    if model.networks and model.by_client:
        raise refusal("model.by_client: cannot be combined with model.networks; remove one of them")
    if model.each[0] is not model and (model.options or model.name != model.each[0].name):
        field = next(iter(model.options), "name")
        raise refusal(
            f"model.{field}: the clients have different networks; set it for each of them in model.networks or "
            "model.by_client"
        )
    try:
        for network in model.each:
            check(network.name, network.options)
    except UserError as error:
        raise refusal(str(error)) from None
    return model


Model = Annotated[ModelSettings, BeforeValidator(_model_section), AfterValidator(_model_exists)]
"""Type of the section `model`, which may be a name or a list of networks."""
