"""Flower's SuperNode as a process that ends with the one that started it."""

import sys

from flwr.supernode.cli.flower_supernode import flower_supernode

from fedloom.deploy.launch import watch_parent

if __name__ == "__main__":
    sys.argv = watch_parent(sys.argv)
    flower_supernode()
