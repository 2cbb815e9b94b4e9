"""A training graph for the judge in the making, on one device."""

from collections.abc import Sequence

from remat.core.graph import Op, Phase, Role, Storage


class GraphDraft:
    """Storages and ops, in the order in which they are added."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.ops: list[Op] = []

    def storage(
        self,
        name: str,
        size_bytes: int,
        *,
        role: Role = Role.ACTIVATION,
        is_resident: bool = False,
    ) -> int:
        """Add a storage, and return its index."""
        self.storages.append(
            Storage(
                name=name, size_bytes=size_bytes, role=role, is_resident=is_resident
            )
        )
        return len(self.storages) - 1

    def op(
        self,
        name: str,
        reads: Sequence[int],
        writes: Sequence[int],
        cost_ns: int,
        phase: Phase,
        *,
        workspace_bytes: int = 0,
        once: str | None = None,
    ) -> int:
        """Add an op, and return its index; ``once`` says why it may not run again."""
        self.ops.append(
            Op(
                name=name,
                reads=tuple(reads),
                writes=tuple(writes),
                cost_ns=(cost_ns,),
                workspace_bytes=(workspace_bytes,),
                phase=phase,
                non_recomputable=once,
            )
        )
        return len(self.ops) - 1
