"""Late acceptance: a walk over candidates that may go uphill for a while.

A candidate is accepted if it takes no longer than the one before it, or than the one
some steps ago. After long without success the walk begins again at the best, and may
first take a few percent longer.

References
----------
E. K. Burke, Y. Bykov. The late acceptance hill-climbing heuristic. European Journal of
Operational Research 258(1), 2017.
"""

import random
from dataclasses import dataclass, replace

from remat.search.device_execution import ExecutionRule, Placement
from remat.search.device_placements import Placements

_MEMORY = 50
_PATIENCE = 1500
_HEAT_PERCENT = 3
_RULE_SHARE = 0.15


@dataclass
class Walk:
    """Where the walk is, and what it remembers."""

    placement: Placement
    rule: ExecutionRule
    cost_ns: int

    def __post_init__(self) -> None:
        self.best = self.placement, self.rule, self.cost_ns
        self.before_ns = [self.cost_ns] * _MEMORY
        self.number = 0
        self.fruitless = 0

    def candidate(
        self, places: Placements, rng: random.Random
    ) -> tuple[Placement, ExecutionRule]:
        """Return a neighbour: another placement, another rule, or both."""
        if rng.random() >= _RULE_SHARE:
            return places.changed(self.placement, rng), self.rule
        rule = changed_rule(self.rule, rng)
        is_both = rng.random() < 0.5
        return places.changed(self.placement, rng) if is_both else self.placement, rule

    def take(
        self, placement: Placement, rule: ExecutionRule, cost_ns: int | None
    ) -> None:
        """Go there or stay; ``cost_ns`` is ``None`` for what does not fit."""
        self.number += 1
        self.fruitless += 1
        place = self.number % _MEMORY
        limit_ns = max(self.cost_ns, self.before_ns[place])
        if cost_ns is not None and cost_ns <= limit_ns:
            self.placement, self.rule, self.cost_ns = placement, rule, cost_ns
        self.before_ns[place] = self.cost_ns
        if self.cost_ns < self.best[2]:
            self.best = self.placement, self.rule, self.cost_ns
            self.before_ns = [self.cost_ns] * _MEMORY
            self.fruitless = 0
        elif self.fruitless > _PATIENCE:
            self.placement, self.rule, self.cost_ns = self.best
            self.before_ns = [self.cost_ns * (100 + _HEAT_PERCENT) // 100] * _MEMORY
            self.fruitless = 0


def changed_rule(rule: ExecutionRule, rng: random.Random) -> ExecutionRule:
    """Return a rule that differs in one number."""
    match rng.randrange(5):
        case 0:
            return replace(rule, size_exponent=rng.choice((0.5, 0.75, 1.0)))
        case 1:
            return replace(rule, distance_exponent=rng.choice((0.0, 0.25, 0.5, 1.0)))
        case 2:
            return replace(rule, ancestor_share=rng.choice((0.0, 0.5, 1.0)))
        case 3:
            percent = rng.choice((10, 50, 100, 200, 400, 10_000))
            return replace(rule, copy_percent=percent)
        case _:
            return replace(rule, limit_percent=rng.randint(50, 100))
