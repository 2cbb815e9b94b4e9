"""remat: train any PyTorch model within a byte budget.

Importing this package imports neither torch nor any solver library; what needs them
is loaded at first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from remat.core.errors import BudgetError as BudgetError
from remat.core.errors import CaptureError as CaptureError
from remat.core.errors import PlanMismatchError as PlanMismatchError
from remat.core.errors import RematError as RematError

if TYPE_CHECKING:
    from remat.planning.plan import Plan as Plan
    from remat.planning.plan import load_plan as load_plan
    from remat.profile.memory import Measurement as Measurement
    from remat.profile.memory import measure as measure
    from remat.training.device_comparison import compare_devices as compare_devices
    from remat.training.fitting import backend as backend
    from remat.training.fitting import fit as fit
    from remat.training.fitting import plan as plan
    from remat.training.fitting import release as release
    from remat.training.largest_batch import max_batch as max_batch
    from remat.training.verification import VerifyReport as VerifyReport
    from remat.training.verification import verify as verify

__version__ = "0.1.0"

_HOME_OF = {
    "Measurement": "remat.profile.memory",
    "Plan": "remat.planning.plan",
    "VerifyReport": "remat.training.verification",
    "backend": "remat.training.fitting",
    "compare_devices": "remat.training.device_comparison",
    "fit": "remat.training.fitting",
    "load_plan": "remat.planning.plan",
    "max_batch": "remat.training.largest_batch",
    "measure": "remat.profile.memory",
    "plan": "remat.training.fitting",
    "release": "remat.training.fitting",
    "verify": "remat.training.verification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        msg = f"module 'remat' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
