"""Whether nvidia-smi or its like works."""

from __future__ import annotations

from skyfab.inspect.doctor.host_report import Findings, HostReport


def check(report: HostReport) -> Findings:
    if report.survey.gpu_error is not None:
        fix = "on the host: sudo dmesg | grep -i nvrm; after an update of the driver it needs a reboot"
        yield report.finding("GPUs", "GPU tool", "failure", report.survey.gpu_error, fix)
