"""Start-up lines of frameworks that have no useful content: shown only with SKYFAB_TRACE=1 or ``-v``."""

from __future__ import annotations

import os
import re
from typing import Final

_NOISE: Final = re.compile(
    r"\[[WI][^\]]*\] (?:Warning: )?\[c10d\] The hostname of the client socket cannot be retrieved"
    r"|\[Gloo\] Rank \d+ is connected to \d+ peer ranks"
    r"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    r"|[IWE]\d{4} [\d:.]+ +\d+ (?:cuda_(?:dnn|blas|fft)|computation_placer|port|cpu_feature_guard)\.cc:\d+\]"
    r"|/[^:]*:\d+: UserWarning: Failed to initialize NumPy: No module named 'numpy'"
    r"|  cpu = _conversion_method_template\(device=torch\.device\("  # the second line of that
)
_HIDES: Final = not os.environ.get("SKYFAB_TRACE")


def is_noise(line: str) -> bool:
    """
    >>> is_noise("[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1")
    True
    >>> is_noise("Rank 0 is connected")
    False
    """
    return _HIDES and line[:1] in "[WIE/ " and _NOISE.match(line) is not None
