"""All data in one place: what a federation would reach if nothing had to stay where it is."""

from fedloom.methods.fedavg import FedAvg


class Centralized(FedAvg):
    """One model trained on everybody's pooled data. No messages: the data themselves would have to travel."""

    pooled = True
