"""How the caching allocator of a device at hand is set."""

import logging
from collections.abc import Mapping

import torch

from remat.core.allocator import AllocatorSettings
from remat.core.errors import InvalidPlatformError

logger = logging.getLogger("remat")

_CACHING = frozenset({"cuda"})
"""Types of devices whose allocator is the one that is modelled."""


def settings_on(
    device: torch.device, environment: Mapping[str, str]
) -> AllocatorSettings | None:
    """Return how PyTorch sets the allocator of a device, or ``None`` without one.

    Where the settings are not modelled (``backend:cudaMallocAsync``) this is logged as
    a warning, and what is reserved is not predicted.

    Parameters
    ----------
    device
        Where a model is.
    environment
        The process's environment variables.
    """
    if device.type not in _CACHING:
        return None
    try:
        return AllocatorSettings.of_environment(environment)
    except InvalidPlatformError as error:
        logger.warning(
            "what the caching allocator of %s reserves is not predicted: %s",
            device,
            error,
        )
        return None
