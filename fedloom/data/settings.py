"""The `data` section of a recipe."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from fedloom.core.checking import Section, as_written, refusal
from fedloom.core.task import Normalisation
from fedloom.data.augment import parse_augment
from fedloom.data.decode import OnBad
from fedloom.data.federation import CLIENTS, parse_split
from fedloom.data.partitions import parse_partition
from fedloom.data.sources import ReadOptions


class DataSettings(Section):
    """The dataset, its division among clients, and the preprocessing of inputs."""

    name: str = Field("digits", description="a dataset (see `fedloom datasets`), `a+b` for styles, a folder or a file")
    dir: Path | None = Field(None, description="data folder; by default $FEDLOOM_DATA, then the user's cache")
    size: int | None = Field(None, ge=4, description="resize images to size × size")
    channels: int | None = Field(None, ge=3, le=3, description="3 repeats grey images to three channels")
    limit: int | None = Field(None, ge=1, description="maximum number of training and of test images (per style)")
    on_bad: OnBad = Field(
        "stop", description="images and recordings that cannot be read: stop, or skip (left out, and named in a note)"
    )
    label: str | None = Field(
        None, description="column of the label in a table; default: label, labels, target, class or y"
    )
    client: str | None = Field(None, description="column of the client in a table, for the partition natural")
    seconds: float | None = Field(None, gt=0, le=60, description="length of recordings, cut or padded; default: 1")
    mels: int | None = Field(None, ge=4, le=256, description="frequency bands of recordings; default: 32")
    clients: int = Field(CLIENTS, ge=1, description="number of clients (`natural` makes one per group)")
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
    views: Annotated[tuple[str, ...], as_written(parse_augment)] | None = Field(
        None,
        description="augmentation of the views of contrastive losses; default: crop:4, flip for images, gaussian:0.1, "
        "mask:0.2 for other inputs",
    )
    normalise: Normalisation | None = Field(
        None,
        description="mean and std: half (0.5), given (data.mean, data.std), channels (measured on all training data in "
        "one place), federated (from sums that clients send), none; default: half for images of bytes, else federated",
    )
    mean: tuple[float, ...] = Field((), description="for normalise: given, one number, or one per channel or column")
    std: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (), description="for normalise: given; of images of bytes, whose values are 0 to 1"
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
        if (self.normalise == "given") != bool(self.mean and self.std) or bool(self.mean) != bool(self.std):
            raise refusal("data.normalise = given needs data.mean and data.std, and they need data.normalise = given")
        return self

    @property
    def reading(self) -> ReadOptions:
        """How files are read."""
        return ReadOptions(self.size, self.on_bad, self.label, self.client, self.seconds, self.mels)
