"""What every test shares: tests marked ``gpu`` are skipped where there is no CUDA."""

from collections.abc import Iterable

import pytest


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
