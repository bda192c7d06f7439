"""Centralised training: one model trained on the pooled data of all clients.

Not a federated method: a reference for the accuracy that pooled data would allow.
"""

from fedloom.methods.fedavg import FedAvg


class Centralized(FedAvg):
    """One model trained on the pooled data of all clients, without any messages."""

    pooled = True
