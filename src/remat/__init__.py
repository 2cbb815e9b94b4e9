"""remat: train any PyTorch model within a byte budget.

Importing this package imports neither torch nor any solver library; what needs them
is loaded at first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from remat.errors import BudgetError as BudgetError
from remat.errors import CaptureError as CaptureError
from remat.errors import PlanMismatchError as PlanMismatchError
from remat.errors import RematError as RematError

if TYPE_CHECKING:
    from remat.fitting import backend as backend
    from remat.fitting import fit as fit
    from remat.fitting import plan as plan
    from remat.fitting import release as release
    from remat.profile.memory import Measurement as Measurement
    from remat.profile.memory import measure as measure
    from remat.training_plan import Plan as Plan
    from remat.training_plan import load_plan as load_plan
    from remat.verification import VerifyReport as VerifyReport
    from remat.verification import verify as verify

__version__ = "0.1.0"

_HOME_OF = {
    "Measurement": "remat.profile.memory",
    "Plan": "remat.training_plan",
    "VerifyReport": "remat.verification",
    "backend": "remat.fitting",
    "fit": "remat.fitting",
    "load_plan": "remat.training_plan",
    "measure": "remat.profile.memory",
    "plan": "remat.fitting",
    "release": "remat.fitting",
    "verify": "remat.verification",
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
