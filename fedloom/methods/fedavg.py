"""Federated averaging: everybody trains the one model, the server averages (McMahan et al., 2017)."""

from fedloom.core.method import Method


class FedAvg(Method):
    """One model for everybody: local training, then the average weighted by sample counts."""

    paper = "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017"
