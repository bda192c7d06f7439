"""FedPer: a common base, personal last layers (Arivazhagan et al., 2019)."""

from fedloom.core.method import Method


class FedPer(Method):
    """The extractor is everybody's, the head is each client's own; both are trained together."""

    paper = "Arivazhagan et al., Federated Learning with Personalization Layers, arXiv:1912.00818, 2019"
    shares = ("model.extractor",)
    keeps = ("model.head",)

    average_heads: bool = False
    """Clients send their heads too, and their average is a global model (FedCRC's Table II); nobody receives it."""

    @property
    def sends(self) -> tuple[str, ...]:  # type: ignore[override]
        """The head, where a global model is asked for."""
        return ("model.head",) if self.average_heads else ()

    @property
    def has_global(self) -> bool:  # type: ignore[override]
        """The paper has none."""
        return self.average_heads
