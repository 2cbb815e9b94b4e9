"""Chains of unequal stages: what the programs need to know of each stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from remat.core.checks import (
    checked_integers,
    checked_text,
    keep_flags,
    keep_records,
)
from remat.core.errors import InvalidGraphError
from remat.core.units import LARGEST_TOTAL, keep_amounts


def check_total(label: str, sizes: Sequence[int]) -> None:
    """Refuse sizes that together are more than can be counted."""
    if sum(sizes) > LARGEST_TOTAL:
        msg = (
            f"the sizes of {label} come to {sum(sizes):_} bytes, the largest being "
            f"{max(sizes):_}; at most {LARGEST_TOTAL:_} can be counted"
        )
        raise InvalidGraphError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOption:
    """One way to run a stage so that its backward can run.

    Parameters
    ----------
    backward_ns
        Time of the stage's backward.
    forward_ns
        Time of the forward that saves what the backward needs, at least that of the
        stage; ``None`` where the backward starts from the stage's input alone and no
        forward runs before it.
    saved_bytes
        What the forward keeps for the backward besides the stage's input and output.
    needs_output
        Whether the backward reads the stage's output.
    forward_workspace_bytes, backward_workspace_bytes
        Scratch memory while each of them runs, beyond what it reads and writes.

    Raises
    ------
    InvalidGraphError
        If a number is no integer, negative or more than
        :data:`~remat.core.units.LARGEST_TOTAL`, or an option without forward saves.
    """

    backward_ns: int
    forward_ns: int | None
    saved_bytes: int = 0
    needs_output: bool = True
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0

    def __post_init__(self) -> None:
        of, error = "a stage's option", InvalidGraphError
        keep_amounts(self, "backward_ns", "saved_bytes", of=of, error=error)
        workspaces = ("forward_workspace_bytes", "backward_workspace_bytes")
        keep_amounts(self, *workspaces, of=of, error=error)
        keep_amounts(self, "forward_ns", of=of, optional=True, error=error)
        keep_flags(self, "needs_output", of=of, error=error)
        if self.forward_ns is None and (self.saved_bytes or self.needs_output):
            msg = (
                f"an option without forward saves {self.saved_bytes} bytes and has "
                f"needs_output={self.needs_output}; it can have neither"
            )
            raise InvalidGraphError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of the forward pass between two values through which everything goes.

    Parameters
    ----------
    forward_ns
        Time of a forward that keeps nothing but its output.
    output_bytes
        Size of the output.
    options
        Ways to run the stage for its backward, at least one. Times and sizes include
        everything inside; options that are worse in every respect do no harm.
    gradient_bytes
        Size of the output's gradient; ``None``: that of the output.
    forward_workspace_bytes
        Scratch memory of the forward that keeps nothing.
    name
        For people.

    Raises
    ------
    InvalidGraphError
        If a number is no integer, negative or more than
        :data:`~remat.core.units.LARGEST_TOTAL`, or there is no option.
    """

    forward_ns: int
    output_bytes: int
    options: tuple[StageOption, ...]
    gradient_bytes: int | None = None
    forward_workspace_bytes: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        error = InvalidGraphError
        checked_text("the name of a stage", self.name, error=error)
        of = f"stage {self.name!r}"
        sizes = ("output_bytes", "forward_workspace_bytes")
        keep_amounts(self, "forward_ns", *sizes, of=of, error=error)
        keep_amounts(self, "gradient_bytes", of=of, optional=True, error=error)
        keep_records(self, StageOption, "options", of=of, error=error)
        if not self.options:
            msg = f"stage {self.name!r} has no option; its backward can never run"
            raise InvalidGraphError(msg)
        for index, option in enumerate(self.options):
            if option.forward_ns is not None and option.forward_ns < self.forward_ns:
                msg = (
                    f"option {index} of stage {self.name!r} runs forward in "
                    f"{option.forward_ns} ns and saves on the way, but without saving it "
                    f"takes {self.forward_ns} ns; use the smaller of the two for both"
                )
                raise InvalidGraphError(msg)

    @property
    def output_gradient_bytes(self) -> int:
        """Size of the output's gradient in bytes."""
        if self.gradient_bytes is None:
            return self.output_bytes
        return self.gradient_bytes


@dataclass(frozen=True, kw_only=True)
class StageChain:
    """A chain of stages, and the turn of its last output into a gradient.

    Parameters
    ----------
    stages
        The stages in forward order, at least one.
    input_bytes
        Size of the chain's input, which is live from the start until the first stage's
        backward; 0 if it is counted elsewhere.
    input_gradient_bytes
        Size of the gradient of the input; 0 if there is none.
    turn_ns, turn_workspace_bytes
        Time and scratch memory of the turn: the loss, forward and backward. The last
        output and its gradient are live during it.

    Raises
    ------
    InvalidGraphError
        If there is no stage, a number is no integer or out of range, or all sizes
        together are more than :data:`~remat.core.units.LARGEST_TOTAL`.
    """

    stages: tuple[Stage, ...]
    input_bytes: int = 0
    input_gradient_bytes: int = 0
    turn_ns: int = 0
    turn_workspace_bytes: int = 0

    def __post_init__(self) -> None:
        of, error = "a chain", InvalidGraphError
        keep_records(self, Stage, "stages", of=of, error=error)
        if not self.stages:
            msg = "a chain needs at least one stage; got none"
            raise InvalidGraphError(msg)
        keep_amounts(self, "input_bytes", "input_gradient_bytes", of=of, error=error)
        keep_amounts(self, "turn_ns", "turn_workspace_bytes", of=of, error=error)
        check_total(of, self.all_sizes)

    @classmethod
    def of_lists(
        cls,
        *,
        forward_ns: Sequence[int],
        backward_ns: Sequence[int],
        output_bytes: Sequence[int],
        saved_bytes: Sequence[int] | None = None,
        input_bytes: int = 0,
        input_gradient_bytes: int | None = None,
    ) -> "StageChain":
        """Return the chain of stages with one option each, as papers describe it.

        Parameters
        ----------
        forward_ns, backward_ns
            Time of each stage's forward and backward.
        output_bytes
            Size of each stage's output, and of the output's gradient.
        saved_bytes
            What each forward keeps for its backward besides input and output; by
            default nothing.
        input_bytes, input_gradient_bytes
            Sizes of the chain's input and of its gradient, by default as large.

        Raises
        ------
        InvalidGraphError
            As the constructors, and if the lists differ in length.

        Examples
        --------
        >>> chain = StageChain.of_lists(
        ...     forward_ns=[1, 2],
        ...     backward_ns=[2, 4],
        ...     output_bytes=[3, 1],
        ...     input_bytes=5,
        ... )
        >>> chain.least_ns, chain.value_bytes, chain.gradient_bytes
        (9, (5, 3, 1), (5, 3, 1))
        """
        given = {
            "forward_ns": forward_ns,
            "backward_ns": backward_ns,
            "output_bytes": output_bytes,
        }
        if saved_bytes is not None:
            given["saved_bytes"] = saved_bytes
        lists = {
            label: checked_integers(label, entries, least=0, error=InvalidGraphError)
            for label, entries in given.items()
        }
        length = len(lists["forward_ns"])
        lists.setdefault("saved_bytes", (0,) * length)
        if {len(entries) for entries in lists.values()} != {length}:
            found = ", ".join(f"{len(lists[label])} {label}" for label in lists)
            msg = f"a chain of {found}; give each list one entry a stage"
            raise InvalidGraphError(msg)
        return cls(
            stages=tuple(
                Stage(
                    forward_ns=forward,
                    output_bytes=output,
                    options=(
                        StageOption(
                            forward_ns=forward, backward_ns=backward, saved_bytes=saved
                        ),
                    ),
                )
                for forward, backward, output, saved in zip(
                    *lists.values(), strict=True
                )
            ),
            input_bytes=input_bytes,
            input_gradient_bytes=(
                input_bytes if input_gradient_bytes is None else input_gradient_bytes
            ),
        )

    @cached_property
    def value_bytes(self) -> tuple[int, ...]:
        """Sizes of the input and of each stage's output."""
        return (self.input_bytes, *(stage.output_bytes for stage in self.stages))

    @cached_property
    def gradient_bytes(self) -> tuple[int, ...]:
        """Sizes of the gradients of the input and of each stage's output."""
        outputs = (stage.output_gradient_bytes for stage in self.stages)
        return (self.input_gradient_bytes, *outputs)

    @cached_property
    def least_ns(self) -> int:
        """Time of the step if every stage runs its cheapest option once."""
        return self.turn_ns + sum(
            min(
                (stage.forward_ns if o.forward_ns is None else o.forward_ns)
                + o.backward_ns
                for o in stage.options
            )
            for stage in self.stages
        )

    @cached_property
    def all_sizes(self) -> tuple[int, ...]:
        """Every size in bytes that occurs in the chain."""
        inside = (
            size
            for stage in self.stages
            for size in (
                stage.forward_workspace_bytes,
                *(
                    size
                    for option in stage.options
                    for size in (
                        option.saved_bytes,
                        option.forward_workspace_bytes,
                        option.backward_workspace_bytes,
                    )
                ),
            )
        )
        return (
            *self.value_bytes,
            *self.gradient_bytes,
            self.turn_workspace_bytes,
            *inside,
        )
