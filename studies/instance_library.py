"""The instance library: captures models, and fills in what is known of each.

``python -m studies.instance_library`` captures every model of :data:`ENTRIES` that is
not in the library, and asks ``auto`` for a schedule
within each budget. Whatever is better than what is known takes its place, after the
judge has replayed it. ``NAME ...`` picks instances, ``--limit SECONDS`` gives solvers a
limit, ``--prove`` asks for bounds alone, of the schedules that are known, and
``--take FILE --by WHO`` enters somebody's schedule or plan file.
``--tables`` writes the table of ``docs/instances.md``.

Costs are estimates for one documented platform, :data:`REFERENCE`, and come out equal
on any machine: no operator is measured. Outputs are as large as the CPU's kernels make
them.
"""

import argparse
import importlib
import itertools
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import remat
from remat.core.errors import BudgetError, RematError
from remat.core.graph import TrainingGraph
from remat.core.platform import single_device
from remat.core.problem import Status
from remat.planning.one_device import plain_peak_bytes, plan_graph
from remat.planning.plan import Plan
from remat.planning.proofs import with_bound
from remat.planning.smallest_budget import smallest_budget
from remat.testing.instances.library import (
    Instance,
    folder,
    load_instance,
    names,
    save_instance,
)
from studies.pages import fill_place

PAGE = Path(__file__).parent.parent / "docs" / "instances.md"
FOLDER = Path(str(folder()))
PERCENTS = (90, 70, 50, 40)
NEAR_SMALLEST = "1.05x"
"""Of the smallest budget with a known schedule, when the instance was made."""

REFERENCE = {
    "flops_per_s": 20_000_000_000_000,
    "bytes_per_s": 1_500_000_000_000,
    "launch_ns": 5_000,
}
"""An accelerator in single precision: 20 Tflop/s, 1.5 TB/s, 5 us a kernel."""

_MODELS = {
    "convolutional": (
        *("resnet50", "resnet152", "vgg19", "densenet121", "densenet161"),
        *("googlenet", "unet", "pspnet"),
    ),
    "transformer": ("gpt2", "bert", "vit", "llama"),
    "encoder-decoder": ("t5",),
    "state space": ("mamba", "mamba2"),
}
_DEFINITIONS = {
    "convolutional": ("wavenet", "convnext-labels", "spatial-transformer"),
    "transformer": (
        *("swin-labels", "deberta-labels", "clip-contrast", "segformer-pixels"),
        *("perceiver", "albert-shared", "mae-pixels"),
    ),
    "encoder-decoder": ("bart-labels", "whisper-labels", "translator"),
    "mixture of experts": ("experts-dense", "switch-router"),
    "state space": ("state-space",),
    "diffusion U-Net": ("ddpm-unet", "stable-diffusion-unet"),
    "recurrent": ("lstm-cells", "tree-network"),
    "graph": ("message-passing",),
    "detection": ("yolos",),
    "other": ("coupling-flow", "neural-ode", "capsules", "slot-attention"),
}
DEEP = {"gpt2-48": 48, "gpt2-96": 96, "gpt2-230": 230}
"""GPT-2 with so many layers, narrow enough for any machine."""

ENTRIES: dict[str, str] = {
    name: family
    for families in (_MODELS, _DEFINITIONS)
    for family, members in families.items()
    for name in members
} | dict.fromkeys(DEEP, "transformer")
"""The family of each model, by the name that the studies know it by."""


def captured(name: str) -> tuple[str, TrainingGraph]:
    """Return where a model is from, and its training graph with reference costs."""
    # Imported here: they import torch, which what reads the library does without.
    import torch  # noqa: PLC0415

    from remat.profile.cache import CostCache  # noqa: PLC0415
    from remat.training.fitting import plan  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.compiler.reset()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REMAT_CACHE_DIR"] = folder
        cache = CostCache()
        cache.put("rates of cpu", dict(REFERENCE))
        cache.save()
        torch.manual_seed(0)
        options: dict[str, Any] = {
            "budget": "100%",
            "costs": "estimated",
            "solver": "store-all",
            "regions": "whole",
        }
        if name in itertools.chain(*_MODELS.values()):
            from studies.models import MODELS, Options  # noqa: PLC0415
            from studies.planned import make_step  # noqa: PLC0415

            work = MODELS[name](Options())
            step = make_step(work)
            options |= {"optimizer": step.optimizer, "loss": step.loss}
            origin = f"studies.models {name}, scale 1"
            model, args, kwargs = work.model, work.args, work.kwargs
        elif name == "yolos":
            origin = "transformers: Fang et al. 2021; YOLOS without its matched loss"
            model, args, kwargs = _yolos()
        elif name in DEEP:
            origin = f"transformers: GPT-2 with {DEEP[name]} layers of width 64"
            model, args, kwargs = _deep(DEEP[name])
        else:
            definition = _definition(name)
            example = definition.build()
            origin = f"{definition.library}: {definition.source}"
            model, args, kwargs = example.model, example.args, dict(example.kwargs)
        options.setdefault("optimizer", torch.optim.AdamW(model.parameters()))
        found = plan(model, args, kwargs, **options)
    graph = found.graph
    # Lines of source are of one machine, and no name of a model says its size.
    ops = tuple(replace(op, source="") for op in graph.ops)
    graph = replace(graph, ops=ops, name=name)
    return f"{origin}; torch {torch.__version__}", graph


def _definition(name: str) -> Any:
    """Return the definition of that name, of libraries that need not be imported."""
    for home in ("torch", "transformers", "diffusers"):
        found = importlib.import_module(f"studies.definitions_{home}").DEFINITIONS
        if name in found:
            return found[name]
    msg = f"no definition is called {name}"
    raise KeyError(msg)


def _yolos() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a detector of which classes and boxes are the outputs, and its images."""
    import torch  # noqa: PLC0415
    from transformers import YolosConfig, YolosForObjectDetection  # noqa: PLC0415

    config = YolosConfig(
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=[128, 128],
        patch_size=16,
        num_detection_tokens=25,
    )
    images = torch.randn(32, 3, 128, 128)
    return YolosForObjectDetection(config).train(), (), {"pixel_values": images}


def _deep(layers: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return GPT-2 of that depth, and its batch with labels."""
    import torch  # noqa: PLC0415
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    config = GPT2Config(
        vocab_size=512, n_positions=128, n_embd=64, n_layer=layers, n_head=4
    )
    config.use_cache = False
    tokens = torch.randint(0, 512, (8, 128))
    return GPT2LMHeadModel(config).train(), (), {"input_ids": tokens, "labels": tokens}


def new_instance(name: str) -> Instance:
    """Capture a model and choose its budgets."""
    origin, graph = captured(name)
    plain_bytes = plain_peak_bytes(graph)
    floor = smallest_budget(graph)
    budgets = {f"{percent}%": plain_bytes * percent // 100 for percent in PERCENTS}
    budgets[NEAR_SMALLEST] = min(plain_bytes, floor.budget_bytes * 105 // 100)
    kept = {
        label: size for label, size in budgets.items() if size >= floor.budget_bytes
    }
    instance = Instance(
        name=name,
        family=ENTRIES[name],
        origin=origin,
        budgets_bytes=dict(sorted(kept.items(), key=lambda item: -item[1])),
        graph=graph,
        best={},
    )
    for label in instance.budgets_bytes:
        instance = instance.with_schedule(
            label, floor.schedule, f"smallest_budget, {_version()}"
        )
    return instance


def solved(instance: Instance, limit_s: float | None) -> Instance:
    """Ask for a schedule within each budget, the smallest first, and for bounds."""
    labels = list(instance.budgets_bytes)
    for label in reversed(labels):
        budget_bytes = instance.budgets_bytes[label]
        try:
            plan = plan_graph(instance.graph, budget=budget_bytes, time_limit=limit_s)
        except BudgetError as error:
            print(f"  {instance.name} {label}: {error}", flush=True)
            continue
        who = f"{plan.solver} of auto, {_version()}"
        # What fits here fits into larger budgets.
        for larger in labels[: labels.index(label) + 1]:
            instance = instance.with_schedule(larger, plan.schedule, who)
        if plan.certificate is not None:
            instance = instance.with_certificate(label, plan.certificate, _version())
        best = instance.best[label]
        print(f"  {instance.name} {label}: gap {best.gap:.2%}", flush=True)
    return instance


def proved(instance: Instance) -> Instance:
    """Ask for bounds, from the schedules that are known."""
    kind = instance.graph.device_kinds[0]
    for label, best in instance.best.items():
        plan = Plan(
            graph=instance.graph,
            platform=single_device(instance.budgets_bytes[label], kind),
            schedule=best.schedule,
            solver="known",
            status=Status.FEASIBLE,
            bound_ns=0,
            fingerprint="",
        )
        certificate = with_bound(plan).certificate
        if certificate is not None:
            instance = instance.with_certificate(label, certificate, _version())
        gap = instance.best[label].gap
        print(f"  {instance.name} {label}: {best.gap:.3%}, {gap:.3%}", flush=True)
    return instance


def _version() -> str:
    return f"remat {remat.__version__}"


def take(file: Path, who: str, name: str | None) -> int:
    """Enter somebody's schedule or plan; return 1 if it is better nowhere."""
    from remat.testing.instances.entries import entry_of  # noqa: PLC0415

    entry = entry_of(file, name)
    instance = entry.instance
    for label in instance.budgets_bytes:
        instance = instance.with_schedule(label, entry.schedule, who)
        if entry.certificate is not None:
            try:
                instance = instance.with_certificate(label, entry.certificate, who)
            except RematError as error:
                print(f"{label}: {error}")
    save_instance(FOLDER, instance)
    return int(instance == entry.instance)


def page_table() -> str:
    """Return the time over running every op once, and the gap, of each budget."""
    # Imported here: it imports the models.
    from studies.tables import table  # noqa: PLC0415

    labels = [*(f"{percent}%" for percent in PERCENTS), NEAR_SMALLEST]
    rows: list[Sequence[str]] = []
    for instance in map(load_instance, names()):
        row = [instance.name, instance.family, str(len(instance.graph.ops))]
        for label in labels:
            best = instance.best.get(label)
            row.append(
                "-"
                if best is None
                else f"{best.cost_ns / instance.once_ns:.3f} ({best.gap:.1%})"
            )
        rows.append(row)
    return table(("instance", "family", "ops", *labels), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Capture and solve, and enter what is better."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.instance_library", description=__doc__
    )
    parser.add_argument("names", nargs="*", metavar="NAME", default=[*ENTRIES])
    parser.add_argument("--limit", type=float, metavar="SECONDS")
    parser.add_argument("--capture-only", action="store_true")
    parser.add_argument("--prove", action="store_true")
    parser.add_argument("--take", type=Path, metavar="FILE")
    parser.add_argument("--by", metavar="WHO")
    parser.add_argument("--tables", action="store_true", help="write the table only")
    options = parser.parse_args(arguments)
    if options.tables:
        page = fill_place(PAGE.read_text(encoding="utf-8"), "instances", page_table())
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if options.take is not None:
        if not options.by:
            parser.error("--take needs --by, who found it")
        name = options.names[0] if len(options.names) == 1 else None
        return take(options.take, options.by, name)
    failures = 0
    for name in options.names:
        try:
            found = load_instance(name) if name in names() else new_instance(name)
            save_instance(FOLDER, found)
            if not options.capture_only:
                found = proved(found) if options.prove else solved(found, options.limit)
                save_instance(FOLDER, found)
        except RematError as error:
            failures += 1
            print(f"{name}: {error}", file=sys.stderr)
        else:
            print(f"{name}: {len(found.graph.ops)} ops", flush=True)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
