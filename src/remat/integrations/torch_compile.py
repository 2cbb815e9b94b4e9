"""``torch.compile(model, backend="remat")``, for whoever can only name a backend.

Tools that compile with a backend of the user's choice take its name from their command
line. torch finds this one through the entry points of the installed package.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import torch
from torch import fx

from remat.core.errors import CaptureError, UnitError
from remat.training.fitting import backend
from remat.training.request import PlanOptions
from remat.training.variants import VariantBackend

BUDGET_VARIABLE = "REMAT_BUDGET"

_NEED_OBJECTS = "optimizer", "loss", "progress", "model", "dynamic", "group"
_NAMES = ["budget", *(n for n in get_type_hints(PlanOptions) if n not in _NEED_OBJECTS)]


class NamedBackend:
    """What torch finds under the name ``remat``: a backend for each set of options.

    ``torch.compile(model, backend="remat", dynamic=False, options={"budget": "24
    GiB"})`` is ``torch.compile(model, backend=remat.backend(budget="24 GiB"),
    dynamic=False)``. Where a tool passes no budget, the environment variable
    ``REMAT_BUDGET`` is the budget. Other options are those of :func:`remat.backend`
    that are text or numbers.

    Neither model nor optimizer is known here, so the budget is for what the step reads
    and makes; the optimizer's state comes on top.
    """

    __name__ = "remat"

    def __init__(self) -> None:
        self._backends: dict[tuple[Any, ...], VariantBackend] = {}

    def __call__(
        self,
        module: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        """Compile one traced function.

        Raises
        ------
        UnitError
            If there is no budget, or it is not a positive size.
        CaptureError
            If the function was traced with sizes that vary.
        TypeError, ValueError
            If an option does not exist or makes no sense, or a mode is given.
        """
        given = _checked(options or {}, mode)
        if any(isinstance(value, torch.SymInt) for value in example_inputs):
            msg = (
                "torch.compile traced the step with sizes that vary, as it does with "
                "dynamic=True and when a second shape comes, and no budget can be kept "
                "for them: compile with dynamic=False; where a tool compiles, set "
                "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES=0"
            )
            raise CaptureError(msg)
        key = tuple(sorted(given.items()))
        if key not in self._backends:
            self._backends[key] = backend(**given)
        return self._backends[key](module, example_inputs)

    def reset(self) -> None:
        """Forget all plans; called by ``torch.compiler.reset``."""
        self._backends.clear()


def _checked(options: Mapping[str, Any], mode: str | None) -> dict[str, Any]:
    if mode is not None:
        msg = f"mode={mode!r} is one of inductor's; backend='remat' takes options alone"
        raise ValueError(msg)
    for name, value in options.items():
        if name in _NEED_OBJECTS or not isinstance(value, str | int | float | None):
            msg = (
                f"the option {name!r} is no text or number; give it to remat itself: "
                f"torch.compile(model, backend=remat.backend(..., {name}=...), "
                "dynamic=False)"
            )
            raise TypeError(msg)
        if name not in _NAMES:
            msg = f"backend='remat' has no option {name!r}; it has {', '.join(_NAMES)}"
            raise TypeError(msg)
    given = dict(options)
    if "budget" not in given:
        if BUDGET_VARIABLE not in os.environ:
            msg = (
                "backend='remat' needs a budget: torch.compile(..., options={'budget': "
                f"'8 GiB'}}), or the environment variable {BUDGET_VARIABLE}"
            )
            raise UnitError(msg)
        given["budget"] = os.environ[BUDGET_VARIABLE]
    return given


remat = NamedBackend()
