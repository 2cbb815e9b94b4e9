"""The study of the lower-set paper's networks: what is run, recorded and said of it."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from studies.lower_sets_networks import (
    METHODS,
    NETWORKS,
    SolverSubject,
    captured_step,
    case_bytes,
    cases_of,
    main,
    make_bare_step,
    measure_checkpoint,
    measure_plain,
    measure_solver,
    solver_floor_bytes,
)
from studies.models import MODELS, Options
from studies.networks import (
    DENSENET161_LAYERS,
    RESNET152_BLOCKS,
    VGG,
    DenseNet,
    GoogLeNet,
    PSPNet,
    ResNet,
    UNet,
    unet_output_side,
)
from studies.peers import checkpointed, longest_chain
from tests.studies.same_process import stay_in_process
from torch import nn
from torch.utils.checkpoint import checkpoint

from remat.core.bounds import peak_bound_bytes
from remat.solvers import SOLVERS
from studies import lower_sets_networks, lower_sets_tables, peers, record

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TINY = Options(tiny=True, is_loss_inside=True)


@pytest.mark.parametrize(
    ("make", "parameter_count"),
    [
        # What torchvision's documentation gives for its networks of these names; for
        # GoogLeNet, the count of the released network without batch normalisation.
        (ResNet, 25_557_032),
        (lambda: ResNet(RESNET152_BLOCKS), 60_192_808),
        (VGG, 143_667_240),
        (lambda: DenseNet(DENSENET161_LAYERS, growth=48), 28_681_000),
        (GoogLeNet, 13_378_280),
    ],
)
def test_networks_have_the_published_parameters(
    make: Any, parameter_count: int
) -> None:
    with torch.device("meta"):
        network = make()
    assert sum(p.numel() for p in network.parameters()) == parameter_count


class TestShapes:
    """What the papers' figures print at their arrows."""

    def test_unet(self) -> None:
        with torch.device("meta"):
            scores = UNet()(torch.empty(1, 3, 572, 572))
        assert scores.shape == (1, 2, 388, 388)
        assert unet_output_side(572) == 388

    @pytest.mark.parametrize(("side", "depth"), [(44, 2), (92, 3), (188, 4)])
    def test_unet_says_its_output_before_it_runs(self, side: int, depth: int) -> None:
        with torch.device("meta"):
            scores = UNet(depth, width=4)(torch.empty(1, 3, side, side))
        assert scores.shape[2:] == (unet_output_side(side, depth),) * 2

    @pytest.mark.parametrize("side", [571, 100, 172])
    def test_unet_refuses_images_that_leave_nothing(self, side: int) -> None:
        with pytest.raises(ValueError, match=f"images of {side} pixels"):
            unet_output_side(side)

    def test_googlenet(self) -> None:
        shapes: dict[str, torch.Size] = {}
        with torch.device("meta"):
            network = GoogLeNet().eval()
            for name, part in network.parts.named_children():
                part.register_forward_hook(functools.partial(_note_shape, shapes, name))
            scores = network(torch.empty(1, 3, 224, 224))
        assert shapes == {
            "0": (1, 512, 14, 14),
            "1": (1, 528, 14, 14),
            "2": (1, 1024, 7, 7),
        }
        assert [tuple(s.shape) for s in scores] == [(1, 1000)] * 3

    def test_pspnet(self) -> None:
        with torch.device("meta"):
            network = PSPNet().eval()
            inner = network.body(torch.empty(1, 3, 713, 713))
            last = network.last_stage(inner)
            pyramid = network.pyramid(last)
        assert inner.shape == (1, 1024, 90, 90)
        assert last.shape == (1, 2048, 90, 90)
        assert pyramid.shape == (1, 4096, 90, 90)

    @pytest.mark.parametrize(
        ("name", "batch", "side"),
        [
            ("pspnet", 2, 713),
            ("unet", 8, 572),
            ("resnet50", 96, 224),
            ("resnet152", 48, 224),
            ("vgg19", 64, 224),
            ("densenet161", 32, 224),
            ("googlenet", 256, 224),
        ],
    )
    def test_scale_4_is_the_papers_size(self, name: str, batch: int, side: int) -> None:
        workload = MODELS[name](Options(scale=4, device="meta"))
        (images,) = workload.kwargs.values()
        assert images.shape == (batch, 3, side, side)
        published = {"densenet161": 96}.get(name, 64)
        first = next(m for m in workload.model.modules() if isinstance(m, nn.Conv2d))
        assert first.out_channels == published


def _note_shape(
    shapes: dict[str, torch.Size],
    name: str,
    _module: nn.Module,
    _inputs: Any,
    output: torch.Tensor,
) -> None:
    shapes[name] = output.shape


def test_convolutions_are_channels_last() -> None:
    workload = MODELS["resnet50"](TINY)
    (images, _) = workload.kwargs.values()
    assert images.is_contiguous(memory_format=torch.channels_last)
    weight = next(
        p for p in workload.model.parameters() if p.dim() == 4 and p.shape[2] > 1
    )
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()


@pytest.mark.parametrize("name", NETWORKS)
def test_auxiliary_classifiers_are_in_the_loss(name: str) -> None:
    workload = MODELS[name](Options(tiny=True))
    outputs = workload.model(*workload.args, **workload.kwargs)
    assert workload.loss is not None
    whole = workload.loss(outputs)
    if isinstance(outputs, torch.Tensor):
        assert name not in {"googlenet", "pspnet"}
        return
    weight, count = {"googlenet": (0.3, 2), "pspnet": (0.4, 1)}[name]
    first = workload.loss(outputs[:1])
    others = sum(workload.loss((other,)) for other in outputs[1:])
    assert len(outputs) == 1 + count
    torch.testing.assert_close(whole, first + weight * others)


def test_small_budgets_are_not_held_up_by_one_convolution() -> None:
    """VGG-19's floor: three tensors of the first stage, parameters and the batch."""
    workload = MODELS["vgg19"](Options())
    (images,) = workload.kwargs.values()
    batch, _, side, _ = images.shape
    first_stage_bytes = batch * 16 * side * side * 4
    parameter_bytes = sum(p.numel() * 4 for p in workload.model.parameters())
    assert 2 * parameter_bytes < 1.5 * first_stage_bytes


@pytest.mark.parametrize("name", NETWORKS)
def test_checkpointing_in_groups_keeps_gradients(name: str) -> None:
    workload = MODELS[name](TINY)
    step = make_bare_step(workload)
    with step.restored():
        (line,) = measure_checkpoint(workload, step, ["2"], 1)
    assert line["gradient_error"] == 0
    assert line["measured_peak_bytes"] > 0
    json.dumps(line)


def test_blocks_are_recomputed_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = MODELS["resnet152"](TINY)
    sizes: list[int] = []

    def counted(function: Any, layers: list[Any], x: Any, **kwargs: Any) -> Any:
        sizes.append(len(layers))
        return checkpoint(function, layers, x, **kwargs)

    monkeypatch.setattr(peers, "checkpoint", counted)
    for count, expected in ((1, [4, 1, 1, 1, 1]), (2, [4, 2, 2]), (3, [4, 3, 1])):
        sizes.clear()
        peer = checkpointed(workload.model, count)
        peer.switch(True)
        workload.training_loss()
        peer.switch(False)
        assert sizes == expected


@pytest.mark.parametrize(
    ("name", "longest"),
    [("resnet152", 4), ("vgg19", 2), ("densenet161", 7), ("unet", 1)],
)
def test_chains_are_cut_into_blocks(name: str, longest: int) -> None:
    assert longest_chain(MODELS[name](TINY).model) == longest


def test_impossible_group_is_refused() -> None:
    with pytest.raises(ValueError, match="0 blocks cannot be checkpointed"):
        checkpointed(MODELS["vgg19"](TINY).model, 0)


def test_cases() -> None:
    workload = MODELS["resnet152"](TINY)
    assert cases_of("plain", workload) == ["plain"]
    assert cases_of("checkpoint", workload) == ["1", "2", "4"]
    assert cases_of("chen-sqrt", workload) == ["smallest"]
    assert cases_of("chen-lower-sets", workload) == ["smallest"]
    assert cases_of("lower-sets", workload, [80, 50]) == [
        "80%",
        "50%",
        "paper",
        "smallest",
    ]
    assert cases_of("auto", workload)[-2:] == ["paper", "smallest"]
    assert set(METHODS) - {"plain", "checkpoint", "auto"} <= set(SOLVERS)


def test_paper_budget_is_what_its_best_variant_leaves() -> None:
    plain_bytes = 1000
    left = {
        name: case_bytes("paper", plain_bytes, published, 1)
        for name, published in NETWORKS.items()
    }
    assert left == {
        "pspnet": 290,
        "unet": 520,
        "resnet50": 380,
        "resnet152": 250,
        "vgg19": 640,
        "densenet161": 190,
        "googlenet": 610,
    }


def test_solver_is_run_at_each_budget_down_to_its_smallest() -> None:
    workload = MODELS["vgg19"](TINY)
    step = make_bare_step(workload)
    with step.restored():
        plain = measure_plain(workload, step, 1)
        subject = SolverSubject(
            workload, step, step.peak_bytes(None), solver="min-cut-retention"
        )
        graph, _ = captured_step(subject)
        floor_bytes = solver_floor_bytes(graph, "min-cut-retention", 60)
        lines = list(
            measure_solver(
                subject,
                ["100%", "1%", "smallest"],
                NETWORKS["vgg19"],
                repeats=1,
                search_limit_s=60,
            )
        )
    assert plain["op_count"] == len(graph.ops)
    assert plain["captured_differs_from_eager"]["count"] == 0
    assert peak_bound_bytes(graph) <= floor_bytes < plain["plain_peak_bytes"]
    whole, below, smallest = lines
    assert [line["status"] for line in lines] == ["ok", "below floor", "ok"]
    assert whole["solver"] == smallest["solver"] == "MinCutRetention"
    assert below["floor_bytes"] == smallest["budget_bytes"]
    for line in (whole, smallest):
        assert line["is_within_budget"]
        assert 0 <= line["search_s"] <= line["planning_s"]
        assert line["differs_from_captured"]["count"] == 0
    assert smallest["measured_peak_bytes"] < whole["measured_peak_bytes"]
    json.dumps([plain, *lines])


def test_search_that_ended_too_high_does_not_hide_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = MODELS["vgg19"](TINY)
    step = make_bare_step(workload)
    with step.restored():
        plain_bytes = step.peak_bytes(None)
        monkeypatch.setattr(
            lower_sets_networks, "solver_floor_bytes", lambda *_: plain_bytes
        )
        subject = SolverSubject(workload, step, plain_bytes, solver="min-cut-retention")
        lines = list(
            measure_solver(
                subject,
                ["97%", "1%", "smallest"],
                NETWORKS["vgg19"],
                repeats=1,
                search_limit_s=1,
            )
        )
    assert [line["status"] for line in lines] == ["ok", "below floor", "ok"]
    assert lines[0]["budget_bytes"] == lines[2]["budget_bytes"] < plain_bytes


def test_study_records_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--tiny", "--models", "vgg19", "--methods", "plain", "chen-greedy"]
    arguments += ["--repeats", "1", "--results", str(tmp_path)]
    file = tmp_path / "lower_sets_networks.jsonl"
    assert main([*arguments, "--cases", "plain", "--methods", "plain"]) == 0
    stay_in_process(monkeypatch, lower_sets_networks)
    assert main([*arguments, "--cases", "100%", "--methods", "chen-greedy"]) == 0
    assert main([*arguments, "--cases", "100%", "--methods", "chen-greedy"]) == 0
    lines = record.read(file)
    assert [(line["method"], line["case"]) for line in lines] == [
        ("plain", "plain"),
        ("chen-greedy", "100%"),
    ]
    assert main([*arguments, "--cases", "magic", "--methods", "auto"]) == 0
    assert record.read(file)[-1]["status"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "alexnet"], "there is no model 'alexnet'"),
        (["--methods", "magic"], "there is no method 'magic'"),
    ],
)
def test_unknown_names_are_refused(arguments: Sequence[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(arguments)


CONTEXT: dict[str, Any] = {
    "study": "lower_sets_networks",
    "settings": {"model": {"tiny": False, "scale": 1, "device": "cpu"}, "repeats": 1},
    "source": "0" * 16,
    "date": "2026-01-02T03:04:05+00:00",
    "versions": {"python": "3.11", "torch": "2.13.0"},
    "machine": {"processor": "a processor", "capability": "AVX2", "threads": 1},
}


def line(model: str, method: str, case: str, peak_percent: int, **more: Any) -> Any:
    planned: dict[str, Any] = {
        "budget_bytes": (peak_percent + 1) * 2**20,
        "is_within_budget": True,
        "differs_from_captured": {"count": 0, "worst": None, "largest": None},
        "prediction_error": 0.0001,
        "search_s": 1.5,
        "predicted_slowdown": 1.2,
    }
    return {
        **CONTEXT,
        "model": model,
        "method": method,
        "case": case,
        "status": "ok",
        "plain_peak_bytes": 100 * 2**20,
        "measured_peak_bytes": peak_percent * 2**20,
        "slowdown": 1.25,
        "times_ns": [5, 6],
        "foreign_load": None,
        **({} if method == "checkpoint" else planned),
        **more,
    }


def plain_line(model: str) -> Any:
    return {
        **CONTEXT,
        "model": model,
        "method": "plain",
        "case": "plain",
        "status": "ok",
        "plain_peak_bytes": 100 * 2**20,
        "plain_ns": 2 * 10**9,
        "parameter_bytes": 5 * 2**20,
        "image_shape": [16, 3, 224, 224],
        "op_count": 103,
        "captured_differs_from_eager": {"count": 0, "largest": None},
    }


def write(folder: Path, *lines: Any) -> lower_sets_tables.NetworkResults:
    for each in lines:
        record.append(folder / "lower_sets_networks.jsonl", each)
    return lower_sets_tables.NetworkResults(folder)


def test_tables_say_what_the_lines_say(tmp_path: Path) -> None:
    results = write(
        tmp_path,
        plain_line("vgg19"),
        line("vgg19", "checkpoint", "1", 70, slowdown=1.3),
        line("vgg19", "checkpoint", "2", 60, slowdown=1.4),
        line("vgg19", "auto", "90%", 89, slowdown=1.01),
        line("vgg19", "auto", "paper", 63, slowdown=1.02),
        line("vgg19", "auto", "smallest", 51, slowdown=1.5),
        line("vgg19", "chen-sqrt", "smallest", 80, slowdown=1.2),
    )
    paper = lower_sets_tables.paper_table(results)
    assert (
        "| network | paper: best | paper: Chen | checkpoint | chen-sqrt | auto |"
        in (paper)
    )
    assert (
        "| vgg19 | -36 % | -34 % | -40 %, 1.40 x | not: -20 %, 1.20 x (1.20 x) | "
        "-37 %, 1.02 x (1.20 x) |"
    ) in paper
    smallest = lower_sets_tables.smallest_table(results)
    assert "| network | paper: exact | paper: approximate | paper: Chen |" in smallest
    assert (
        "| vgg19 | -36 % | -36 % | -34 % | -40 %, 1.40 x | -20 %, 1.20 x (1.20 x) | "
        "-49 %, 1.50 x (1.20 x) |"
    ) in smallest
    assert "| vgg19 | 16 x 3 x 224 x 224 | 103 | 5.0 MiB | 100.0 MiB | 10% of it |" in (
        lower_sets_tables.networks_table(results)
    )
    assert "| vgg19 | 1.5 s | 1.5 s |" in lower_sets_tables.planning_table(results)
    assert "Of 4 planned steps that were run, 4 are bitwise" in (
        lower_sets_tables.exactness_text(results)
    )


def test_every_run_is_told(tmp_path: Path) -> None:
    results = write(
        tmp_path,
        plain_line("unet"),
        line("unet", "checkpoint", "2", 60, foreign_load=0.125),
        line("unet", "auto", "80%", 70),
    )
    *_, first, second = lower_sets_tables.runs_table(results).splitlines()
    assert first == (
        "| unet | checkpoint | 2 | 60.0 MiB | 60.0% | 1.25 x |  | 2 | 12 % |"
    )
    assert second == (
        "| unet | auto | 71.0 MiB | 70.0 MiB | 70.0% | 1.25 x | 1.20 x | 2 |  |"
    )


def test_other_load_is_said(tmp_path: Path) -> None:
    results = write(
        tmp_path,
        line("unet", "auto", "90%", 80, foreign_load=0.5),
        line("unet", "auto", "80%", 70, foreign_load=0.25),
        line("unet", "auto", "70%", 60, foreign_load=0.75),
        line("unet", "auto", "60%", 50, foreign_load=None),
    )
    assert lower_sets_tables.setting_text(results).endswith(
        "1 thread. While steps were timed, other processes took 25 to 75 % of all "
        "cores' time, 50 % in the median."
    )


def test_broken_promises_are_shouted(tmp_path: Path) -> None:
    differs = {"count": 2, "worst": "loss", "largest": 1.0}
    results = write(
        tmp_path,
        line("unet", "auto", "paper", 50, is_within_budget=False),
        line("unet", "lower-sets", "paper", 50, differs_from_captured=differs),
        {**line("unet", "chen-greedy", "all", 0), "status": "timed out"},
    )
    text = lower_sets_tables.section(results)
    assert "**over budget**" in text
    assert "**not exact**" in text
    assert "- unet, chen-greedy: **timed out**" in text
    assert "2 are bitwise" not in text


def test_failure_that_was_mended_is_not_told(tmp_path: Path) -> None:
    failed = {**line("unet", "auto", "all", 0), "status": "failed"}
    later = "2026-01-02T04:00:00+00:00"
    results = write(tmp_path, failed, line("unet", "auto", "100%", 99, date=later))
    assert not results.failures


def test_page_and_figures_are_written(tmp_path: Path) -> None:
    results = tmp_path / "results"
    write(results, plain_line("unet"), line("unet", "auto", "paper", 50))
    page = tmp_path / "lower-sets.md"
    page.write_text(
        "before\n<!-- lower-sets-networks -->\nold\n<!-- end lower-sets-networks -->\n"
        "after\n",
        encoding="utf-8",
    )
    arguments = ["--results", str(results), "--docs", str(tmp_path)]
    assert lower_sets_tables.main(arguments) == 0
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "![unet](images/lower-sets-unet.svg)" in text
    assert (tmp_path / "images" / "lower-sets-unet.svg").is_file()
    assert not (tmp_path / "images" / "lower-sets-vgg19.svg").exists()


def test_curves_have_one_point_a_run(tmp_path: Path) -> None:
    results = write(
        tmp_path,
        line("unet", "auto", "100%", 90, slowdown=1.1),
        line("unet", "auto", "90%", 90, slowdown=1.2),
        line("unet", "auto", "smallest", 40, slowdown=1.5),
        line("unet", "checkpoint", "1", 60, slowdown=1.4),
    )
    ax = lower_sets_tables.trade_off_figure(results, "unet")
    assert ax is not None
    curves = {str(each.get_label()): each.get_xydata() for each in ax.lines}
    named = {"auto", "auto, predicted", "checkpoint", "plain", "the paper's best"}
    assert curves.keys() == named
    assert np.array_equal(curves["auto, predicted"], [[90, 1.2], [40, 1.2]])
    assert np.array_equal(curves["auto"], [[90, 1.1], [40, 1.5]])
    assert np.array_equal(curves["the paper's best"], [[52, 0], [52, 1]])
    assert lower_sets_tables.trade_off_figure(results, "vgg19") is None


def test_page_without_a_place_is_refused(tmp_path: Path) -> None:
    results = write(tmp_path, plain_line("unet"))
    with pytest.raises(ValueError, match="no <!-- lower-sets-networks -->"):
        lower_sets_tables.fill("nothing", results)


def test_nothing_recorded_is_said(tmp_path: Path) -> None:
    results = lower_sets_tables.NetworkResults(tmp_path)
    assert lower_sets_tables.section(results) == "Nothing is recorded."
