"""A client's masked message: what it adds to the sum, for a weighted mean or under differential privacy."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedloom.core.message import Message, Signature
from fedloom.core.method import Method
from fedloom.trust.privacy import Draw, PrivacySettings
from fedloom.trust.secure.party import Party
from fedloom.trust.secure.private import PrivateSum
from fedloom.trust.secure.ring import Ring
from fedloom.trust.secure.settings import SecureSettings, refuse_unsummable
from fedloom.trust.secure.weighted import WeightedSum

MASKED = "masked"
"""Name of the only tensor of a masked message."""
_TYPES = {32: torch.int32, 64: torch.int64}


class Contribution:
    """Turns a client's message into what it adds to the sum. Client and server create it from the same recipe.

    Args:
        settings: The recipe section `secure`.
        privacy: The recipe section `privacy`.
        method: The method.
        sent: Names, types and shapes of the tensors that clients send.

    Raises:
        UserError: The method needs more than a sum of messages.
    """

    def __init__(self, settings: SecureSettings, privacy: PrivacySettings | None, method: Method, sent: Signature):
        averaging = refuse_unsummable(method)
        self._settings = settings
        self.content: WeightedSum | PrivateSum
        self.content = WeightedSum(averaging, sent) if privacy is None else PrivateSum(privacy, averaging, sent)
        self.signature: Signature = {MASKED: (_TYPES[settings.bits], (self.content.size,))}
        """The tensor of a masked message."""

    def example(self) -> Message:
        """Return a message with the tensor of a masked one."""
        return Message({name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in self.signature.items()})

    def masked(self, party: Party, message: Message, received: Mapping[str, Tensor], normal: Draw) -> Message:
        """Return a client's masked message.

        Args:
            party: The client in this round, which has received the other members' shares.
            message: The client's message.
            received: The server's message to the client.
            normal: Source of noise, for `privacy`.

        Raises:
            MessageError: A value is beyond the range, or the client has sent a masked message already.
        """
        if isinstance(self.content, WeightedSum):
            vector = self.content.vector(message, party.largest, party.fixed_point)
        else:
            vector = self.content.vector(message, received, party.fixed_point, party.needed, normal)
        party.mask(vector)
        return Message({MASKED: as_tensor(vector)}, client=message.client, samples=message.samples)


def as_tensor(vector: Ring) -> Tensor:
    """Return elements of the ring as a tensor of signed integers with the same bits."""
    return torch.from_numpy(vector.view(vector.dtype.str.replace("u", "i")))


def as_ring(tensor: Tensor) -> Ring:
    """Return the elements of the ring in a tensor of `as_tensor`."""
    array = tensor.cpu().numpy()
    ring: Ring = array.view(array.dtype.str.replace("i", "u"))
    return ring
