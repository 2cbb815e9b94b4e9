"""What `import remat` costs, what it pulls in, and what works without torch."""

import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import remat
from remat.core import errors

ROOT = Path(__file__).parents[1]
IMPORT_LIMIT_S = 0.3  # of processor time; more than ten times what it takes
HEAVY_MODULES = (
    "torch",
    "ortools",
    "matplotlib",
    "transformers",
    "lightning",
    "accelerate",
)

# The names that the README, the documentation and saved scripts rely on.
PUBLIC_NAMES = {
    "Plan",
    "backend",
    "compare_devices",
    "fit",
    "load_plan",
    "measure",
    "plan",
    "release",
    "verify",
}


def run_python(code: str) -> str:
    """Return what ``code`` prints in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def torch_free_modules() -> list[str]:
    """Return the modules that the layer check holds free of torch."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = config["tool"]["importlinter"]["contracts"]
    (contract,) = [c for c in contracts if "torch" in c.get("forbidden_modules", [])]
    return contract["source_modules"]


def test_import_takes_less_than_the_limit() -> None:
    code = """
        import time
        started = time.process_time()
        import remat
        print(time.process_time() - started)
    """
    # The least of several: another process can only make an import slower.
    fastest_s = min(float(run_python(code)) for _ in range(5))
    assert fastest_s < IMPORT_LIMIT_S


def test_import_pulls_in_no_heavy_module() -> None:
    loaded = run_python("import sys, remat; print(*sys.modules)").split()
    assert set(HEAVY_MODULES).isdisjoint(loaded)
    assert "remat" in loaded


@pytest.mark.parametrize("module", torch_free_modules())
def test_core_module_loads_without_heavy_modules(module: str) -> None:
    blocked = dict.fromkeys(HEAVY_MODULES)
    # An entry of None makes the import system refuse the module.
    run_python(f"import sys; sys.modules.update({blocked}); import {module}")


def test_a_blocked_module_would_be_noticed() -> None:
    with pytest.raises(AssertionError, match="import of torch halted"):
        run_python("import sys; sys.modules['torch'] = None; import torch")


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_a_framework_that_is_not_installed_is_named(framework: str) -> None:
    printed = run_python(
        f"""
        import sys
        from remat.core.errors import MissingDependencyError
        sys.modules["{framework}"] = None
        try:
            import remat.integrations.{framework}
        except MissingDependencyError as error:
            print(error)
        """
    )
    assert f"pip install {framework}" in printed


def test_planning_works_without_torch() -> None:
    printed = run_python(
        """
        import sys
        sys.modules["torch"] = None
        from remat.core.graph import Op, Phase, Storage, TrainingGraph
        from remat.planning.portfolio import solve
        from remat.core.platform import single_device
        from remat.core.problem import Problem
        from remat.solvers import SOLVERS

        def op(name, reads, writes, phase):
            return Op(name=name, reads=reads, writes=writes, phase=phase,
                      cost_ns=(5,), workspace_bytes=(0,))

        graph = TrainingGraph(
            name="one layer",
            storages=(Storage(name="activation", size_bytes=8),
                      Storage(name="gradient", size_bytes=4)),
            ops=(op("forward", (), (0,), Phase.FORWARD),
                 op("backward", (0,), (1,), Phase.BACKWARD)),
            final_outputs=(1,),
        )
        problem = Problem(graph=graph, platform=single_device(budget_bytes=12))
        result = solve(problem, SOLVERS["store-all"]())
        print(result.status, result.trace.peak_bytes[0], result.cost_ns)
        """
    )
    assert printed.split() == ["optimal", "12", "10"]


def test_public_names_are_there_and_documented() -> None:
    missing = {name for name in PUBLIC_NAMES if not hasattr(remat, name)}
    assert not missing
    undocumented = {name for name in PUBLIC_NAMES if not getattr(remat, name).__doc__}
    assert not undocumented


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = remat.no_such_name


def error_classes() -> list[type[errors.RematError]]:
    """Return every exception class of the package but the base."""
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type)
        and issubclass(value, errors.RematError)
        and value is not errors.RematError
    ]


@pytest.mark.parametrize("error", error_classes(), ids=lambda error: error.__name__)
def test_every_error_is_also_a_fitting_builtin(error: type[Exception]) -> None:
    builtin = {ValueError, RuntimeError, ImportError}
    assert any(issubclass(error, base) for base in builtin)


def test_budget_error_carries_its_numbers() -> None:
    error = errors.BudgetError("no", budget_bytes=8, required_bytes=9)
    assert (error.budget_bytes, error.required_bytes) == (8, 9)
    assert str(error) == "no"
