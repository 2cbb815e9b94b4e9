"""What every test shares: how hypothesis runs, and what is skipped without CUDA."""

import gc
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.vendor import pretty

# A busy machine makes any example slow, and is no fault of the code under test.
for _profile, _examples in (("remat", 30), ("remat thorough", 200)):
    settings.register_profile(
        _profile,
        max_examples=_examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
settings.load_profile("remat")


def _print_fields(value: Any, printer: Any, _cycle: bool) -> None:
    shown = (f"{f.name}={getattr(value, f.name)!r}" for f in fields(value))
    printer.text(f"{type(value).__name__}({', '.join(shown)})")


# Their own text is a summary; an example that fails a test is to be copied out of it.
pretty.for_type_by_name("remat.core.graph", "TrainingGraph", _print_fields)
pretty.for_type_by_name("remat.core.schedule", "Schedule", _print_fields)


SLOW = Path(__file__).with_name("slow.txt")
"""Names the tests that `make check` leaves out, one a line."""

THOROUGH = Path(__file__).with_name("thorough.txt")
"""Names the cases that only `make test THOROUGH=1` runs, one a line."""

_QUICK_S = 0.5

_seconds: defaultdict[str, float] = defaultdict(float)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-slow",
        action="store_true",
        help=f"write to {SLOW.name} which of the tests take more than {_QUICK_S} s",
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help=f"run the cases that {THOROUGH.name} names as well",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        # All workers, and processes that tests start, measure and plan a model once.
        folder = TemporaryDirectory(prefix="remat-tests-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["REMAT_CACHE_DIR"] = folder.name
    if config.getoption("--thorough"):
        settings.load_profile("remat thorough")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration


def pytest_terminal_summary(config: pytest.Config) -> None:
    if config.getoption("--write-slow"):
        slow = {name for name, seconds in _seconds.items() if seconds > _QUICK_S}
        slow.update(names_in(SLOW) - set(_seconds))
        SLOW.write_text("\n".join([*sorted(slow), ""]), encoding="utf-8")


def names_in(file: Path) -> set[str]:
    return set(file.read_text(encoding="utf-8").splitlines())


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    # Who names a test, or a case of it, wants all of what he names.
    is_named = "::" in "".join(config.args) or config.option.keyword
    if not config.getoption("--thorough") and not is_named:
        leave_out_further_cases(config, items)
    slow = names_in(SLOW)
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")
    for name, needed in (("gpu", "CUDA"), ("simulated", "simulated")):
        marked = [item for item in items if item.get_closest_marker(name) is not None]
        if not marked:
            continue
        # Imported here: most of the suite neither needs torch nor waits for it.
        from tests import accelerator  # noqa: PLC0415

        if accelerator.IS_SIMULATED or (name == "gpu" and accelerator.is_here()):
            continue
        reason = (
            f"needs a {needed} device ({len(marked)} tests marked {name} are skipped)"
        )
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def leave_out_further_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the named cases out of what is run; of each test another one stays."""
    named = names_in(THOROUGH)
    found = {item.nodeid for item in items}
    kept = [item for item in items if item.nodeid not in named]
    tested = {function_of(nodeid) for nodeid in found}
    wrong = {name for name in named - found if function_of(name) in tested}
    wrong |= tested - {function_of(item.nodeid) for item in kept}
    if wrong:
        msg = f"{THOROUGH.name}: no such case, or none left: {', '.join(sorted(wrong))}"
        raise pytest.UsageError(msg)
    config.hook.pytest_deselected(items=[i for i in items if i.nodeid in named])
    items[:] = kept


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let the collector rest while all is imported: none of it is garbage.

    It would walk the growing heap again and again, for a quarter of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    if "torch" in sys.modules:
        # pytest listens to loggers that propagate nothing; this one then prints graphs.
        logging.getLogger("torch.__trace").propagate = True
    freeze_what_stays()
    # Traces make hundreds of thousands of objects that live until the trace ends, and
    # the collector looks at them again and again: a tenth of the time of their tests.
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def what_is_patched_plans_anew(request: pytest.FixtureRequest) -> None:
    """Keep plans of other tests from those that may change how plans are made."""
    if "monkeypatch" in request.fixturenames:
        request.getfixturevalue("monkeypatch").setenv("REMAT_PLAN_CACHE_SIZE", "0")


@pytest.fixture(scope="module", autouse=True)
def modules_start_afresh() -> Iterator[None]:
    """Keep the collector's walks as short for the last module as for the first."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].compiler.reset()
    freeze_what_stays()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Keep the walks of the next test's measurements short, too."""
    if _full_collections() > _collections_seen[0]:
        freeze_what_stays()
    _collections_seen[0] = _full_collections()


_collections_seen = [0]


def _full_collections() -> int:
    return gc.get_stats()[-1]["collections"]


def freeze_what_stays() -> None:
    """Leave what was imported or is cached out of the collector's walks from now on.

    Measuring memory walks the heap three times a step. With what thousands of tests
    leave behind, such a walk takes a second, and the suite nearly twice its time. What
    the tests of a module leave is enough for a tenth of the time of some.
    """
    gc.collect()
    gc.freeze()
