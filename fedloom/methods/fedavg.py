"""FedAvg: clients train the global model on their data, and the server averages the results.

Reference: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
"""

from fedloom.core.method import Method


class FedAvg(Method):
    """One global model: the average of the clients' locally trained models, weighted by sample counts."""

    paper = "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017"
