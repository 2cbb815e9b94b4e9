"""Blocks of a model, each a region of its own: which they are, and how they are called.

Blocks that are alike are traced once: they share one compiled function, which looks at
a block only as far as the tracer does.
"""

import functools
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from remat.core.errors import CaptureError
from remat.torch_compat.names import top_saved_tensors_hooks

Chooser = Sequence[str] | Callable[[str, nn.Module], bool]
"""Names of modules, ``*`` for any part of one, or what says for a name and a module
whether it is a block."""

_LISTED = 12

_DEEP = 24
_MOST_KINDS_SHARE = 8
"""From how many blocks on a model is deep, and how many there are to one kind."""


def blocks_of(model: nn.Module, chosen: Chooser | None = None) -> dict[str, nn.Module]:
    """Return the blocks of a model by their names, none inside of another.

    Parameters
    ----------
    model
        The model.
    chosen
        Which modules are blocks; ``None``: those of one class that stand side by side,
        if two of them have parameters of the same names, shapes and types. Layers of
        ``torch.nn`` without modules of their own are none.

    Raises
    ------
    CaptureError
        If there are none, or a name is none of the model's.
    """
    found: dict[str, nn.Module] = {}
    is_block = _is_repeated(model) if chosen is None else _is_chosen(model, chosen)
    for name, module in model.named_modules():
        # Names of what is inside begin with those of what it is in.
        around = accumulate(name.split(".")[:-1], "{}.{}".format)
        if name and found.keys().isdisjoint(around) and is_block(name, module):
            found[name] = module
    if not found:
        names = [name for name, _ in model.named_modules() if name][:_LISTED]
        msg = (
            f"{type(model).__name__} has no blocks: no two modules side by side are of "
            "one class and of equal parameters, with modules inside; give their names, "
            f"such as regions=[{names[0]!r}]"
            if names
            else f"{type(model).__name__} has no modules inside, so no blocks; leave "
            "regions out"
        )
        raise CaptureError(msg)
    return found


def is_deep(model: nn.Module) -> bool:
    """Return whether a model is a deep stack of few kinds of blocks.

    Then the time to plan it block by block is about that of one block of each kind, and
    that to plan it as one graph grows with its depth.
    """
    repeated = _is_repeated(model)
    if not any(repeated(name, module) for name, module in model.named_modules()):
        return False
    blocks = blocks_of(model).values()
    kinds = set(map(_shape_of, blocks))
    return len(blocks) >= max(_DEEP, _MOST_KINDS_SHARE * len(kinds))


def _is_repeated(model: nn.Module) -> Callable[[str, nn.Module], bool]:
    repeated: set[int] = set()
    for parent in model.modules():
        children = [child for child in parent.children() if _may_be_block(child)]
        counts = Counter(map(_shape_of, children))
        kinds = {kind for (kind, _), count in counts.items() if count > 1}
        repeated.update(id(child) for child in children if type(child) in kinds)
    return lambda _name, module: id(module) in repeated


def _shape_of(module: nn.Module) -> tuple[type[nn.Module], tuple[Any, ...]]:
    """Return what is equal for modules that may be equal blocks."""
    return type(module), tuple(
        (name, parameter.shape, parameter.dtype)
        for name, parameter in module.named_parameters()
    )


def _may_be_block(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False  # They are not called.
    has_modules = any(True for _ in module.children())
    return has_modules or not type(module).__module__.startswith("torch.nn.")


def _is_chosen(model: nn.Module, chosen: Chooser) -> Callable[[str, nn.Module], bool]:
    if callable(chosen):
        return chosen
    names = [name for name, _ in model.named_modules() if name]
    for pattern in chosen:
        if not any(fnmatchcase(name, pattern) for name in names):
            msg = (
                f"regions names {pattern!r}, which is no module of "
                f"{type(model).__name__}; there are {', '.join(names[:_LISTED])}"
                f"{', ...' if len(names) > _LISTED else ''}"
            )
            raise CaptureError(msg)
    return lambda name, _module: any(fnmatchcase(name, p) for p in chosen)


class BlockCalls:
    """Blocks that are compiled by themselves while the model's forward runs.

    Parameters
    ----------
    blocks
        By name, as :func:`blocks_of` returns them.
    compiled
        From a function that runs in the model's call to one whose graphs are compiled.
    region_count
        Returns how many regions have run.
    is_strict
        Whether to refuse calls of blocks that are not what they are in one graph.

    Attributes
    ----------
    untraced
        Names of blocks that have run without a graph.
    checkpointed
        Names of blocks that were called inside of a checkpoint, and ran as they are.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]],
        region_count: Callable[[], int],
        *,
        is_strict: bool = False,
    ) -> None:
        self.region_count = region_count
        self.is_strict = is_strict
        self.untraced: set[str] = set()
        self.checkpointed: set[str] = set()

        def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return type(block).forward(block, *args, **kwargs)

        # A code object of its own: the tracer caches by these.
        call.__code__ = call.__code__.replace(co_name=f"block_{id(self)}")
        self._compiled = compiled
        self._run = compiled(call)
        self._names = {block: name for name, block in blocks.items()}
        # With the forward that others had put on a block, ``None`` for its class's.
        self._calls: dict[nn.Module, tuple[Any, _BlockCall]] = {}

    def _call_of(self, block: nn.Module, own: Any) -> "_BlockCall":
        """Return the call of a block, anew if its forward was replaced meanwhile."""
        known, call = self._calls.get(block, (None, None))
        if call is None or known is not own:
            plain = own or functools.partial(type(block).forward, block)
            run = (
                functools.partial(self._run, block)
                if own is None
                # It is not shared.
                else self._compiled(own)
            )
            call = _BlockCall(self, self._names[block], run, plain)
            self._calls[block] = own, call
        return call

    def calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call of the model that runs what was compiled for its blocks."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._installed():
                return call(*args, **kwargs)

        return run

    @contextmanager
    def _installed(self) -> Generator[None]:
        # As an attribute of the module it would be set in ten times the time.
        before = [(vars(block), block) for block in self._names]
        own_forwards = [own.get("forward") for own, _ in before]
        for (own, block), forward in zip(before, own_forwards, strict=True):
            own["forward"] = self._call_of(block, forward)
        try:
            yield
        finally:
            for (own, _), forward in zip(before, own_forwards, strict=True):
                if forward is None:
                    own.pop("forward", None)
                else:
                    own["forward"] = forward


def _is_saved_by_others() -> bool:
    """Return whether what is computed now is not simply saved for backward."""
    is_tracing_ignored = False
    hooks: Any = top_saved_tensors_hooks(is_tracing_ignored)
    return not torch.is_grad_enabled() or hooks is not None


def _is_in_checkpoint() -> bool:
    """Return whether a checkpoint of the model's own saves what is computed now."""
    is_tracing_ignored = False
    hooks: Any = top_saved_tensors_hooks(is_tracing_ignored)
    return hooks is not None and hooks[0].__module__ == checkpoint.__module__


class _BlockCall:
    """The forward of one block, compiled."""

    def __init__(
        self,
        calls: BlockCalls,
        name: str,
        run: Callable[..., Any],
        plain: Callable[..., Any],
    ) -> None:
        self._calls = calls
        self._name = name
        self._run = run
        self._plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's graphs, each the next region of the step.

        Raises
        ------
        CaptureError
            If what the block saves is another's matter, and that is refused.
        """
        if self._calls.is_strict and _is_saved_by_others():
            msg = (
                f"{self._name} is called without gradients, inside of torch.utils."
                "checkpoint or under other hooks for saved tensors, which a block with a "
                "plan of its own is not; fit the model as it will be called, or with "
                "regions='whole'"
            )
            raise CaptureError(msg)
        if _is_in_checkpoint():
            # It compares what is saved with what its second run saves, in backward,
            # where no plan says how the block runs.
            self._calls.checkpointed.add(self._name)
            return self._plain(*args, **kwargs)
        before = self._calls.region_count()
        outputs = self._run(*args, **kwargs)
        if self._calls.region_count() == before:
            self._calls.untraced.add(self._name)
        return outputs
