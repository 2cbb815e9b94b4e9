"""Rows of a program written with sums of variables on both sides."""

from dataclasses import dataclass, field

from remat.backends.mathopt import Model

INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Sum:
    """A constant plus variables times coefficients."""

    constant: float = 0.0
    terms: tuple[tuple[int, float], ...] = ()

    @property
    def is_constant(self) -> bool:
        """Whether no variable occurs."""
        return not self.terms

    def plus(self, *others: "Sum", times: float = 1.0) -> "Sum":
        """Return this sum plus ``times`` each of the others."""
        constant, terms = self.constant, dict(self.terms)
        for other in others:
            constant += times * other.constant
            for variable, coefficient in other.terms:
                terms[variable] = terms.get(variable, 0.0) + times * coefficient
        return Sum(constant, tuple((v, c) for v, c in terms.items() if c))

    def minus(self, *others: "Sum") -> "Sum":
        """Return this sum less the others."""
        return self.plus(*others, times=-1.0)


ZERO, ONE = Sum(), Sum(1.0)


@dataclass(frozen=True, slots=True)
class Program:
    """A model whose rows are written as relations between sums."""

    model: Model = field(default_factory=Model)

    def at_most(self, left: Sum, right: Sum) -> None:
        """Add the row ``left <= right``."""
        self.between(-INFINITY, left.minus(right), 0.0)

    def at_least(self, left: Sum, right: Sum) -> None:
        """Add the row ``left >= right``."""
        self.at_most(right, left)

    def equal(self, left: Sum, right: Sum) -> None:
        """Add the row ``left == right``."""
        self.between(0.0, left.minus(right), 0.0)

    def between(self, lower: float, middle: Sum, upper: float) -> None:
        """Add the row ``lower <= middle <= upper``; nothing if it always holds."""
        low, high = lower - middle.constant, upper - middle.constant
        if middle.is_constant and low <= 0 <= high:
            return
        self.model.add_row(middle.terms, lower=low, upper=high)


def term(variable: int, coefficient: float = 1.0) -> Sum:
    """Return a variable times a coefficient as a sum."""
    return Sum(0.0, ((variable, coefficient),))
