"""Remote devices: PyTorch tensors of this program whose memory and computation are on a host."""

from __future__ import annotations

from skyfab.device.profile import Profile as Profile
from skyfab.device.profile import profile as profile

__all__ = ["Profile", "profile"]
