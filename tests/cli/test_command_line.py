"""The remat command: help, exit codes, what is printed where, what is written."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.instances import mlp_chain

import remat
from remat.cli import main
from remat.cli.commands import COMMANDS
from remat.cli.commands.fit import Trained
from remat.cli.entry import make_parser
from remat.core.allocator import AllocatorSettings
from remat.core.errors import SolverFault, UnitError
from remat.core.platform import single_device
from remat.files.serialisation import (
    load_graph,
    load_schedule,
    save_graph,
    save_platform,
    save_schedule,
)
from remat.planning.one_device import plan_graph
from remat.planning.plan import load_plan
from remat.solvers import SOLVERS
from remat.training.verification import VerifyReport

SCRIPT = str(Path(__file__).parent / "workloads.py")
GRAPH = mlp_chain(4).graph
NAMES = [command.name for command in COMMANDS]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a graph, a plan and a schedule."""
    plan = plan_graph(GRAPH, budget="80%")
    save_graph(tmp_path / "graph.json", GRAPH)
    save_schedule(tmp_path / "schedule.json", plan.schedule)
    plan.save(tmp_path / "plan.json")
    card = single_device(2**30, GRAPH.device_kinds[0], AllocatorSettings())
    save_platform(tmp_path / "card.json", card)
    return tmp_path


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options of a command, and of the commands below it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from actions_of(below)
        else:
            yield action


class TestHelp:
    def test_no_words_give_help_and_a_usage_error(self, capsys) -> None:
        assert main([]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "exit codes:" in printed.err

    def test_main_help_lists_commands_codes_and_examples(self, capsys) -> None:
        assert main(["--help"]) == 0
        text = capsys.readouterr().out
        for command in COMMANDS:
            assert f" {command.name} {command.summary} " in " ".join(text.split())
        for code in ("0 ", "1 ", "2 ", "3 ", "4 ", "70 ", "130"):
            assert f"\n  {code}" in text

    @pytest.mark.parametrize("name", NAMES)
    def test_every_command_has_help_with_examples(self, name: str, capsys) -> None:
        assert main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: remat {name} ")
        assert f"examples:\n  remat {name} " in text
        assert max(map(len, text.splitlines())) <= 88

    @pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
    def test_examples_are_valid_command_lines(self, command) -> None:
        for line in command.examples:
            words = line.split(" -- ")[0].split()
            assert words[0] == "remat"
            make_parser().parse_args(words[1:])

    @pytest.mark.parametrize("name", NAMES)
    def test_every_command_prints_json_on_request(self, name: str, capsys) -> None:
        # What it does is said by a second word.
        words = ["instances", "table"] if name == "instances" else [name]
        main([*words, "--help"])
        assert "--json" in capsys.readouterr().out

    def test_every_solver_is_named(self, capsys) -> None:
        main(["plan", "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert all(name in text.replace("- ", "-") for name in SOLVERS)

    def test_version(self, capsys) -> None:
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"remat {remat.__version__}\n"


class TestWithoutTorch:
    @pytest.mark.parametrize(
        "words",
        [
            ("show", "plan.json"),
            ("check", "plan.json"),
            ("show", "graph.json"),
            ("show", "schedule.json", "--graph", "graph.json"),
            ("plan", "--graph", "graph.json", "--budget", "80%"),
            ("plan", "--graph", "graph.json", "--platform", "card.json"),
            ("curve", "--graph", "plan.json", "--points", "2"),
            ("--help",),
        ],
        ids=" ".join,
    )
    def test_files_need_no_torch(self, files: Path, words: tuple[str, ...]) -> None:
        code = """
import sys
sys.modules["torch"] = None
from remat.cli import main
code = main(sys.argv[1:])
assert "matplotlib" not in sys.modules
sys.exit(code)
"""
        paths = [str(files / w) if w.endswith(".json") else w for w in words]
        done = run_python(code, *paths)
        assert done.returncode == 0, done.stderr
        assert done.stdout
        assert done.stderr == ""


class TestShow:
    def test_plan_as_text(self, files: Path, capsys) -> None:
        assert main(["show", str(files / "plan.json")]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"{load_plan(files / 'plan.json')}\n")
        assert "computed again" in text

    def test_plan_as_json(self, files: Path, capsys) -> None:
        assert main(["show", str(files / "plan.json"), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        plan = load_plan(files / "plan.json")
        assert facts["kind"] == "plan"
        assert facts["peak_bytes"] == plan.peak_bytes
        total = sum(part["size_bytes"] for part in facts["at_the_peak"])
        assert total == plan.peak_bytes

    def test_graph_as_json(self, files: Path, capsys) -> None:
        assert main(["show", str(files / "graph.json"), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["op_count"] == len(GRAPH.ops)
        assert facts["forward_op_count"] + facts["backward_op_count"] == len(GRAPH.ops)
        assert facts["peak_bound_bytes"] <= facts["plain_peak_bytes"]

    def test_graph_as_text(self, files: Path, capsys) -> None:
        assert main(["show", str(files / "graph.json")]) == 0
        assert capsys.readouterr().out.startswith("training graph of mlp-4\n")

    def test_schedule_alone_and_replayed(self, files: Path, capsys) -> None:
        path = str(files / "schedule.json")
        assert main(["show", path, "--json"]) == 0
        alone = json.loads(capsys.readouterr().out)
        graph = ["--graph", str(files / "graph.json")]
        assert main(["show", path, "--json", *graph]) == 0
        replayed = json.loads(capsys.readouterr().out)
        assert replayed["violation"] is None
        assert replayed["peak_bytes"] == load_plan(files / "plan.json").peak_bytes
        assert alone.items() <= replayed.items()

    def test_a_schedule_of_another_graph_is_a_broken_promise(
        self, files: Path, capsys
    ) -> None:
        other = files / "other.json"
        save_graph(other, mlp_chain(5).graph)
        words = ["show", str(files / "schedule.json"), "--graph", str(other)]
        assert main(words) == 4
        assert "valid         step" in capsys.readouterr().out

    @pytest.mark.parametrize("name", ["plan.json", "graph.json"])
    def test_timeline_is_drawn(self, files: Path, name: str, capsys) -> None:
        picture = files / "memory.png"
        assert main(["show", str(files / name), "--timeline", str(picture)]) == 0
        assert picture.read_bytes()[:8] == PNG
        assert capsys.readouterr().err == (
            f"remat: drew memory over the step in {picture}\n"
        )

    def test_quiet_says_nothing(self, files: Path, capsys) -> None:
        picture = str(files / "memory.png")
        main(["show", str(files / "plan.json"), "--timeline", picture, "--quiet"])
        assert capsys.readouterr().err == ""


class TestPlanOfGraph:
    def test_everything_is_written(self, files: Path, capsys) -> None:
        folder = files / "new"
        folder.mkdir()
        words = ["plan", "--graph", str(files / "graph.json"), "--budget", "80%"]
        words += ["--output", str(folder / "p"), "--save-graph", str(folder / "g")]
        words += ["--save-schedule", str(folder / "s"), "--json"]
        assert main(words) == 0
        facts = json.loads(capsys.readouterr().out)
        plan = load_plan(folder / "p")
        assert facts == json.loads(json.dumps(plan.summary()))
        assert load_graph(folder / "g") == GRAPH == plan.graph
        assert load_schedule(folder / "s") == plan.schedule

    def test_below_the_floor_is_exit_code_1(self, files: Path, capsys) -> None:
        graph = str(files / "graph.json")
        output = files / "none.json"
        words = ["plan", "--graph", graph, "--budget", "1kB", "--output", str(output)]
        assert main([*words, "--json"]) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith("remat: error: no schedule fits in 1000 B")
        assert len(printed.err.splitlines()) == 1
        facts = json.loads(printed.out)["error"]
        assert facts["type"] == "BudgetError"
        assert not output.exists()
        required = str(facts["required_bytes"])
        assert main(["plan", "--graph", graph, "--budget", required]) == 0

    def test_a_solver_that_finds_none_is_exit_code_3(self, files: Path, capsys) -> None:
        words = ["plan", "--graph", str(files / "graph.json"), "--budget", "99%"]
        assert main([*words, "--solver", "store-all"]) == 3
        error = capsys.readouterr().err
        assert "there may be one (exit code 3): try --solver auto" in error
        assert len(error.splitlines()) == 1


class TestCurve:
    def test_points_and_picture(self, files: Path, capsys) -> None:
        picture = files / "curve.png"
        words = ["curve", "--graph", str(files / "graph.json"), "--plot", str(picture)]
        assert main([*words, "--budgets", "100%, 80%", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        costs = [point["cost_ns"] for point in facts["points"]]
        assert costs == sorted(costs, reverse=True)
        assert facts["points"][-1]["budget_bytes"] == facts["baseline_peak_bytes"]
        assert picture.read_bytes()[:8] == PNG

    def test_table(self, files: Path, capsys) -> None:
        assert (
            main(["curve", "--graph", str(files / "plan.json"), "--points", "2"]) == 0
        )
        text = capsys.readouterr().out
        assert text.startswith("mlp-4: time against memory")
        assert "100.0%" in text


FUSED = ("verify", f"{SCRIPT}:pair", "--budget", "1MB", "--kernels", "fused")


class TestWrongUsage:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["show", "absent.json"], "cannot read 'absent.json': No such file"),
            (["show", "plan.json", "--timeline", "x.doc"], "end it with .png"),
            (["show", "plan.json", "--graph", "graph.json"], "goes with a schedule"),
            (["show", "schedule.json", "--timeline", "x.png"], "add --graph FILE"),
            (["show", "plan.json", "--timeline", "no/x.png"], "there is no folder"),
            (["plan", "--budget", "1MB"], "give either FACTORY or --graph FILE; none"),
            (["plan", SCRIPT, "--graph", "graph.json", "--budget", "1"], "both are"),
            (["plan", "--graph", "graph.json", "--budget", "0"], "must be positive"),
            (["plan", "--graph", "graph.json", "--budget", "8 Gb!"], "not a size"),
            (["plan", "--graph", "schedule.json", "--budget", "1"], "or a plan is"),
            (
                ["plan", "--graph", "graph.json", "--budget", "1", "--solver", "x"],
                "unknown solver 'x'; there are auto, store-all",
            ),
            (
                ["plan", "--graph", "graph.json", "--budget", "1", "--estimated"],
                "--estimated has no effect",
            ),
            (
                ["plan", "--graph", "g.json", "--budget", "1", "--kernels", "fused"],
                "--kernels has no effect",
            ),
            (
                ["plan", "--graph", "g.json", "--budget", "1", "--regions", "breaks"],
                "--regions has no effect",
            ),
            (
                ["plan", "--graph", "g.json", "--budget", "1", "--dynamic", "x:0=2:9"],
                "--dynamic has no effect",
            ),
            (
                [*FUSED, "--regions", "breaks"],
                "--regions breaks runs eager kernels",
            ),
            (
                [*FUSED, "--dynamic", "x:0=2:99"],
                "--dynamic runs eager kernels",
            ),
            (
                ["fit", f"{SCRIPT}:pair", "--budget", "1MB", "--dynamic", "y:0=2:99"],
                "--dynamic: dynamic names 'y', which is no argument",
            ),
            (
                [
                    *["verify", f"{SCRIPT}:pair", "--budget", "1"],
                    *["--dynamic", "0:0=2:99"] * 2,
                ],
                "--dynamic gives dimension 0 of 0 twice",
            ),
            (["curve", "--graph", "graph.json", "--points", "1"], "from 2 to 10000"),
            (["curve", "--graph", "graph.json", "--points", "10001"], "from 2 to"),
            (["curve", "--graph", "graph.json", "--budgets", ","], "names no budget"),
            (["curve", "--graph", "graph.json", "--plot", "x"], "end it with .png"),
            (["fit", SCRIPT, "--budget", "1MB", "--steps", "1"], "at least 2"),
            (["verify", SCRIPT, "--budget", "1MB", "--repeats", "0"], "at least 1"),
            (["fit", SCRIPT, "--plan", "graph.json"], "a plan is needed"),
            (["fit", "absent.py", "--budget", "1MB"], "does not exist"),
        ],
        ids=lambda value: " ".join(value[:5]) if isinstance(value, list) else "",
    )
    def test_one_message_and_exit_code_2(
        self, files: Path, words, message: str, capsys, monkeypatch
    ) -> None:
        monkeypatch.chdir(files)
        before = sorted(files.iterdir())
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("remat: error: ")
        assert message in error
        assert len(error.splitlines()) == 1
        assert sorted(files.iterdir()) == before

    @pytest.mark.parametrize(
        "words",
        [
            ["nonsense"],
            ["plan", SCRIPT],
            ["fit", SCRIPT],
            ["fit", SCRIPT, "--budget", "1", "--plan", "p"],
            ["plan", SCRIPT, "--budget", "1", "--time-limit", "0"],
            ["plan", SCRIPT, "--budget", "1", "--time-limit", "soon"],
            ["plan", SCRIPT, "--budget", "1", "--gap", "2"],
            ["plan", SCRIPT, "--budget", "1", "--gap", "little"],
            ["plan", SCRIPT, "--budget", "1", "--account", "reserved"],
            ["plan", SCRIPT, "--budget", "1", "--seed", "-1"],
            ["plan", SCRIPT, "--budget", "1", "--dynamic", "x:0=64"],
            ["plan", SCRIPT, "--budget", "1", "--seed", str(2**31)],
            ["show"],
        ],
        ids=" ".join,
    )
    def test_argparse_answers_with_2_as_well(self, words, capsys) -> None:
        assert main(words) == 2
        assert "error: " in capsys.readouterr().err

    @pytest.mark.parametrize("command", ["plan", "fit", "verify", "curve"])
    @pytest.mark.parametrize("limit", ["0", "-1", "nan", "inf"])
    def test_a_time_limit_of_nothing_is_refused_as_in_python(
        self, command: str, limit: str, capsys
    ) -> None:
        size = "--budgets" if command == "curve" else "--budget"
        assert main([command, SCRIPT, size, "1MB", f"--time-limit={limit}"]) == 2
        model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
        with pytest.raises(UnitError) as refused:
            remat.plan(model, x, budget="1 MB", time_limit=float(limit))
        assert str(refused.value) in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("command", "option"),
        [
            (command, option)
            for command in COMMANDS
            for option in (*command.writes, *command.draws)
        ],
        ids=lambda value: value if isinstance(value, str) else value.name,
    )
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("no/x.png", "there is no folder "),
            ("folder.png", "it is a folder"),
            ("plan.json/x.png", "there is no folder "),
            ("/proc/x.png", "cannot write '/proc/x.png'"),
            ("x" * 300 + ".png", "File name too long"),
            ("", "is empty"),
            ("zero\0.png", "null"),
        ],
        ids=["missing", "folder", "file", "closed", "long", "empty", "zero"],
    )
    def test_files_are_checked_before_the_work(
        self, files: Path, command, option: str, name: str, message: str,
        capsys, monkeypatch,
    ) -> None:  # fmt: skip
        def work(*args: object, **kwargs: object) -> None:
            raise AssertionError("the work began before the files were checked")

        (files / "folder.png").mkdir()
        monkeypatch.chdir(files)
        before = sorted(files.iterdir())
        monkeypatch.setattr(type(command), "run", work, raising=False)
        words = {
            "show": ["plan.json"],
            "profile-platform": [],
            "instances": ["show", "resnet50"],
        }.get(command.name, [SCRIPT])
        if command.name in {"plan", "fit"}:
            words = [*words, "--budget", "1MB"]
        assert main([command.name, *words, option, name]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"remat: error: {option}")
        assert message in error
        assert len(error.splitlines()) == 1
        assert sorted(files.iterdir()) == before

    def test_every_option_that_names_a_file_to_write_is_checked(self) -> None:
        for command in COMMANDS:
            parser = argparse.ArgumentParser()
            command.add_arguments(parser)
            written = {
                action.option_strings[0]
                for action in actions_of(parser)
                if action.metavar == "FILE"
                and (action.help or "").startswith(("write ", "draw "))
            }
            assert written == {*command.writes, *command.draws}
            assert written or command.name in {"verify", "check", "cache"}

    def test_two_results_cannot_share_a_file(self, files: Path, capsys) -> None:
        words = ["plan", "--graph", str(files / "graph.json"), "--budget", "80%"]
        name = str(files / "new.json")
        assert main([*words, "--output", name, "--save-graph", name]) == 2
        assert "--output and --save-graph name the same" in capsys.readouterr().err
        assert not Path(name).exists()

    def test_a_damaged_file(self, files: Path, capsys) -> None:
        whole = (files / "plan.json").read_text()
        (files / "cut.json").write_text(whole[: len(whole) // 2])
        assert main(["show", str(files / "cut.json")]) == 2
        assert "damaged or cut short" in capsys.readouterr().err


class TestFailures:
    def test_ctrl_c_is_130_and_one_line(self, files: Path, capsys, monkeypatch) -> None:
        def interrupt(*args: object, **kwargs: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("remat.cli.commands.plan.plan_graph", interrupt)
        output = files / "none.json"
        words = ["plan", "--graph", str(files / "graph.json"), "--budget", "1MB"]
        assert main([*words, "--output", str(output)]) == 130
        assert capsys.readouterr().err == "remat: interrupted\n"
        assert not output.exists()

    def test_a_real_ctrl_c_ends_the_process_with_one_line(self, tmp_path: Path) -> None:
        script, output = tmp_path / "script.py", tmp_path / "plan.json"
        script.write_text(
            "import os, signal\n"
            "def remat_workload():\n"
            "    os.kill(os.getpid(), signal.SIGINT)\n"
            "    while True: pass\n"
        )
        # A shell may have started the tests with the signal ignored.
        code = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from remat.cli import main
sys.exit(main(sys.argv[1:]))
"""
        words = ["plan", str(script), "--budget", "1MB", "--output", str(output)]
        done = run_python(code, *words)
        assert done.returncode == 130
        assert done.stderr == "remat: interrupted\n"
        # Python may keep what it compiled of the script.
        assert {*tmp_path.iterdir()} <= {script, tmp_path / "__pycache__"}

    def test_ctrl_c_while_it_loads_is_one_line_too(self) -> None:
        code = """
import sys
from remat.cli import main

class Interrupting:
    def find_spec(self, name, *_):
        if name == "remat.cli.entry":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
sys.exit(main(["--version"]))
"""
        done = run_python(code)
        assert done.returncode == 130
        assert done.stderr == "remat: interrupted\n"

    def test_ctrl_c_while_backward_is_traced_is_one_line_too(self, capsys) -> None:
        words = ["plan", f"{SCRIPT}:interrupted_in_backward", "--budget", "1MB"]
        assert main(words) == 130
        assert capsys.readouterr().err == "remat: interrupted\n"

    def test_a_refuted_schedule_is_a_broken_promise(
        self, files: Path, capsys, monkeypatch
    ) -> None:
        def refute(*args: object, **kwargs: object) -> None:
            raise SolverFault("solver X returned a schedule that fails")

        monkeypatch.setattr("remat.cli.commands.plan.plan_graph", refute)
        words = ["plan", "--graph", str(files / "graph.json"), "--budget", "1MB"]
        assert main(words) == 4
        assert "solver X" in capsys.readouterr().err

    def test_the_unforeseen_is_70_with_a_way_to_learn_more(
        self, files: Path, capsys, monkeypatch
    ) -> None:
        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError("no idea")

        monkeypatch.setattr("remat.cli.commands.plan.plan_graph", fail)
        words = ["plan", "--graph", str(files / "graph.json"), "--budget", "1MB"]
        assert main(words) == 70
        error = capsys.readouterr().err
        assert error == (
            "remat: error: RuntimeError: no idea (--debug shows the traceback)\n"
        )
        assert main([*words, "--debug"]) == 70
        assert "Traceback" in capsys.readouterr().err

    def test_a_reader_that_leaves_is_no_fault(
        self, files: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = "import sys; from remat.cli import main; sys.exit(main(sys.argv[1:]))"
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, "-c", code, "show", str(files / "plan.json")],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        os.close(writing)
        assert done.returncode == 141
        assert done.stderr == ""


class TestOnModels:
    """The whole path, on a model that trains in a millisecond."""

    def test_fit_trains_and_measures(self, tmp_path: Path, capsys) -> None:
        saved = tmp_path / "plan.json"
        words = ["fit", SCRIPT, "--budget", "1MB", "--save", str(saved), "--json"]
        assert main([*words, "--steps", "4"]) == 0
        printed = capsys.readouterr()
        facts = json.loads(printed.out)
        assert len(facts["trained"]["losses"]) == 4
        assert facts["trained"]["losses"][-1] < facts["trained"]["losses"][0]
        assert facts["trained"]["measured_peak_bytes"] <= facts["plan"]["budget_bytes"]
        assert "this is no data" in printed.err
        assert main(["fit", SCRIPT, "--plan", str(saved), "--steps", "2"]) == 0
        text = capsys.readouterr().out
        assert "\ntrained 2 steps\n  peak " in text

    def test_over_budget_is_exit_code_4(self, capsys, monkeypatch) -> None:
        fake = Trained(losses=(1.0,), peak_bytes=2**40, time_ns=None)
        monkeypatch.setattr("remat.cli.commands.fit.train", lambda *_: fake)
        assert main(["fit", SCRIPT, "--budget", "100%"]) == 4
        assert "over budget: the step takes" in capsys.readouterr().err

    def test_sizes_that_vary_are_planned_and_verified(self, capsys) -> None:
        words = [
            f"{SCRIPT}:pair",
            "--budget",
            "90%",
            "--dynamic",
            "0:0=2:128",
            "--json",
        ]
        assert main(["plan", *words]) == 0
        planned = json.loads(capsys.readouterr().out)
        assert main(["verify", *words, "--repeats", "1"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["predicted_peak_bytes"] == planned["peak_bytes"]
        found = [shape["shapes"] for shape in report["shapes"]]
        assert found == ["input [2, 8]", "input [64, 8]"]

    def test_verify_keeps_its_promises(self, capsys) -> None:
        words = ["verify", f"{SCRIPT}:thing", "--budget", "100%", "--repeats", "1"]
        assert main([*words, "--json", "--", "unused"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["is_exact"]
        assert facts["is_within_budget"]

    @pytest.mark.parametrize("broken", ["is_exact", "is_within_budget"])
    def test_verify_says_what_is_broken(self, broken: str, capsys, monkeypatch) -> None:
        monkeypatch.setattr(VerifyReport, broken, property(lambda _: False))
        words = ["verify", f"{SCRIPT}:pair", "--budget", "100%", "--repeats", "1"]
        assert main(words) == 4
        wanted = {"is_exact": "not exact: ", "is_within_budget": "over budget: "}
        assert wanted[broken] in capsys.readouterr().err

    def test_curve_of_a_model(self, capsys) -> None:
        words = ["curve", f"{SCRIPT}:pair", "--points", "2", "--estimated", "--json"]
        assert main(words) == 0
        assert json.loads(capsys.readouterr().out)["points"][-1]["overhead"] == 0

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("frozen", "does not train"),
            ("wrong_shape", "raises inside the model"),
        ],
    )
    def test_a_model_that_cannot_be_planned(
        self, name: str, message: str, capsys
    ) -> None:
        assert main(["plan", f"{SCRIPT}:{name}", "--budget", "1MB"]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error

    def test_python_dash_m(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "remat", "--version"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == f"remat {remat.__version__}\n"
