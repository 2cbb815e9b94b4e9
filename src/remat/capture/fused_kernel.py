"""A kernel that a compiler makes of several operators."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from remat.torch_compat.attributes import kernel_of
from remat.torch_compat.names import disable_current_modes, unset_fake_temporarily

_COMPILED: dict[tuple[str, torch.device], Callable[..., Any]] = {}
"""By names and devices: a step that is traced again needs the same kernels."""


class FusedKernel:
    """Several operators as one callable, compiled when it is first called.

    Two kernels of equal names compute the same, in the same way.

    Parameters
    ----------
    module
        The operators, as a graph from the inputs to a tuple of results.
    operators
        Bare names of the operators, for people.
    inputs
        Fake tensors like the inputs: the kernel is made for their shapes and strides.
    revision
        Of the Python functions among the operators: others make another kernel.
    moot_inputs
        Positions of inputs on whose values only statistics depend.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        *,
        operators: Sequence[str],
        inputs: Sequence[torch.Tensor],
        revision: int = 0,
        moot_inputs: tuple[int, ...] = (),
    ) -> None:
        self.module = module
        self.moot_inputs = moot_inputs
        shapes = [
            (str(t.dtype), tuple(t.shape), tuple(t.stride()), str(t.device))
            for t in inputs
        ]
        text = f"{module.code}{shapes}{revision}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        words = "_".join(dict.fromkeys(name.strip("_") for name in operators))
        # Generated code and the cache of costs call it by these.
        self.__name__ = self.__qualname__ = f"fused_{words[:60].strip('_')}_{digest}"
        self.__module__ = __name__

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Return the results as a tuple."""
        key = self.__name__, inputs[0].device
        if key not in _COMPILED:
            _COMPILED[key] = self._compile(inputs)
        return _COMPILED[key](*inputs)

    def _compile(self, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        # The compiler takes a second to import, and most plans never need it.
        from remat.torch_compat.names import (  # noqa: PLC0415
            compile_fx_inner,
            functorch_config,
            standalone_compile,
        )

        made: list[Any] = []

        def compile_inner(*args: Any, **kwargs: Any) -> Any:
            made.append(compile_fx_inner(*args, **kwargs))
            return made[-1]

        device_type = inputs[0].device.type
        with (
            unset_fake_temporarily(),
            disable_current_modes(),
            torch.no_grad(),
            torch.autocast(device_type, enabled=False),
            # What it keeps is what is around the kernel.
            functorch_config.patch(enable_autograd_cache=False),
        ):
            standalone_compile(
                self.module,
                [x.detach() for x in inputs],
                dynamic_shapes="from_example_inputs",
                options={"inner_compile": compile_inner},
            )
        # The kernel itself: around it are checks, for views and changed inputs, that
        # take longer than many a kernel.
        (kernel,) = made
        call = kernel_of(kernel)
        return lambda *values: call(list(values))
