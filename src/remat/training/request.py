"""What a plan shall be made for, checked before anything slow is done."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from os import PathLike
from typing import (
    Any,
    Literal,
    SupportsIndex,
    TypedDict,
    TypeVar,
    get_args,
    get_type_hints,
)

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from remat.core.checks import checked_number, checked_word
from remat.core.errors import CaptureError, UnitError
from remat.core.hardware import Hardware
from remat.core.platform import Platform
from remat.core.problem import Limits, Objective, ObjectiveName, check_time_limit
from remat.core.units import (
    ANY_WHOLE_BYTES,
    format_bytes,
    is_percentage,
    parse_budget,
)
from remat.files.hardware import chosen_hardware
from remat.files.serialisation import load_platform
from remat.planning.one_device import several_budgets
from remat.planning.plan import Kernels, Plan
from remat.planning.several_devices import Budget, budgets_bytes, check_budgets
from remat.profile.costing import Costs
from remat.profile.optimizers_in_backward import OptimizersInBackward
from remat.solvers import chosen_solvers
from remat.solvers.base import ProgressCallback, ignore_progress
from remat.torch_compat.attributes import has_hooks_of_its_gradient, overlapping_pair
from remat.torch_compat.sharding import local_part
from remat.training.blocks import Chooser
from remat.training.shape_ranges import DynamicShapes, checked_shapes

Loss = Callable[[Any], torch.Tensor]

Regions = Literal["auto", "whole", "breaks", "blocks"] | Chooser
"""Whether a model must be one graph, or may be split by graph breaks, and whether its
blocks are graphs of their own, or modules of these names."""

AnyOptimizer = torch.optim.Optimizer | Mapping[nn.Parameter, torch.optim.Optimizer]
"""An optimizer, or the optimizers of single parameters that step in backward."""

Group = Literal["auto"] | dist.ProcessGroup | None
"""The processes that run the same plan."""

Function = TypeVar("Function", bound=Callable[..., Any])


class PlanOptions(TypedDict, total=False):
    """What fit, plan, verify and backend take by name, besides the budget.

    What they mean is said at :func:`remat.fit`; defaults are those of
    :class:`PlanRequest`, which has a field for each.
    """

    optimizer: AnyOptimizer | None
    loss: Loss | None
    platform: Platform | str | PathLike[str] | None
    device: Hardware | str | PathLike[str] | None
    solver: str
    objective: ObjectiveName
    time_limit: float | None
    gap: float
    seed: int
    costs: Costs
    kernels: Kernels
    regions: Regions
    dynamic: DynamicShapes | None
    backward_in_autocast: bool
    in_flight: int
    group: Group
    progress: ProgressCallback | None


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a plan shall be made for, and how.

    See :func:`remat.fit` for the meaning of the fields, of which :class:`PlanOptions`
    says what may be given; exactly one of ``budget`` and ``given_plan`` is not
    ``None``.
    """

    budget: Budget | None = None
    optimizer: torch.optim.Optimizer | None = None
    loss: Loss | None = None
    platform: Platform | None = None
    device: Hardware | None = None
    solver: str = "auto"
    objective: ObjectiveName = "serial"
    time_limit: float | None = None
    gap: float = 0.0
    seed: int = 0
    costs: Costs = "measured"
    kernels: Kernels = "eager"
    regions: Regions = "auto"
    dynamic: DynamicShapes | None = None
    backward_in_autocast: bool = False
    in_flight: int = 1
    group: Group = "auto"
    progress: ProgressCallback = ignore_progress
    given_plan: Plan | None = None

    def __post_init__(self) -> None:
        if self.given_plan is not None:
            _check("plan", self.given_plan, Plan, "a plan, as remat.load_plan returns")
            if self.budget is not None:
                msg = (
                    f"plan= and budget={self.budget!r} are given; a saved plan has its "
                    "own budget, so leave one of them out"
                )
                raise ValueError(msg)
        else:
            self._check_budget()
        if self.optimizer is not None:
            _check("optimizer", self.optimizer, torch.optim.Optimizer, _OPTIMIZER)
        if isinstance(self.optimizer, OptimizersInBackward) and self.in_flight != 1:
            msg = (
                f"in_flight={self.in_flight}: an optimizer that steps in backward changes "
                "what other passes in flight have computed with; leave in_flight out"
            )
            raise ValueError(msg)
        if self.loss is not None:
            _check("loss", self.loss, Callable, "a function of the model's outputs")
            _check_takes_outputs(self.loss)
        _check("progress", self.progress, Callable, "a function of (activity, share)")
        _check("backward_in_autocast", self.backward_in_autocast, bool, "True or False")
        _check("seed", self.seed, SupportsIndex, "an integer")
        Limits(seed=self.seed)
        check_time_limit(self.time_limit)
        checked_number("gap", self.gap, most=1.0)
        objective = checked_word("objective", self.objective, Objective)
        chosen_solvers(
            self.solver,
            has_several_devices=self.has_several_devices,
            objective=objective,
        )
        if self.costs not in ("measured", "estimated"):
            msg = f"costs is {self.costs!r}; it must be 'measured' or 'estimated'"
            raise ValueError(msg)
        if self.kernels not in ("eager", "fused"):
            msg = f"kernels is {self.kernels!r}; it must be 'eager' or 'fused'"
            raise ValueError(msg)
        self._check_regions()
        self._check_in_flight()
        self._check_group()
        if self.dynamic is not None:
            self._check_dynamic()
        if self.device is not None:
            self._check_device(self.device)

    @property
    def has_several_devices(self) -> bool:
        """Whether the request is for more than one device."""
        if self.given_plan is not None:
            return self.given_plan.has_several_devices
        if self.platform is not None:
            return len(self.platform.devices) > 1
        return isinstance(self.budget, Mapping) and len(self.budget) > 1

    @property
    def solving(self) -> dict[str, object]:
        """What a schedule depends on, besides the step, devices and budget."""
        return {
            "solver": self.solver,
            "objective": self.objective,
            "time limit": self.time_limit,
            "gap": self.gap,
            "seed": index(self.seed),
        }

    @property
    def may_be_split(self) -> bool:
        """Whether the model may be planned as several graphs, as far as is asked."""
        return (
            self.kernels == "eager"
            and self.passes_in_flight == 1
            and not self.has_several_devices
            and self.dynamic is None
        )

    @property
    def may_be_together(self) -> bool:
        """Whether processes can plan together what is asked for."""
        return self.kernels == "eager" and not self.has_several_devices

    def _check_group(self) -> None:
        if self.group is None or self.group == "auto":
            return
        _check("group", self.group, dist.ProcessGroup, _GROUP)
        if not self.may_be_together:
            msg = (
                "group= is given: processes plan together for one device each, with "
                "eager kernels; give one budget and leave kernels='fused' out, or group"
            )
            raise ValueError(msg)

    def _check_device(self, device: Hardware) -> None:
        given = {
            "platform": self.platform is not None,
            "kernels": self.kernels != "eager",
            "regions": self.regions not in ("auto", "whole"),
            "dynamic": self.dynamic is not None,
        }
        refused = [name for name, is_given in given.items() if is_given]
        if refused:
            msg = (
                f"device={device.name!r} plans one graph, of one shape and eager kernels, "
                f"for one device that need not be here; leave {refused[0]}= out"
            )
            raise ValueError(msg)
        if isinstance(self.budget, Mapping):
            msg = f"device={device.name!r} is one device; give one budget"
            raise UnitError(msg)

    def _check_in_flight(self) -> None:
        _check("in_flight", self.in_flight, int, "an integer, at least 1")
        if self.in_flight < 1:
            msg = f"in_flight is {self.in_flight}; it must be at least 1"
            raise ValueError(msg)
        given = 1 if self.given_plan is None else self.given_plan.in_flight
        if self.given_plan is not None and self.in_flight not in (1, given):
            msg = (
                f"in_flight is {self.in_flight}, but the plan is for {given} forward "
                "passes in flight; leave in_flight out, or make a new plan"
            )
            raise ValueError(msg)
        if self.in_flight == 1:
            return
        if self.regions not in ("auto", "whole"):
            msg = (
                f"in_flight={self.in_flight} plans a model of one graph; leave regions="
                f"{self.regions!r} out"
            )
            raise ValueError(msg)
        if self.has_several_devices:
            msg = f"in_flight={self.in_flight} plans for one device; give one budget"
            raise ValueError(msg)

    @property
    def passes_in_flight(self) -> int:
        """How many forward passes run before the first backward pass."""
        if self.given_plan is not None:
            return self.given_plan.in_flight
        return self.in_flight

    def _check_regions(self) -> None:
        regions = self.regions
        if isinstance(regions, str):
            known = get_args(get_args(Regions)[0])
            if regions not in known:
                msg = f"regions is {regions!r}; it must be {_REGIONS}"
                raise ValueError(msg)
        elif not callable(regions):
            _check("regions", regions, Sequence, _REGIONS)
            for name in regions:
                _check("a name in regions", name, str, "the name of a module")
        if regions in ("auto", "whole"):
            return
        if self.kernels != "eager":
            msg = "several regions run eager kernels; leave kernels='fused' out"
            raise ValueError(msg)
        if self.has_several_devices:
            msg = "several regions are planned for one device; give one budget"
            raise ValueError(msg)

    def _check_dynamic(self) -> None:
        if self.kernels != "eager":
            msg = "dynamic= runs eager kernels; leave kernels='fused' out"
            raise ValueError(msg)
        if self.has_several_devices:
            msg = "dynamic= plans for one device; give one budget"
            raise ValueError(msg)
        checked_shapes(self.dynamic)

    def _check_budget(self) -> None:
        # Any whole will do: what a percentage comes to is known after tracing.
        if self.platform is not None:
            _check("platform", self.platform, Platform, _PLATFORM)
            if self.has_several_devices:
                several_budgets(self.platform, self.budget)
            elif isinstance(self.budget, Mapping):
                check_budgets(self.platform, self.budget)
        if isinstance(self.budget, Mapping):
            budgets_bytes(self.budget, ANY_WHOLE_BYTES)
        elif self.budget is not None:
            parse_budget(self.budget, whole_bytes=ANY_WHOLE_BYTES)
        elif self.platform is None or not any(
            device.budget_bytes for device in self.platform.devices
        ):
            msg = "give a budget, for example budget='8 GiB' (or plan=, a saved plan)"
            raise UnitError(msg)


def requested(
    caller: str,
    options: PlanOptions,
    *,
    budget: Budget | None,
    plan: Plan | None = None,
) -> PlanRequest:
    """Return what a function of the package was asked for, checked.

    Parameters
    ----------
    caller
        The function's name, for messages.
    options, budget, plan
        As for :func:`remat.fit`.

    Raises
    ------
    TypeError
        If there is no such option, or one is of the wrong type.
    FileFormatError, InvalidPlatformError, SolverUnsuitableError, UnitError, ValueError
        If one makes no sense.
    """
    for name in options:
        if name not in PlanOptions.__annotations__:
            msg = f"{caller}() got an unexpected keyword argument {name!r}"
            raise TypeError(msg)
    given: dict[str, Any] = {**options, "budget": budget, "given_plan": plan}
    given["platform"] = platform_of(given.get("platform"))
    if isinstance(given.get("optimizer"), Mapping):
        given["optimizer"] = OptimizersInBackward(given["optimizer"])
    if given.get("device") is not None:
        device = chosen_hardware(given["device"])
        if caller != "plan":
            msg = (
                f"device={device.name!r} is for remat.plan, which runs nothing: what it "
                f"plans is judged by a description; leave it out of {caller}()"
            )
            raise ValueError(msg)
        given["device"] = device
        given["budget"] = device.usable_bytes if budget is None else budget
        if isinstance(budget, int | str) and not is_percentage(budget):
            check_budget_of(device, parse_budget(budget))
    if given.get("progress") is None:
        given["progress"] = ignore_progress
    return PlanRequest(**given)


def shows_options(after: str) -> Callable[[Function], Function]:
    """Let a function's signature show each of :class:`PlanOptions` with its default.

    Parameters
    ----------
    after
        The parameter that they follow.
    """

    def shown(function: Function) -> Function:
        found = inspect.signature(function)
        parameters: list[inspect.Parameter] = []
        for parameter in found.parameters.values():
            if parameter.kind is not parameter.VAR_KEYWORD:
                parameters.append(parameter)
            if parameter.name == after:
                parameters += _OPTION_PARAMETERS
        function.__signature__ = found.replace(parameters=parameters)
        return function

    return shown


def _option_parameters() -> list[inspect.Parameter]:
    defaults = inspect.signature(PlanRequest).parameters
    found: list[inspect.Parameter] = []
    for name, kind in get_type_hints(PlanOptions).items():
        default = defaults[name].default
        found.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if default is ignore_progress else default,
                annotation=kind,
            )
        )
    return found


_OPTION_PARAMETERS = _option_parameters()


def check_model(model: object) -> None:
    """Refuse what is no model.

    Raises
    ------
    TypeError
        If it is not a module.
    """
    _check("model", model, nn.Module, "a torch.nn.Module")


def check_budget_of(device: Hardware, budget_bytes: int) -> None:
    """Refuse a budget that is more than a device leaves to a step.

    Raises
    ------
    UnitError
        If it is.
    """
    if budget_bytes > device.usable_bytes:
        msg = (
            f"the budget is {format_bytes(budget_bytes)}, but {device.name} leaves "
            f"{format_bytes(device.usable_bytes)} of its "
            f"{format_bytes(device.memory_bytes)} to a step; leave budget= out for all "
            "of that"
        )
        raise UnitError(msg)


def check_memory_holds(model: nn.Module, device: Hardware) -> None:
    """Refuse a device that is too small for a model's parameters.

    Raises
    ------
    CaptureError
        If a tensor of the model is on a device other than the CPU.
    UnitError
        If they, and gradients of those that take one, are more than its memory.
    """
    sizes = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    places = {p.device.type for p in model.parameters()} - {"cpu"}
    if places:
        msg = (
            f"the model is on {places.pop()}; a step is traced for device={device.name!r} "
            'on the CPU or without memory: move the model and the batch to "meta"'
        )
        raise CaptureError(msg)
    held_bytes = sum(sizes.values())
    gradient_bytes = sum(sizes[each] for each in trained)
    if held_bytes + gradient_bytes > device.usable_bytes:
        msg = (
            f"{device.name} leaves {format_bytes(device.usable_bytes)} to a step, and the "
            f"parameters alone take {format_bytes(held_bytes)}, their gradients "
            f"{format_bytes(gradient_bytes)}: no schedule helps; take a device with more "
            "memory, parameters of lower precision, or train fewer of them"
        )
        raise UnitError(msg)


def check_is_plannable(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    """Refuse a model without its parameters, or an optimizer of another one's.

    Raises
    ------
    CaptureError
        If a module makes its parameters at its first call.
    ValueError
        If the optimizer steps no parameter of the model.
    """
    parameters = dict(model.named_parameters())
    lazy = [name for name, parameter in parameters.items() if is_lazy(parameter)]
    if lazy:
        msg = (
            f"parameter {lazy[0]!r} has no shape before the first call; call the model "
            "once on an example before planning, as planning must not change it"
        )
        raise CaptureError(msg)
    if optimizer is None:
        return
    own = {id(parameter) for parameter in parameters.values()}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(id(parameter) in own for parameter in stepped):
        msg = (
            f"the optimizer steps {len(stepped)} parameters, none of which is among the "
            f"model's {len(own)}; give the optimizer of this model"
        )
        raise ValueError(msg)
    if isinstance(optimizer, OptimizersInBackward):
        known = set(map(id, stepped))
        missing = [
            n for n, p in parameters.items() if p.requires_grad and id(p) not in known
        ]
        if missing:
            msg = (
                f"optimizer= has no optimizer for {missing[0]!r}"
                f"{f' and {len(missing) - 1} more' if missing[1:] else ''}: where "
                "optimizers step in backward, each trained parameter has one"
            )
            raise ValueError(msg)
        overlapping = overlapping_pair(
            {n: p for n, p in parameters.items() if p.requires_grad}
        )
        if overlapping is not None:
            msg = (
                f"{overlapping[0]!r} and {overlapping[1]!r} are in the same memory, and "
                "each has an optimizer that steps in backward: which steps first changes "
                "the result. Let them be one parameter, or give one optimizer of all"
            )
            raise ValueError(msg)


def check_hooks(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse optimizers that are said to step in backward, if no hook lets them.

    Raises
    ------
    ValueError
        If a trained parameter has no hook that runs when its gradient is there, or one
        is divided among processes.
    """
    if not isinstance(optimizer, OptimizersInBackward):
        return
    for name, parameter in model.named_parameters():
        if local_part(parameter) is not parameter:
            msg = (
                f"optimizer= is a mapping, and {name!r} is divided among processes: the "
                "memory of optimizers that step in backward is not known there; give one "
                "optimizer of all parameters, which counts more than they take"
            )
            raise ValueError(msg)
        if parameter.requires_grad and not has_hooks_of_its_gradient(parameter):
            msg = (
                "optimizer= is a mapping, as for optimizers that step in backward, but "
                f"{name!r} has no hook that steps its own: call "
                "register_post_accumulate_grad_hook on each parameter before remat.fit, "
                "or give one optimizer of all parameters"
            )
            raise ValueError(msg)


def _check_takes_outputs(loss: Callable[..., object]) -> None:
    """Refuse a loss that cannot be called with the model's outputs alone.

    Raises
    ------
    TypeError
        If it needs more arguments or takes none, or is a class of losses.
    """
    name = getattr(loss, "__name__", f"{type(loss).__name__}()")
    if isinstance(loss, type):
        msg = (
            f"loss is the class {name}; it must be a function of the model's outputs, "
            f"such as loss=lambda outputs: {name}()(outputs, target)"
        )
        raise TypeError(msg)
    name = "loss" if name == "<lambda>" else name
    try:
        call = loss.forward if isinstance(loss, nn.Module) else loss
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        # Some functions written in C have none; calling them shows what they need.
        return
    try:
        signature.bind(None)
    except TypeError as error:
        msg = (
            f"loss is called with the model's outputs alone, as in {name}(outputs): "
            f"{error}. Give a function of the outputs that knows the rest, such as "
            f"loss=lambda outputs: {name}(outputs, target)"
        )
        raise TypeError(msg) from error


def _check(name: str, value: object, kind: Any, needed: str) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        text, kind_name = repr(value), type(value).__name__
        # A batch or a model would be pages.
        is_short = len(text) <= _LONGEST and "\n" not in text
        found = f"{text} ({kind_name})" if is_short else f"a {kind_name}"
        msg = f"{name} is {found}; it must be {needed}"
        raise TypeError(msg)


def platform_of(platform: Platform | str | PathLike[str] | None) -> Platform | None:
    """Return a platform, read from its file if a path is given.

    Raises
    ------
    FileFormatError
        If the file is missing, damaged, or no platform.
    TypeError
        If it is neither a platform nor a path.
    """
    if isinstance(platform, str | PathLike):
        return load_platform(platform)
    if platform is not None:
        _check("platform", platform, Platform, _PLATFORM)
    return platform


_OPTIMIZER = (
    "a torch.optim.Optimizer, such as torch.optim.AdamW(model.parameters()), or a mapping "
    "from each parameter to its own optimizer, if these step in backward"
)
_LONGEST = 100
_REGIONS = (
    "'auto', 'whole', 'breaks', 'blocks', a list of modules' names, or a function of a "
    "name and a module"
)
_GROUP = "'auto', None, or a torch.distributed.ProcessGroup"
_PLATFORM = "a remat.core.platform.Platform, or the path of its file"
