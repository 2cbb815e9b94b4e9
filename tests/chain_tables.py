"""Tables of published or exhaustive values for chains, and what they are keyed by."""

import json
from pathlib import Path
from typing import Any

import pytest

from remat.algorithms.chains.conventions import MemoryConvention

_SHARED = Path(__file__).parents[2] / "shared" / "papers"

CONVENTIONS = [
    MemoryConvention(
        overwrites_inputs=overwrites, counts_gradients=gradients, counts_inputs=inputs
    )
    for overwrites in (False, True)
    for gradients in (True, False)
    for inputs in (True, False)
]


def oracle_table(name: str) -> Any:
    """Return a table of published or exhaustive values, or skip the test."""
    path = _SHARED / name
    if not path.is_file():
        pytest.skip(f"no oracle tables in this checkout: {name} is not there")
    return json.loads(path.read_text(encoding="utf-8"))


def label(convention: MemoryConvention) -> str:
    """Return a convention's key in the oracle tables, and its name in test ids."""
    mode = "inplace" if convention.overwrites_inputs else "strict"
    gradients = "counted" if convention.counts_gradients else "free"
    inputs = "counted" if convention.counts_inputs else "pinned_uncounted"
    return f"{mode}|grads={gradients}|inputs={inputs}"
