"""Whether nvidia-smi or its like works."""

from __future__ import annotations

from collections.abc import Iterator

from skyfab.inspect.doctor.finding import Finding
from skyfab.inspect.doctor.host_report import HostReport


def check(report: HostReport) -> Iterator[Finding]:
    if report.survey.gpu_error is not None:
        fix = "on the host: sudo dmesg | grep -i nvrm; after an update of the driver it needs a reboot"
        yield report.finding("GPUs", "GPU tool", "failure", report.survey.gpu_error, fix)
