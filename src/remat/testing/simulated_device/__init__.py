"""A device that behaves like an accelerator, on any machine.

After :func:`register`, torch knows a device type ``"sim"``: tensors with memory of its
own, which Python cannot read, an allocator with statistics and a capacity, streams
whose copies happen as late as allowed, a random generator whose state is a seed and an
offset, and autocast. Kernels are the CPU's. What runs on it runs through the same code
as on CUDA.

The only part of :mod:`remat.testing` that may import torch; nothing imports it. A
process that registers it keeps it, so tests give it a process of their own.
"""

from remat.testing.simulated_device.faults import FAULTS as FAULTS
from remat.testing.simulated_device.faults import DeviceLostError as DeviceLostError
from remat.testing.simulated_device.faults import Faults as Faults
from remat.testing.simulated_device.registration import DEVICE_TYPE as DEVICE_TYPE
from remat.testing.simulated_device.registration import register as register
