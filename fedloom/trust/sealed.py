"""A round's messages as `combine` gets them where a rule or privacy stands in for the mean: only that may read them."""

from collections.abc import Iterable, Iterator

from fedloom.errors import UserError
from fedloom.message import Message


class Sealed(Iterator[Message]):
    """Messages that `server.average` may open; whoever else reads one gets the `refusal`."""

    def __init__(self, messages: Iterator[Message], refusal: str):
        self._messages, self._refusal = messages, refusal

    def __next__(self) -> Message:
        raise UserError(self._refusal)

    def open(self) -> Iterator[Message]:
        """For what stands in for the mean."""
        return self._messages


def opened(messages: Iterable[Message]) -> Iterable[Message]:
    """Messages that can be read, whether they were sealed or not."""
    return messages.open() if isinstance(messages, Sealed) else messages
