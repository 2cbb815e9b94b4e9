"""The best answer so far, of a search that makes many."""

from dataclasses import dataclass
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Best(Generic[Answer]):
    """The answer of least rank that was offered, and of equal ones the first.

    Attributes
    ----------
    answer
        ``None`` as long as there is none.
    rank
        Its numbers, the most important first.

    Examples
    --------
    >>> best = Best[str]()
    >>> best.offer("slow", 9, 1), best.offer("quick", 5, 3), best.offer("equal", 5, 3)
    (True, True, False)
    >>> best.answer
    'quick'
    """

    answer: Answer | None = None
    rank: tuple[int, ...] = ()

    def offer(self, answer: Answer, *rank: int) -> bool:
        """Keep an answer if it is better than all before; return whether it is."""
        if self.answer is not None and rank >= self.rank:
            return False
        self.answer, self.rank = answer, rank
        return True
