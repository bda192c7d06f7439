"""The `data` section of a recipe."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from fedloom.core.checking import Section, as_written, refusal
from fedloom.core.task import Normalisation
from fedloom.data.augment import parse_augment
from fedloom.data.decode import OnBad
from fedloom.data.federation import parse_split
from fedloom.data.partition import parse_partition


class DataSettings(Section):
    """The dataset, its division among clients, and the preprocessing of images."""

    name: str = Field("digits", description="a dataset (see `fedloom datasets`), `a+b` for styles, a folder or an .npz")
    dir: Path | None = Field(None, description="data folder; by default $FEDLOOM_DATA, then the user's cache")
    size: int | None = Field(None, ge=4, description="resize images to size × size")
    channels: int | None = Field(None, ge=3, le=3, description="3 repeats grey images to three channels")
    limit: int | None = Field(None, ge=1, description="maximum number of training and of test images (per style)")
    on_bad: OnBad = Field(
        "stop", description="files in image folders that cannot be read: stop, or skip (left out, and named in a note)"
    )
    clients: int = Field(20, ge=1, description="number of clients (`natural` makes one per group)")
    partition: Annotated[str, as_written(parse_partition)] = Field(
        "dirichlet:0.1",
        description="iid, dirichlet:α, capped-dirichlet:α, equal-dirichlet:α, pathological:k, shards:k, quantity:α, …",
    )
    split: Annotated[str, as_written(parse_split)] = Field(
        "pooled:0.75",
        description="where test data come from: pooled:0.75, official, common, domain:0.7; with validation samples: "
        "pooled:0.6:0.2 (train, validation, the rest for test), domain:0.6:0.2, official:0.8, common:0.8",
    )
    minimum: int = Field(10, ge=1, description="minimum number of samples per client, where sizes are random")
    newcomers: float = Field(0, ge=0, description="clients held out of training: a number, or a fraction below 1")
    resample: bool = Field(False, description="resample every style to the mean style size (FedStyle)")
    augment: Annotated[tuple[str, ...], as_written(parse_augment)] = Field(
        (), description="augmentation of training images: crop:4, flip, jitter:0.4, …"
    )
    views: Annotated[tuple[str, ...], as_written(parse_augment)] = Field(
        ("crop:4", "flip"),
        description="augmentation of the views of contrastive losses; for inputs that are not "
        "images, the default is gaussian:0.1, mask:0.2",
    )
    normalise: Normalisation | None = Field(
        None,
        description="mean and std: half (0.5), channels (measured on all training data in one place), federated (from "
        "sums that clients send), none; default: half for images of bytes, else federated",
    )
    seed: int | None = Field(None, description="seed of the federation; by default the run's seed")

    @model_validator(mode="after")
    def _possible(self) -> "DataSettings":
        if self.newcomers >= 1 and self.newcomers != int(self.newcomers):
            raise refusal(f"data.newcomers = {self.newcomers:g}: must be a whole number, or a share below 1")
        held_out = self.newcomers if self.newcomers >= 1 else round(self.newcomers * self.clients)
        if held_out >= self.clients and self.partition != "natural":
            raise refusal(
                f"data.newcomers = {self.newcomers:g}: leaves none of data.clients = {self.clients} to train; "
                f"must be at most {self.clients - 1}"
            )
        return self
