"""What an operator on factors keeps from one product to the next."""

from __future__ import annotations

from typing import Generic, TypeVar, final

from torch import Tensor

Kept = TypeVar("Kept")


@final
class LastProducts(Generic[Kept]):
    """What products with the last two factors ``U`` left behind; known by the tensor itself, not by its numbers.

    A gradient in ``V`` starts with what the outputs at the same ``U`` were made of. Two, for a Newton step meets its
    direction and the factors of the point in turn.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Kept]] = []

    def of(self, U: Tensor) -> Kept | None:
        """What is kept for this ``U``, which counts as used last."""
        found = [pair for pair in self._kept if pair[0] is U]
        if not found:
            return None
        self._kept = [pair for pair in self._kept if pair[0] is not U] + found
        return found[0][1]

    def make_room(self) -> None:
        """Forget all but the last: to be called before the next is made, for each may be large."""
        self._kept = self._kept[-1:]

    def keep(self, U: Tensor, product: Kept) -> None:
        """Keep what belongs to ``U``."""
        self._kept = [*self._kept[-1:], (U, product)]
