"""Flower's SuperNode as a process that ends with its parent; run as a script, so that it does not import torch."""

import sys

from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supernode.cli.flower_supernode import flower_supernode

if __name__ == "__main__":
    start_parent_process_monitor(int(sys.argv.pop(1)))
    flower_supernode()
