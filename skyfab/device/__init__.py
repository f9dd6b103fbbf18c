"""Remote tensors: PyTorch in this program, with the memory and the computation on a host."""

from __future__ import annotations

from skyfab.device.profile import Profile as Profile
from skyfab.device.profile import profile as profile

__all__ = ["Profile", "profile"]
