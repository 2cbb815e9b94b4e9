"""What every test shares: how hypothesis runs, and what is skipped without CUDA."""

import gc
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.vendor import pretty

# A busy machine makes any example slow, and is no fault of the code under test.
settings.register_profile(
    "remat",
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


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    # Imported here: most of the suite neither needs torch nor waits for it.
    import torch  # noqa: PLC0415

    if torch.cuda.is_available():
        return
    reason = f"needs a CUDA device ({len(marked)} tests marked gpu are skipped)"
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Leave what was imported out of the collector's walks: it stays in any case.

    With every module of the tests imported, a walk takes a second, and tests with large
    graphs set off many.
    """
    gc.collect()
    gc.freeze()
