"""The training graph: operations over storages, forward and backward in one graph.

A :class:`Storage` is a block of memory that one or more tensors (views) share. An
:class:`Op` reads storages and writes storages. Views and tuple getters are not ops:
they cost nothing and belong to the storage they alias.

Invariants (checked on construction of :class:`TrainingGraph`):

* every storage is either *resident* (always live), a *tangent* (appears at the
  boundary), or written by exactly one op;
* ops are listed in a topological order, all forward ops before all backward ops;
* forward ops read nothing that exists only after the boundary;
* external ops come last in their pass and, between them, read what leaves with it: the
  forward or final outputs, as far as an op that may run again writes them;
* ops that write what the caller holds from the boundary on (:attr:`held_outputs
  <TrainingGraph.held_outputs>`) run once: a second run would write a second block;
* on each device kind times come to at most :data:`~remat.core.units.LARGEST_TOTAL` ns,
  and
  sizes with workspaces to as many bytes.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

from remat.core.checks import (
    checked_integer,
    checked_list,
    checked_text,
    keep_flags,
    keep_integer_lists,
    keep_integers,
    keep_records,
    keep_words,
)
from remat.core.errors import InvalidGraphError
from remat.core.units import LARGEST_TOTAL, keep_amounts


class Phase(StrEnum):
    """The part of the training step that an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Role(StrEnum):
    """What a storage holds, for people: used in breakdowns and plots only."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    OPTIMIZER_STATE = "optimizer state"
    LIBRARY = "workspace of libraries"
    GRADIENT = "gradient"
    BUCKET = "gradient bucket"
    INPUT_GRADIENT = "input gradient"
    ACTIVATION = "activation"
    OUTPUT = "output"
    TANGENT = "tangent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A block of memory shared by a tensor and its views.

    Parameters
    ----------
    name
        For people; unique names read better but are not required.
    size_bytes
        Size of the block in bytes, 0 to :data:`~remat.core.units.LARGEST_TOTAL`.
    role
        What the block holds; does not change the semantics.
    is_resident
        Whether the block is live for the whole step and never discarded.
    home
        Index of the device where a resident storage lives, where a tangent appears,
        and where a forward or final output must be live.

    Raises
    ------
    InvalidGraphError
        If the size or the home is no integer or out of range, the role unknown, or a
        field of another type.
    """

    name: str
    size_bytes: int
    role: Role = Role.ACTIVATION
    is_resident: bool = False
    home: int = 0

    def __post_init__(self) -> None:
        error = InvalidGraphError
        checked_text("the name of a storage", self.name, error=error)
        of = f"storage {self.name!r}"
        keep_amounts(self, "size_bytes", of=of, error=error)
        keep_integers(self, "home", of=of, least=0, error=error)
        keep_flags(self, "is_resident", of=of, error=error)
        keep_words(self, Role, "role", of=of, error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation of the training step.

    Parameters
    ----------
    name
        For people.
    reads, writes
        Indices of the storages read and written. No index appears twice.
    cost_ns
        Time of one run in nanoseconds per device kind of the graph; ``None`` where
        the op cannot run on that kind. At least one entry is an integer.
    workspace_bytes
        Scratch memory while running, in bytes, per device kind of the graph.
    phase
        Forward or backward.
    non_recomputable
        Why the op may run only once, or ``None`` if it may run again.
    is_ordered
        Whether the op advances hidden state (a random number generator): the first
        runs of all ordered ops happen in op order.
    is_external
        Whether the op stands for work that the caller does when a pass has ended (loss
        outside the model, optimizer step); nothing else of the pass runs after it.
    source
        The user's source line that created the op, or an empty string.

    Raises
    ------
    InvalidGraphError
        If a number is no integer or out of range, a storage is named twice, costs and
        workspaces differ in number, all costs are ``None``, or a field is of another
        type.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    cost_ns: tuple[int | None, ...]
    workspace_bytes: tuple[int, ...]
    phase: Phase
    non_recomputable: str | None = None
    is_ordered: bool = False
    is_external: bool = False
    source: str = ""

    @property
    def kind(self) -> str:
        """The name without the number that tells it from others of its operator."""
        name, _, number = self.name.rpartition("_")
        return name if name and number.isdigit() else self.name

    def __post_init__(self) -> None:
        self._check_types()
        if len(self.cost_ns) != len(self.workspace_bytes) or not self.cost_ns:
            msg = (
                f"op {self.name!r} has {len(self.cost_ns)} costs and "
                f"{len(self.workspace_bytes)} workspaces; need one of each per device "
                "kind, at least one"
            )
            raise InvalidGraphError(msg)
        if all(cost is None for cost in self.cost_ns):
            msg = f"op {self.name!r} can run on no device kind: every cost is None"
            raise InvalidGraphError(msg)
        for kind, indices in (("reads", self.reads), ("writes", self.writes)):
            if len(set(indices)) != len(indices):
                msg = f"op {self.name!r} {kind} a storage twice: {indices}"
                raise InvalidGraphError(msg)

    def _check_types(self) -> None:
        error, most = InvalidGraphError, LARGEST_TOTAL
        checked_text("the name of an op", self.name, error=error)
        of = f"op {self.name!r}"
        keep_integer_lists(self, "reads", "writes", of=of, error=error)
        keep_integer_lists(
            self, "workspace_bytes", of=of, least=0, most=most, error=error
        )
        costs = checked_list(f"cost_ns of {of}", self.cost_ns, error=error)
        object.__setattr__(self, "cost_ns", tuple(self._cost(cost) for cost in costs))
        keep_words(self, Phase, "phase", of=of, error=error)
        keep_flags(self, "is_ordered", "is_external", of=of, error=error)
        if (reason := self.non_recomputable) is not None:
            checked_text(f"non_recomputable of {of}", reason, error=error)
        checked_text(f"source of {of}", self.source, error=error)

    def _cost(self, cost: object) -> int | None:
        if cost is None or (type(cost) is int and 0 <= cost <= LARGEST_TOTAL):
            return cost
        return checked_integer(
            f"cost_ns of op {self.name!r}",
            cost,
            least=0,
            most=LARGEST_TOTAL,
            error=InvalidGraphError,
        )

    @property
    def is_recomputable(self) -> bool:
        """Whether the op may run more than once."""
        return self.non_recomputable is None


@dataclass(frozen=True, kw_only=True)
class TrainingGraph:
    """A training step as a DAG of ops over storages.

    Parameters
    ----------
    name
        For people.
    device_kinds
        Names of the device kinds that the ops' costs refer to, at least one.
    storages, ops
        The vertices; ops are in a topological order, forward before backward.
    forward_outputs
        Storages that must be live on their home device at the boundary.
    tangents
        Storages that appear on their home device at the boundary.
    final_outputs
        Storages that must be live on their home device at the end.

    Raises
    ------
    InvalidGraphError
        If an invariant of the module docstring is broken; the message names the op
        or the storage.
    """

    name: str
    storages: tuple[Storage, ...]
    ops: tuple[Op, ...]
    forward_outputs: tuple[int, ...] = ()
    tangents: tuple[int, ...] = ()
    final_outputs: tuple[int, ...] = ()
    device_kinds: tuple[str, ...] = ("cpu",)

    def __post_init__(self) -> None:
        self._check_types()
        self._check_kinds()
        self._check_boundary_lists()
        self._check_ops()
        self._check_external(Phase.FORWARD, self.forward_outputs)
        self._check_external(Phase.BACKWARD, self.final_outputs)
        self._check_held()
        self._check_totals()

    def __repr__(self) -> str:
        return (
            f"<TrainingGraph {self.name!r}: {len(self.ops)} ops, "
            f"{len(self.storages)} storages, for {', '.join(self.device_kinds)}>"
        )

    def _fail(self, message: str) -> None:
        msg = f"graph {self.name!r}: {message}"
        raise InvalidGraphError(msg)

    def _check_types(self) -> None:
        error = InvalidGraphError
        checked_text("the name of a graph", self.name, error=error)
        of = f"graph {self.name!r}"
        keep_records(self, Storage, "storages", of=of, error=error)
        keep_records(self, Op, "ops", of=of, error=error)
        keep_records(self, str, "device_kinds", of=of, error=error)
        lists = ("forward_outputs", "tangents", "final_outputs")
        keep_integer_lists(self, *lists, of=of, error=error)

    def _check_kinds(self) -> None:
        if not self.device_kinds or len(set(self.device_kinds)) != len(
            self.device_kinds
        ):
            self._fail(
                f"device_kinds must be distinct and not empty: {self.device_kinds}"
            )
        if not self.ops:
            self._fail("there is no op; a training graph has at least one")
        for index, op in enumerate(self.ops):
            if len(op.cost_ns) != len(self.device_kinds):
                self._fail(
                    f"op {index} {op.name!r} has {len(op.cost_ns)} costs for "
                    f"{len(self.device_kinds)} device kinds"
                )

    def _check_boundary_lists(self) -> None:
        count = len(self.storages)
        for label, indices in (
            ("forward_outputs", self.forward_outputs),
            ("tangents", self.tangents),
            ("final_outputs", self.final_outputs),
        ):
            if len(set(indices)) != len(indices):
                self._fail(f"{label} lists a storage twice: {indices}")
            for storage in indices:
                if not 0 <= storage < count:
                    self._fail(f"{label} names storage {storage} of {count}")
        for storage in self.tangents:
            if self.storages[storage].is_resident:
                self._fail(f"tangent {self.storages[storage].name!r} is also resident")

    def _check_ops(self) -> None:
        tangents = set(self.tangents)
        available = {i for i, s in enumerate(self.storages) if s.is_resident}
        written: set[int] = set()
        is_backward = False
        for index, op in enumerate(self.ops):
            if op.phase is Phase.BACKWARD and not is_backward:
                is_backward = True
                self._check_forward_outputs(available)
                available |= tangents
            elif op.phase is Phase.FORWARD and is_backward:
                self._fail(f"forward op {index} {op.name!r} follows a backward op")
            self._check_op(index, available, written)
            written.update(op.writes)
            available.update(op.writes)
        if not is_backward:
            self._check_forward_outputs(available)
            available |= tangents
        for index in range(len(self.storages)):
            if index not in available:
                self._fail(
                    f"storage {index} {self.storages[index].name!r} is neither resident, "
                    "nor a tangent, nor written by any op"
                )

    def _check_totals(self) -> None:
        """Check that bytes and times can be counted, whatever a schedule repeats."""
        blocks = [storage.size_bytes for storage in self.storages]
        for kind, name in enumerate(self.device_kinds):
            times = [op.cost_ns[kind] or 0 for op in self.ops]
            sizes = [*blocks, *(op.workspace_bytes[kind] for op in self.ops)]
            for what, unit, numbers in (("times", "ns", times), ("sizes", "B", sizes)):
                total = sum(numbers)
                if total > LARGEST_TOTAL:
                    self._fail(
                        f"the {what} on device kind {name!r} come to {total:_} {unit}, "
                        f"the largest being {max(numbers):_}; at most {LARGEST_TOTAL:_} "
                        "can be counted"
                    )

    def _check_external(self, phase: Phase, leaving: tuple[int, ...]) -> None:
        ops = [(index, op) for index, op in enumerate(self.ops) if op.phase is phase]
        seen = {s for _, op in ops if op.is_external for s in op.reads}
        if not any(op.is_external for _, op in ops):
            return
        for (index, op), (_, following) in pairwise(ops):
            if op.is_external and not following.is_external:
                self._fail(
                    f"op {index} {op.name!r} is the caller's work after the {phase} pass, "
                    f"but {following.name!r} of the pass follows it"
                )
        for storage in leaving:
            producer = self.producers[storage]
            if (
                producer is not None
                and self.ops[producer].is_recomputable
                and not self.ops[producer].is_external
                and storage not in seen
            ):
                self._fail(
                    f"storage {storage} {self.storages[storage].name!r} leaves with the "
                    f"{phase} pass, but no external op of that pass reads it"
                )

    def _check_held(self) -> None:
        for storage in sorted(self.held_outputs):
            producer = self.producers[storage]
            if producer is not None and self.ops[producer].is_recomputable:
                self._fail(
                    f"storage {storage} {self.storages[storage].name!r} is both a forward "
                    "and a final output, so the caller holds it in between, but op "
                    f"{producer} {self.ops[producer].name!r} that writes it may run again: "
                    "say in its non_recomputable why not, or leave the storage out of one "
                    "of the two"
                )

    def _check_forward_outputs(self, available: set[int]) -> None:
        for storage in self.forward_outputs:
            if storage not in available:
                self._fail(
                    f"forward output {storage} {self.storages[storage].name!r} does not "
                    "exist at the boundary"
                )

    def _check_op(self, index: int, available: set[int], written: set[int]) -> None:
        op, count = self.ops[index], len(self.storages)
        for storage in (*op.reads, *op.writes):
            if not 0 <= storage < count:
                self._fail(f"op {index} {op.name!r} names storage {storage} of {count}")
        for storage in op.reads:
            if storage not in available:
                self._fail(
                    f"op {index} {op.name!r} reads storage {storage} "
                    f"{self.storages[storage].name!r} before it exists: the ops are "
                    "cyclic or not in topological order"
                )
        for storage in op.writes:
            if storage in written:
                self._fail(
                    f"storage {storage} {self.storages[storage].name!r} is written twice, "
                    f"the second time by op {index} {op.name!r}"
                )
            if self.storages[storage].is_resident or storage in self.tangents:
                self._fail(
                    f"op {index} {op.name!r} writes storage {storage} "
                    f"{self.storages[storage].name!r}, which is resident or a tangent"
                )

    @cached_property
    def forward_count(self) -> int:
        """Number of forward ops; op ``forward_count`` is the first backward op."""
        return sum(op.phase is Phase.FORWARD for op in self.ops)

    @cached_property
    def held_outputs(self) -> frozenset[int]:
        """Storages that the caller holds at home from the boundary to the end.

        What is handed over at the boundary (forward outputs, and tangents, which the
        caller made) and has to be live at the end: the loss, the outputs of the model.
        The caller's references keep these blocks alive, whatever a schedule does, so no
        schedule may count on their bytes; see :mod:`remat.core.simulator`.
        """
        appearing = {*self.forward_outputs, *self.tangents}
        return frozenset(appearing.intersection(self.final_outputs))

    @cached_property
    def producers(self) -> tuple[int | None, ...]:
        """Index of the op writing each storage; ``None`` for residents and tangents."""
        producers: list[int | None] = [None] * len(self.storages)
        for index, op in enumerate(self.ops):
            for storage in op.writes:
                producers[storage] = index
        return tuple(producers)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Indices, ascending, of the ops that read each storage."""
        consumers: list[list[int]] = [[] for _ in self.storages]
        for index, op in enumerate(self.ops):
            for storage in op.reads:
                consumers[storage].append(index)
        return tuple(tuple(ops) for ops in consumers)

    @cached_property
    def required_ops(self) -> frozenset[int]:
        """The ops that every valid schedule runs at least once.

        These are the producers of forward and final outputs, ordered ops, ops without
        outputs, and the producers of whatever those read, transitively.
        """
        producers = self.producers
        required: set[int] = set()
        pending = [
            op
            for storage in (*self.forward_outputs, *self.final_outputs)
            if (op := producers[storage]) is not None
        ]
        pending += [
            index for index, op in enumerate(self.ops) if op.is_ordered or not op.writes
        ]
        while pending:
            op = pending.pop()
            if op in required:
                continue
            required.add(op)
            pending.extend(
                producer
                for storage in self.ops[op].reads
                if (producer := producers[storage]) is not None
            )
        return frozenset(required)

    def resident_bytes(self, device: int = 0) -> int:
        """Return the bytes that are live on ``device`` during the whole step."""
        return sum(
            s.size_bytes for s in self.storages if s.is_resident and s.home == device
        )

    def kind_index(self, kind: str) -> int:
        """Return the position of device kind ``kind`` in the ops' costs.

        Raises
        ------
        InvalidGraphError
            If the graph has no costs for that kind.
        """
        if kind not in self.device_kinds:
            self._fail(
                f"no costs for device kind {kind!r}; it has costs for "
                f"{', '.join(self.device_kinds)}"
            )
        return self.device_kinds.index(kind)
