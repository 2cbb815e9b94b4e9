"""A stand-in for fresh processes, where what they load has been tested to load."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
from studies.fresh_process import Ended


def stay_in_process(monkeypatch: pytest.MonkeyPatch, study: ModuleType) -> None:
    """Let a study's later measurements run here, with the arguments that it gives them.

    A fresh process takes four seconds to load torch and what captures; that a study can
    start one is seen once a study, and how they end in ``test_fresh_process``.
    """
    main: Callable[[Sequence[str]], int] = study.main

    def run_here(
        _module: str,
        arguments: Sequence[str],
        *,
        variables: Mapping[str, str],
        **_limits: Any,
    ) -> Ended:
        with monkeypatch.context() as here:
            for name, value in variables.items():
                here.setenv(name, value)
            try:
                is_ok = main(arguments) == 0
            except Exception:  # noqa: BLE001 - a process would end with any of them
                message = traceback.format_exc()
                return Ended(status="failed", message=message, elapsed_s=0)
        return Ended(status="ok" if is_ok else "failed", message="", elapsed_s=0)

    monkeypatch.setattr(study, "run_module", run_here)
