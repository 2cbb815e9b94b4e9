"""A problem on several devices as plain numbers, indexed by device instead of kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from remat.core.bounds import required_ops
from remat.core.graph import Phase, TrainingGraph
from remat.core.problem import Problem


@dataclass(frozen=True, kw_only=True)
class DeviceInstance:
    """What the models and the search for several devices work on.

    Parameters
    ----------
    graph
        The graph to train.
    device_names
        For messages.
    budgets_bytes
        Per device, the bytes left for what is not resident there; ``None`` for no
        limit. Negative where the residents alone exceed the budget.
    cost_ns
        Per op and device, the time of one run, or ``None`` where it cannot run.
    workspace_bytes
        Per op and device.
    copy_ns
        Per link (source, target), the time to copy each storage.
    copies_wait
        As the platform says.
    """

    graph: TrainingGraph
    device_names: tuple[str, ...]
    budgets_bytes: tuple[int | None, ...]
    cost_ns: tuple[tuple[int | None, ...], ...]
    workspace_bytes: tuple[tuple[int, ...], ...]
    copy_ns: Mapping[tuple[int, int], tuple[int, ...]]
    copies_wait: bool = False

    @property
    def devices(self) -> range:
        """Indices of the devices."""
        return range(len(self.device_names))

    @cached_property
    def sizes_bytes(self) -> tuple[int, ...]:
        """Size of each storage."""
        return tuple(storage.size_bytes for storage in self.graph.storages)

    @cached_property
    def required(self) -> tuple[int, ...]:
        """The ops that every schedule runs at least once, in graph order."""
        return tuple(sorted(required_ops(self.graph)))

    def is_home(self, storage: int, device: int) -> bool:
        """Whether ``storage`` is resident and lives on ``device``."""
        block = self.graph.storages[storage]
        return block.is_resident and block.home == device

    def run_bytes(self, op: int, device: int) -> int:
        """Return the bytes that a run needs, besides the residents of the device.

        Inputs, outputs and workspace, all at once; in the backward pass beside what the
        caller holds there.
        """
        storages = {*self.graph.ops[op].reads, *self.graph.ops[op].writes}
        if self.graph.ops[op].phase is Phase.BACKWARD:
            homes = self.graph.storages
            storages |= {s for s in self.graph.held_outputs if homes[s].home == device}
        return self.workspace_bytes[op][device] + sum(
            self.sizes_bytes[s] for s in storages if not self.is_home(s, device)
        )

    @staticmethod
    def of(problem: Problem) -> "DeviceInstance":
        """Return the numbers of a problem."""
        graph, platform = problem.graph, problem.platform
        kinds = [graph.kind_index(device.kind) for device in platform.devices]
        return DeviceInstance(
            graph=graph,
            device_names=tuple(device.name for device in platform.devices),
            budgets_bytes=tuple(
                None
                if device.budget_bytes is None
                else device.budget_bytes - graph.resident_bytes(index)
                for index, device in enumerate(platform.devices)
            ),
            cost_ns=tuple(tuple(op.cost_ns[k] for k in kinds) for op in graph.ops),
            workspace_bytes=tuple(
                tuple(op.workspace_bytes[k] for k in kinds) for op in graph.ops
            ),
            copy_ns={
                (link.source, link.target): tuple(
                    link.copy_ns(storage.size_bytes) for storage in graph.storages
                )
                for link in platform.links
            },
            copies_wait=platform.copies_wait,
        )
