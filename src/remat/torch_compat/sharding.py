"""Parameters that are in pieces on several processes, and what gathers them.

``torch.distributed.fsdp.fully_shard`` keeps a piece of each parameter, gathers those
of a module around its forward and its backward pass, and hands out pieces of gradients.
"""

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn


class Division(NamedTuple):
    """How a tensor is divided among processes.

    Parameters
    ----------
    placements
        What each dimension of the mesh does to it.
    shape, strides
        Those of the part that this process holds.
    """

    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor: all of it, unless it is in pieces."""
    # Imported by whoever cut it, and slow to import.
    pieces: Any = sys.modules.get("torch.distributed.tensor")
    if pieces is None or not isinstance(tensor, pieces.DTensor):
        return tensor
    piece: Any = tensor
    return piece._local_tensor


def in_pieces_like(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which this process holds a part, in pieces as another one.

    That is the part itself where the other one is whole.
    """
    if not is_in_pieces(whole):
        return part
    kind: Any = type(whole)
    divided: Any = whole
    return kind(part, divided._spec, requires_grad=False)


def division_of(tensor: torch.Tensor) -> Division | None:
    """Return how a tensor is divided among processes, ``None`` if it is whole."""
    if not is_in_pieces(tensor):
        return None
    divided: Any = tensor
    part = local_part(tensor)
    return Division(tuple(divided.placements), tuple(part.shape), part.stride())


def empty_divided(whole: torch.Tensor, division: Division) -> torch.Tensor:
    """Return a tensor of the shape, type and mesh of another one, divided like this."""
    kind: Any = type(whole)
    divided: Any = whole
    part = torch.empty_strided(
        division.shape, division.strides, dtype=whole.dtype, device=whole.device
    )
    return kind.from_local(
        part,
        divided.device_mesh,
        division.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def is_in_pieces(tensor: torch.Tensor) -> bool:
    """Return whether other processes hold the rest of a tensor, a ``DTensor``."""
    return local_part(tensor) is not tensor


def is_gathered_around(module: nn.Module) -> bool:
    """Return whether a module's parameters are gathered, by itself or one around it."""
    return getattr(module, "_is_fsdp_managed_module", False)


def sharded_parts(model: nn.Module) -> list[str]:
    """Return the names of the parts of a model that are sharded by themselves."""
    sharding: Any = sys.modules.get("torch.distributed.fsdp")
    if sharding is None:
        return []
    return [
        name
        for name, module in model.named_modules()
        if name and isinstance(module, sharding.FSDPModule)
    ]


def gathered_groups(model: nn.Module) -> "list[GatheredGroup]":
    """Return the groups of parameters that are gathered together, outer ones first."""
    sharding: Any = sys.modules.get("torch.distributed.fsdp")
    if sharding is None:
        return []
    modules: list[Any] = [
        module for module in model.modules() if isinstance(module, sharding.FSDPModule)
    ]
    states = [module._get_fsdp_state() for module in modules]
    groups = [
        GatheredGroup(group, state, module)
        for module, state in zip(modules, states, strict=True)
        for group in _groups_of(state)
    ]
    # Modules that were sharded together, as a list, share theirs.
    return list(dict.fromkeys(groups))


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


class GatheredGroup:
    """Parameters that are gathered together around the call of a module.

    Sizes are known once the module was called.
    """

    def __init__(self, group: Any, state: Any, module: Any) -> None:
        self._group = group
        self._state = state
        self._module = module

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GatheredGroup) and other._group is self._group

    def __hash__(self) -> int:
        return hash(id(self._group))

    @property
    def is_outermost(self) -> bool:
        """Whether all others are of modules inside, once the model was called."""
        return bool(self._state._is_root)

    @property
    def name(self) -> str:
        """Name of the module, for people."""
        return self._group._module_fqn or "the model"

    @property
    def device_type(self) -> str:
        """Type of the device of the whole parameters."""
        return self._group.device.type

    @property
    def unsupported(self) -> str | None:
        """What is set that no plan counts, or ``None``."""
        if self._group._is_hsdp:
            return "replicas of pieces (a mesh of two dimensions)"
        if any(parameter.offload_to_cpu for parameter in self._group.fsdp_params):
            return "pieces that are kept on the host (CPUOffloadPolicy)"
        if any(parameter.is_dtensor for parameter in self._group.fsdp_params):
            return "parameters that are in pieces when gathered (tensor parallel)"
        return None

    @property
    def is_let_go(self) -> bool:
        """Whether the whole parameters go after the forward pass, to come again."""
        return self._group.post_forward_mesh_info is not None

    @property
    def may_be_kept(self) -> bool:
        """Whether it may be chosen if they go, once the model was called.

        Not of the outermost, which come back at once, and of those that are divided
        otherwise between their passes.
        """
        between = self._group.post_forward_mesh_info
        is_plain = between is None or between == self._group.mesh_info
        return is_plain and not self.is_outermost and len(_groups_of(self._state)) == 1

    def let_go(self, is_let_go: bool) -> None:  # noqa: FBT001
        """Let the whole parameters go after forward passes that end now, or stay."""
        if is_let_go != self.is_let_go:
            self._module.set_reshard_after_forward(is_let_go, recurse=False)

    @property
    def is_gathered(self) -> bool:
        """Whether the whole parameters are there now."""
        return self._group.is_unsharded

    @property
    def stays_gathered(self) -> bool:
        """Whether the whole parameters are there between steps, before or after one."""
        return self.is_gathered or not self._group.reshard_after_backward

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the whole parameters and of this process's pieces of them."""
        pieces = [local_part(p.sharded_param) for p in self._group.fsdp_params]
        return sum(self.sizes_bytes) + sum(piece.nbytes for piece in pieces)

    @property
    def waiting(self) -> list[torch.Tensor]:
        """Whole gradients, as sent, that the pass before has left for the next one.

        They are the same of all groups of a model.
        """
        context = self._group.comm_ctx
        # Both are there once the model was called; which one hangs on the version.
        only = getattr(context, "reduce_scatter_state", None)
        states: Any = getattr(context, "reduce_scatter_states", [only])
        return [state.reduce_scatter_input for state in states if state is not None]

    @property
    def most_waiting(self) -> int:
        """How many blocks of gradients wait at most, as sent, for the next ones."""
        context = self._group.comm_ctx
        return getattr(context, "reduce_scatter_max_input_buffers", 1)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The whole parameters, whose storages are empty while they are in pieces."""
        return [parameter._unsharded_param for parameter in self._group.fsdp_params]

    @property
    def sizes_bytes(self) -> list[int]:
        """Bytes of each block that whole parameters take."""
        return [
            output.numel() * output.element_size()
            for parameter in self._group.fsdp_params
            for output in parameter.all_gather_outputs
        ]

    @property
    def process_group(self) -> Any:
        """The processes among which the parameters are divided."""
        return self._group._all_gather_process_group

    @property
    def world_size(self) -> int:
        """Among how many processes the parameters are divided."""
        return self.process_group.size()

    @property
    def cast_bytes(self) -> int:
        """Bytes of this process's pieces in the type in which they are gathered."""
        is_cast = any(p.param_dtype is not None for p in self._group.fsdp_params)
        return sum(self.sizes_bytes) // self.world_size if is_cast else 0

    @property
    def reduced_bytes(self) -> tuple[int, int, int]:
        """Bytes of gradients to be added up, of their pieces, and of a copy of these.

        The copy is made where pieces are added up in another type than they stay in.
        """
        numel, whole_bytes, own_bytes = 0, 0, 0
        for parameter in self._group.fsdp_params:
            if not parameter.sharded_param.requires_grad:
                continue
            own = parameter.padded_sharded_param_size.numel()
            whole_type = parameter.reduce_dtype or parameter._unsharded_param.dtype
            numel += own
            whole_bytes += own * self.world_size * whole_type.itemsize
            own_bytes += own * parameter.sharded_param.dtype.itemsize
        copied_bytes = whole_bytes // self.world_size
        return whole_bytes, own_bytes, copied_bytes if copied_bytes != own_bytes else 0

    def is_last_node(self, node: Any) -> bool:
        """Whether a node of autograd comes last in the backward pass of its module."""
        return getattr(node, "param_group", None) is self._group

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients of an earlier pass, to which others are added."""
        return any(p.sharded_param.grad is not None for p in self._group.fsdp_params)

    @property
    def reduces_gradients(self) -> bool:
        """Whether a backward pass that comes now hands gradients out in pieces."""
        return self._group.reduce_grads

    @property
    def whole_gradients(self) -> list[torch.Tensor]:
        """Gradients of whole parameters, which passes have left that reduced none."""
        found: list[torch.Tensor | None] = []
        for parameter in self._group.fsdp_params:
            # There once the module was called.
            whole = getattr(parameter, "_unsharded_param", None)
            found += [whole.grad] if whole is not None else []
            found.append(parameter.unsharded_accumulated_grad)
        return [gradient for gradient in found if gradient is not None]

    @property
    def kept_dtype(self) -> torch.dtype | None:
        """Type in which whole gradients stay that are not reduced, if they are cast."""
        for parameter in self._group.fsdp_params:
            if parameter.reduce_dtype not in (None, parameter._unsharded_param.dtype):
                return parameter.reduce_dtype
        return None

    @property
    def has_threads(self) -> bool:
        """Whether threads exchange tensors, and may be the last to let go of them."""
        return torch.distributed.get_backend(self.process_group) == "gloo"

    @contextmanager
    def left_alone(self) -> Generator[None]:
        """Let backward passes inside gather and reduce nothing.

        Hooks do that at what the module returned and was given, also where one node
        runs alone.
        """
        group = self._group
        group.pre_backward = group.post_backward = lambda *_: None
        try:
            yield
        finally:
            del group.pre_backward, group.post_backward

    @contextmanager
    def held(self) -> Generator[None]:
        """Let the whole parameters be there inside."""
        is_gathered = self.is_gathered
        self._group.unshard()
        self._group.wait_for_unshard()
        try:
            yield
        finally:
            if not is_gathered:
                self._group.reshard()


@dataclass
class Gathered:
    """What forward passes did that gathered parameters.

    Parameters
    ----------
    order
        The groups in the order in which their modules returned.
    kept
        Those that were gathered still when the model returned.
    """

    order: list[GatheredGroup] = field(default_factory=list[GatheredGroup])
    kept: list[GatheredGroup] = field(default_factory=list[GatheredGroup])


@contextmanager
def gathering_alone(groups: Sequence[GatheredGroup]) -> Generator[Gathered]:
    """Let a forward pass inside gather without other processes, from copies of a piece.

    So a process may plan while others train. Afterwards all is as before: in pieces,
    and no backward pass expected.
    """
    found = Gathered()
    before = [each._group._all_gather_comm for each in groups]
    whole = {id(each._group) for each in groups if each.is_gathered}
    for each in groups:
        each._group._all_gather_comm = _Copies()
    try:
        yield found
        if groups:
            known = {id(each._group): each for each in groups}
            order = groups[0]._group.comm_ctx.post_forward_order
            found.order = [known[id(group)] for group in order]
            found.kept = [each for each in groups if each.is_gathered]
    finally:
        for each, comm in zip(groups, before, strict=True):
            each._group._all_gather_comm = comm
        for each in groups:
            _reset(each._group)
            # Some stay whole after a backward pass, if the caller said so.
            if id(each._group) not in whole:
                each._group.reshard()


def _reset(group: Any) -> None:
    group._all_gather_result = None
    group._training_state = type(group._training_state).IDLE
    group._post_forward_indices.clear()
    group.comm_ctx.post_forward_order.clear()
    group.comm_ctx.all_gather_state = None


class _Copies:
    """Gathers pieces, each taken to be like that of this process."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        del async_op
        pieces = output_tensor.view(group.size(), -1)
        # One of them is the input itself.
        pieces.copy_(input_tensor.clone().expand_as(pieces))
