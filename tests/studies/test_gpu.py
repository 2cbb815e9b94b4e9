"""The command for a GPU: whole on the simulated device, and its parts by themselves."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from studies.fresh_process import Ended, run_module
from studies.gpu_claims import BROKEN, KEPT, NOT_RUN, RULES, claims
from studies.gpu_page import PAGE, page, recorded
from studies.gpu_run import Run
from studies.pages import fill_place
from studies.record import append, environment, read
from tests.memory.test_snapshots import BASE, snapshot

from studies import gpu, gpu_parts, gpu_run

Line = dict[str, Any]

FIXED: Line = {
    "study": "gpu",
    "status": "ok",
    "device": {"type": "cuda", "name": "a card"},
    "settings": {"scale": 1, "tiny": True},
}
DEVICE: Line = {
    "part": "device",
    "case": "device",
    "has_native_core": False,
    "absent": ["ortools"],
    "cuda": "13.0",
    "memory_bytes": 80 << 30,
}
PEAKS: Line = {
    "part": "peaks",
    "model": "gpt2",
    "case": "80%",
    "budget_bytes": 8 << 20,
    "predicted_bytes": 8 << 20,
    "predicted_allocated_bytes": 8 << 20,
    "predicted_reserved_bytes": 10 << 20,
    "requested_bytes": 8 << 20,
    "allocated_bytes": 8 << 20,
    "reserved_bytes": 10 << 20,
    "held_bytes": 0,
}
BITS: Line = {
    "part": "bitwise",
    "model": "gpt2",
    "case": "80%",
    "compared_count": 3,
    "differs": [],
    "differs_by_itself": [],
    "differs_from_eager": ["output"],
}
TIME: Line = {
    "part": "time",
    "model": "gpt2",
    "case": "gpt2, compile",
    "peer": "inductor@0.5",
    "plain_ns": 100,
    "plain_peak_bytes": 10,
    "peer_peak_bytes": 8,
    "peer_ns": 100,
    "peer_slowdown": 1.0,
    "eager": {"peak_bytes": 8},
    "fused": {"peak_bytes": 8},
    "eager_ns": 150,
    "eager_slowdown": 1.5,
    "fused_ns": 105,
    "fused_slowdown": 1.05,
}
OFFLOAD: Line = {
    "part": "offload",
    "case": "encoder",
    "predicted_plain_peak_bytes": 9 << 20,
    "copies": [{}],
    "links": [{"bytes_per_s": 10**10}, {"bytes_per_s": 10**10}],
    "devices": [
        {"budget_bytes": 8 << 20, "measured_bytes": 8 << 20},
        {"budget_bytes": None, "measured_bytes": 1 << 20},
    ],
    "is_within_budget": True,
    "differences": [],
    "slowdown": 1.5,
}
TESTS: Line = {
    "part": "tests",
    "case": "tests/test_x.py",
    "passed_count": 2,
    "failed": {},
    "skipped": {},
}


def ended(case: str, status: str = "ok", message: str = "") -> Line:
    return {"part": "case", "case": case, "status": status, "message": message}


def whole(*lines: Line) -> list[Line]:
    return [{**FIXED, **line, **environment()} for line in lines]


ALL = (DEVICE, TESTS, PEAKS, BITS, TIME, OFFLOAD)


def verdicts(*lines: Line, device: str = "cuda") -> dict[str, str]:
    """Return what became of each claim, by its text."""
    return {claim.text: claim.verdict for claim in claims(whole(*lines), device)}


def test_what_was_measured_keeps_the_claims() -> None:
    replay = gpu_parts.replay_line("gpt2, default", snapshot())
    checkpoint = {**TIME, "peer": "checkpoint", "case": "gpt2, checkpoint"}
    checkpoint["eager_ns"] = 104
    found = verdicts(*ALL, {"part": "replay", **replay}, checkpoint)
    assert list(found.values()) == [KEPT] * len(RULES) + [NOT_RUN]


@pytest.mark.parametrize(
    ("line", "change", "words"),
    [
        (TESTS, {"failed": {"x::test_y": "assert"}}, "All tests"),
        (PEAKS, {"requested_bytes": (8 << 20) + 1}, "above its budget"),
        (PEAKS, {"predicted_bytes": (8 << 20) + (90 << 10)}, "within 1 %"),
        (PEAKS, {"allocated_bytes": (8 << 20) + (90 << 10)}, "allocated peak"),
        (PEAKS, {"reserved_bytes": 11 << 20}, "reserved peak"),
        (BITS, {"differs": [{"name": "output", "largest": 1.0}]}, "bitwise equal"),
        (TIME, {"fused_ns": 106}, "`torch.compile`"),
        (OFFLOAD, {"is_within_budget": False}, "pinned"),
        (OFFLOAD, {"copies": []}, "pinned"),
        (OFFLOAD, {"links": [{"bytes_per_s": 1}]}, "Links"),
    ],
)
def test_a_broken_claim_is_reported(line: Line, change: Line, words: str) -> None:
    found = claims(whole(*ALL, {**line, **change}), "cuda")
    (broken,) = [claim for claim in found if claim.verdict == BROKEN]
    assert words in broken.text
    assert line["case"] in broken.why
    assert "**broken**" in page(whole(*ALL, {**line, **change}))


def test_an_allocator_that_does_otherwise_breaks_its_claim() -> None:
    other = snapshot()
    other["device_traces"][0][7].update(addr=BASE)
    line = {"part": "replay", **gpu_parts.replay_line("gpt2, default", other)}
    found = verdicts(*ALL, line)
    assert (
        found["A recorded history of the allocator is replayed address for address"]
        == BROKEN
    )


def test_bits_of_a_step_that_does_not_repeat_itself_are_not_judged() -> None:
    line = {
        **BITS,
        "differs": [{"name": "x", "largest": 1.0}],
        "differs_by_itself": ["x"],
    }
    assert BROKEN not in verdicts(*ALL, line).values()


def test_a_case_that_failed_breaks_the_claims_of_its_part() -> None:
    found = claims(whole(*ALL, ended("peaks: bert", "failed", "a | b")), "cuda")
    broken = [claim for claim in found if claim.verdict == BROKEN]
    assert len(broken) == 5  # Budget, requested, allocated, reserved, bits.
    assert all("bert failed" in claim.why for claim in broken)
    lines = whole(*ALL, ended("peaks: bert", "failed", "a | b"))
    assert "| peaks: bert | failed | a \\| b |" in page(lines)


def test_what_is_not_run_is_said() -> None:
    found = claims(
        whole(DEVICE, TESTS, ended("peaks: bert", "not run", "no time")), "sim"
    )
    assert {claim.verdict for claim in found} == {KEPT, NOT_RUN}
    by_text = {claim.text: claim.why for claim in found}
    why = by_text["No measured peak of a planned step is above its budget"]
    assert why.startswith("no case was judged; not or not fully run: mamba, llama")
    assert "the simulated device is no model of time" in by_text.values()


def test_the_page_tells_what_is_there() -> None:
    refused = {**PEAKS, "case": "45%", "status": "refused", "smallest_bytes": 7 << 20}
    text = page(whole(*ALL, refused))
    assert "a card; 80.00 GiB; CUDA 13.0; scale 1" in text
    assert "**without** the native core; ortools is not installed" in text
    assert "| gpt2 | 45% | refused; smallest 7.00 MiB |" in text
    assert "| gpt2 | 80% | 3 | 0 | 0 | 1 |" in text
    assert "| encoder | 9.00 MiB | 10.0 GB/s, 10.0 GB/s | 8.00 MiB |" in text
    assert page([]) == "Nothing is recorded."


def test_the_documentation_says_what_was_recorded() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert fill_place(text, "gpu", recorded()) == text


class Processes:
    """Stands for fresh processes, and notes how long they may take."""

    def __init__(self) -> None:
        self.limits: dict[str, int] = {}

    def __call__(
        self,
        _module: str,
        arguments: Sequence[str],
        *,
        limit_s: int,
        variables: Mapping[str, str],
    ) -> Ended:
        part, case, _, device, _, file, *_ = arguments
        self.limits[f"{part}: {case}"] = limit_s
        assert variables.get("REMAT_TEST_ACCELERATOR") == (
            "sim" if device == "sim" else None
        )
        if part == "device":
            append(Path(file), whole(DEVICE)[0])
        status = "failed" if case == "bert" else "ok"
        return Ended(status=status, message="", elapsed_s=1)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    found = Processes()
    monkeypatch.setattr(gpu_run, "run_module", found)
    return found


def test_each_part_leaves_time_for_the_next(
    tmp_path: Path, processes: Processes
) -> None:
    options: Line = {"device": "cuda", "scale": 1, "tiny": True}
    file = tmp_path / "gpu.jsonl"
    gpu_run.run(Run(**options, limit_s=100, file=file))
    assert processes.limits["device: device"] == 100
    assert 10 < processes.limits["tests: tests/profile/test_memory.py"] <= 15
    assert processes.limits["replay: gpt2, expandable"] <= 64
    assert len(processes.limits) == 1 + sum(
        len(gpu_parts.cases(part, "cuda")) for part in gpu_run.UNTIL_PERCENT
    )
    # What failed is tried again, and nothing else.
    processes.limits.clear()
    gpu_run.run(Run(**options, limit_s=100, file=file))
    assert list(processes.limits) == ["device: device", "peaks: bert"]


def test_no_process_is_started_without_time_for_it(
    tmp_path: Path, processes: Processes
) -> None:
    file = tmp_path / "gpu.jsonl"
    words = ["gpt2", "encoder"]
    run = Run(device="cuda", scale=1, tiny=True, limit_s=10, file=file, only=words)
    ends = {line["case"]: line["status"] for line in gpu_run.run(run)}
    assert ends.pop("peaks: gpt2") == "not run"  # Within six seconds.
    assert ends["time: gpt2, checkpoint"] == "ok"
    assert "peaks: gpt2" not in processes.limits
    assert min(processes.limits.values()) >= gpu_run.LEAST_S


def test_a_machine_without_a_device_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = Ended(status="failed", message="no driver", elapsed_s=1)

    def fail(*_: object, **__: object) -> Ended:
        return failed

    monkeypatch.setattr(gpu_run, "run_module", fail)
    with pytest.raises(SystemExit, match="no device of type 'cuda': no driver"):
        gpu.main(["--results", str(tmp_path)])


@pytest.fixture
def _settings_are_put_back() -> Iterator[None]:
    import torch._functorch.config as functorch_config  # noqa: PLC0415
    import torch._inductor.config as inductor_config  # noqa: PLC0415

    budget = functorch_config.activation_memory_budget
    fallback = inductor_config.fallback_random
    yield
    functorch_config.activation_memory_budget = budget
    inductor_config.fallback_random = fallback
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.simulated
@pytest.mark.usefixtures("_settings_are_put_back")
def test_the_command_on_the_simulated_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: list[str] = []

    def start(module: str, arguments: Sequence[str], **options: Any) -> Ended:
        started.append(" ".join(arguments[:2]))
        # Tests start tests of their own; the rest is measured here.
        if arguments[0] == "tests":
            return run_module(module, arguments, **options)
        assert gpu_parts.main(arguments) == 0
        return Ended(status="ok", message="", elapsed_s=0)

    monkeypatch.setattr(gpu_run, "run_module", start)
    monkeypatch.setattr(gpu_parts, "TIMED", ("vgg19",))
    # Nothing so small fits in less than its whole, or a little less.
    monkeypatch.setattr(gpu_parts, "PERCENTS", (100, 45))
    words = ["--device", "sim", "--tiny", "--results", str(tmp_path)]
    words += ["--only", "test_memory", "vgg19", "conv chain"]
    assert gpu.main(words) == 0
    assert started == [
        "device device",
        "tests tests/profile/test_memory.py",
        "peaks vgg19",
        "offload conv chain",
        "time vgg19, checkpoint",
        "time vgg19, compile",
    ]
    file = tmp_path / "gpu.jsonl"
    lines = read(file)
    shares = [line["case"] for line in lines if line["part"] == "peaks"]
    assert shares == ["plain", "100%", "45%", "smallest"]
    found = claims(lines, "sim")
    run = {rule.text for rule in RULES if not rule.needs_a_card}
    assert {claim.text for claim in found if claim.verdict == KEPT} == run
    assert BROKEN not in {claim.verdict for claim in found}
    assert "### Time at equal peak" in (tmp_path / "gpu.md").read_text("utf-8")

    # What breaks a claim is told, and nothing is measured again.
    peaks = next(line for line in lines if "predicted_reserved_bytes" in line)
    append(file, {**peaks, "requested_bytes": peaks["budget_bytes"] + 1})
    started.clear()
    capsys.readouterr()
    assert gpu.main(words) == 1
    assert started == ["device device"]
    said = capsys.readouterr().out
    assert "broken  No measured peak of a planned step is above its budget" in said
    assert f"vgg19 {peaks['case']}" in said
