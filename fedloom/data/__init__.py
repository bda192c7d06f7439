"""Data: sources of images, and their division among clients."""

from fedloom.core.task import Dataset, Federation
from fedloom.data.dataset import combine, limit, resize
from fedloom.data.federation import counts, federate, parse_split
from fedloom.data.partition import PARTITIONS, Partition, Pool, parse_partition
from fedloom.data.sources import SourceInfo, data_folder, describe, load, parts

__all__ = [
    "PARTITIONS", "Dataset", "Federation", "Partition", "Pool", "SourceInfo", "combine", "counts", "data_folder",
    "describe", "federate", "limit", "load", "parse_partition", "parse_split", "parts", "resize",
]  # fmt: skip
