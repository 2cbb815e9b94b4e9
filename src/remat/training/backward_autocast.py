"""Backward passes under another autocast setting than their step was traced for."""

from collections.abc import Callable, Sequence
from typing import Any

from remat.capture.autocast import Autocast, autocast_now
from remat.runtime.undefined import place_of


class BackwardAutocast:
    """Looks, at each backward pass of a step, under which autocast it was called.

    Parameters
    ----------
    traced
        The settings that the step's backward pass was traced under.
    differs
        Whether its trace is another one under other settings.
    tell
        Is told of settings under which it is.
    """

    def __init__(
        self,
        traced: tuple[Autocast, ...],
        differs: Callable[[tuple[Autocast, ...]], bool],
        tell: Callable[[tuple[Autocast, ...]], None],
    ) -> None:
        self._differs = differs
        self._tell = tell
        self._known = {traced: False}

    def watch(self, outputs: Sequence[Any]) -> None:
        """Look when the backward pass of these outputs of a forward pass begins."""
        for output in outputs:
            found = place_of(output)
            if found is not None:
                step, _ = found
                step.register_prehook(self._look)
                return

    def _look(self, _gradients: Sequence[Any]) -> None:
        now = autocast_now()
        if now not in self._known:
            self._known[now] = self._differs(now)
        if self._known[now]:
            self._tell(now)
