"""The accelerator that tests marked ``gpu`` run on: a card, or the simulated device.

The simulated one is chosen by the environment of a process, since a process that
registers it keeps it: ``REMAT_TEST_ACCELERATOR=sim``.
"""

import os

import torch

ACCELERATOR = os.environ.get("REMAT_TEST_ACCELERATOR", "cuda")
"""torch's type of the device."""

FIRST = f"{ACCELERATOR}:0"

IS_SIMULATED = ACCELERATOR == "sim"

if IS_SIMULATED:
    from remat.testing import simulated_device

    simulated_device.register()


def is_here() -> bool:
    """Return whether this process has the accelerator."""
    return IS_SIMULATED or torch.cuda.is_available()
