"""The studies run, their lines stand alone, and the tables say what the lines say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from studies.models import MODELS, Options
from studies.peers import (
    Peer,
    PeerStep,
    checkpointed,
    family,
    make_peer,
    study_peer,
)
from studies.planned import PhaseClock, Subject, make_step, study_budget
from tests.studies.same_process import stay_in_process

from studies import record, run, tables

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TINY = Options(tiny=True)
CONTEXT: dict[str, Any] = {
    "settings": {"model": {"tiny": False}, "repeats": 1},
    "commit": "0123456789abcdef",
    "source": "0" * 16,
    "date": "2026-01-02T03:04:05+00:00",
    "versions": {"python": "3.11", "torch": "2.13.0"},
    "machine": {
        "processor": "a processor",
        "capability": "AVX2",
        "cores": 2,
        "threads": 2,
        "memory_bytes": 2**30,
    },
}


def planned_line(case: str, **changes: Any) -> dict[str, Any]:
    none_differ = {"count": 0, "worst": None, "largest": None}
    return {
        **CONTEXT,
        "study": "budgets",
        "model": "resnet50",
        "case": case,
        "status": "ok",
        "op_count": 405,
        "plain_peak_bytes": 100 * 2**20,
        "budget_bytes": 60 * 2**20,
        "predicted_peak_bytes": 59 * 2**20,
        "measured_peak_bytes": 59 * 2**20,
        "prediction_error": 0.00123,
        "is_within_budget": True,
        "differs_from_captured": none_differ,
        "differs_from_eager": none_differ,
        "slowdown": 1.25,
        "predicted_slowdown": 1.2,
        "gap": 0.03,
        "solver": "MinCutRetention",
        "planning_s": 9.0,
        "capture_s": 4.0,
        "profile_s": 3.0,
        "solve_s": 2.0,
        "plain_ns": 10**9,
        "time_ns": 125 * 10**7,
        "times_ns": [125 * 10**7],
        "foreign_load": 0.01,
        "recomputed_op_count": 38,
        **changes,
    }


def peer_line(case: str, peak_mebibytes: int, **changes: Any) -> dict[str, Any]:
    return {
        **planned_line(case, **changes),
        "measured_peak_bytes": peak_mebibytes * 2**20,
        "differing_gradient_count": 0,
        "gradient_error": 0.0,
        "differing_buffer_count": 0,
        "differing_buffers": ["buffer stem.1.num_batches_tracked"],
        **changes,
    }


def write_results(folder: Path, study: str, *lines: dict[str, Any]) -> None:
    for line in lines:
        record.append(folder / f"{study}.jsonl", line)


def test_environment_names_everything_and_is_json() -> None:
    found = json.loads(json.dumps(record.environment()))
    # Packages of CUDA builds do not name the build.
    assert torch.__version__.startswith(found["versions"]["torch"])
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert {"commit", "source", "date"} <= found.keys()


def test_lines_come_back_and_the_newest_counts(tmp_path: Path) -> None:
    assert record.read(tmp_path / "none.jsonl") == []
    write_results(
        tmp_path, "budgets", planned_line("60%"), planned_line("60%", slowdown=2.0)
    )
    lines = record.read(tmp_path / "budgets.jsonl")
    assert len(lines) == 2
    assert record.latest(lines)["resnet50", "60%"]["slowdown"] == 2.0


def test_phases_add_up() -> None:
    clock = PhaseClock()
    for activity in (
        "counting parameters",
        "measuring aten.mm",
        "trying rotor",
        "done",
    ):
        clock(activity, 0.0)
    found = clock.stop()
    assert found.keys() == {
        "capture_s",
        "profile_s",
        "solve_s",
        "install_s",
        "planning_s",
    }
    assert found["planning_s"] >= found["capture_s"]


def test_budget_is_kept_exactly_and_the_floor_is_named() -> None:
    workload = MODELS["vgg19"](TINY)
    step = make_step(workload)
    with step.restored():
        subject = Subject(workload, step, step.peak_bytes(None))
        expected = step.outcome(None), step.outcome(None)
        budget = int(0.97 * subject.plain_peak_bytes)
        line = study_budget(subject, budget, expected, 1)
        refused = study_budget(subject, 1000, expected, 1)
    assert line["status"] == "ok"
    assert line["measured_peak_bytes"] <= line["budget_bytes"]
    assert line["differs_from_eager"]["count"] == 0
    assert line["compared_count"] > 0
    assert refused["status"] == "below floor"
    assert refused["floor_bytes"] > 1000
    json.dumps([line, refused])


@pytest.mark.parametrize(
    "name", ["resnet50", "vgg19", "unet", "densenet121", "gpt2", "bert", "vit", "t5"]
)
def test_checkpointed_models_have_the_same_gradients(name: str) -> None:
    workload = MODELS[name](TINY)
    step = PeerStep(make_step(workload), checkpointed(workload.model))
    with step.restored():
        plain = step.outcome(None, 1)
        found = step.outcome(step.peer, 1)
        again = step.outcome(None, 1)
    gradients = [key for key in plain if "gradient of" in key]
    assert gradients
    for key in gradients:
        assert torch.equal(plain[key], found[key]), key
    assert plain.keys() == again.keys()
    for key, value in plain.items():
        assert torch.equal(value, again[key]), key


def test_checkpointing_recomputes_blocks() -> None:
    workload = MODELS["resnet50"](TINY)
    calls: list[int] = []
    block = next(
        m for m in workload.model.modules() if type(m).__name__ == "Bottleneck"
    )
    block.get_submodule("reduce").register_forward_hook(lambda *_: calls.append(1))
    step = PeerStep(make_step(workload), checkpointed(workload.model))
    with step.restored():
        step.outcome(step.peer, 1)
    assert len(calls) == 2


def test_checkpointing_is_off_in_steps_of_others() -> None:
    workload = MODELS["resnet50"](TINY)
    switched: list[bool] = []
    step = PeerStep(make_step(workload), Peer(workload.model.forward, switched.append))
    for called in (None, workload.model.forward, step.peer):
        step.call(called)
    assert switched == [False, False, True]


def test_checkpointing_leaves_a_transformer_as_it_was() -> None:
    workload = MODELS["gpt2"](TINY)
    step = PeerStep(make_step(workload), make_peer("checkpoint", workload.model))
    for called in (step.peer, None):
        step.call(called)
        hooks = [m for m in workload.model.modules() if vars(m)["_forward_hooks"]]
        assert not hooks


def test_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no blocks"):
        checkpointed(torch.nn.Linear(2, 2))


def test_checkpoint_peer_counts_batch_norm_twice() -> None:
    line = study_peer("resnet50", "checkpoint", TINY, 1)
    assert line["gradient_error"] == line["overall_gradient_error"] == 0
    assert line["differing_buffer_count"] > 0
    assert family("inductor@0.5") == "inductor"


def test_unknown_peer_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no peer 'magic'"):
        study_peer("vgg19", "magic", TINY, 1)


def test_run_records_resumes_and_reports_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["budgets", "--tiny", "--models", "vgg19", "--cases", "97%"]
    arguments += ["--repeats", "1", "--results", str(tmp_path)]
    assert run.main(arguments) == 0
    lines = record.read(tmp_path / "budgets.jsonl")
    assert [line["case"] for line in lines] == ["plain", "97%"]
    assert run.main([*arguments, "--skip", "recorded"]) == 0
    assert len(record.read(tmp_path / "budgets.jsonl")) == 2
    stay_in_process(monkeypatch, run)
    run.main(["overhead", "--tiny", "--models", "nothing", "--results", str(tmp_path)])
    (failed,) = record.read(tmp_path / "overhead.jsonl")
    assert failed["status"] == "failed"
    assert "KeyError" in failed["message"]
    # What failed is tried again.
    again = ["overhead", "--tiny", "--models", "nothing", "--results", str(tmp_path)]
    run.main([*again, "--skip", "recorded"])
    assert len(record.read(tmp_path / "overhead.jsonl")) == 2


def test_tables_say_what_the_lines_say(tmp_path: Path) -> None:
    write_results(
        tmp_path,
        "budgets",
        planned_line("60%"),
        planned_line("40%", status="below floor", floor_bytes=45 * 2**20),
    )
    write_results(tmp_path, "overhead", planned_line("100%", slowdown=1.01))
    write_results(
        tmp_path,
        "peers",
        peer_line("checkpoint", 70, slowdown=1.5, differing_buffer_count=3),
        peer_line("inductor@0.5", 30, slowdown=0.9),
        {**CONTEXT, "model": "resnet50", "case": "inductor@0.0", "status": "timed out"},
    )
    sides = {"model": "resnet50", "case": "inductor@0.5", "tiny": False}
    write_results(tmp_path, "fused_kernels", {**sides, "fused_over_peer": 0.934})
    results = tables.Results(tmp_path)
    budgets = tables.budgets_table(results)
    assert "| yes | +0.123 % | bitwise | bitwise | 1.25 x | 1.20 x |" in budgets
    assert "refused; floor 45.0 MiB" in budgets
    peers = tables.peers_table(results)
    assert "| 70.0 MiB | 70% | 1.50 x | bitwise | **moved twice** | 59.0 MiB |" in peers
    assert "none so low" in peers
    assert peers.count("| 0.93 |") == 1
    assert "timed out" in peers
    assert "1.01 x" in tables.overhead_table(results)
    widths = {line.count("|") for line in budgets.splitlines()}
    assert len(widths) == 1
    assert len({line.count("|") for line in peers.splitlines()}) == 1


def test_broken_budget_is_shouted(tmp_path: Path) -> None:
    write_results(tmp_path, "budgets", planned_line("60%", is_within_budget=False))
    assert "**no**" in tables.budgets_table(tables.Results(tmp_path))


def test_page_and_figures_are_written(tmp_path: Path) -> None:
    results = tmp_path / "results"
    write_results(results, "budgets", planned_line("60%"))
    page = tmp_path / "studies.md"
    marks = "".join(f"<!-- {n} -->\nold\n<!-- end {n} -->\n" for n in tables.TABLES)
    page.write_text(f"before\n{marks}after\n", encoding="utf-8")
    tables.main(["--results", str(results), "--docs", str(tmp_path)])
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert "MinCutRetention" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert (tmp_path / "images" / "study-resnet50.svg").is_file()
    assert not (tmp_path / "images" / "study-gpt2.svg").exists()


def test_page_without_a_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no <!-- setting -->"):
        tables.fill("nothing", tables.Results(tmp_path))


def test_small_variants_are_left_out(tmp_path: Path) -> None:
    small = planned_line("60%", settings={"model": {"tiny": True}, "repeats": 1})
    write_results(tmp_path, "budgets", small)
    assert not tables.Results(tmp_path).all()
