"""The GPUs' driver: whether nvidia-smi or rocm-smi works, and whether it is new enough for torch."""

from __future__ import annotations

from skyfab.env.facts import DRIVERS, cuda_for
from skyfab.inspect.doctor.finding import Findings, HostReport


def check(report: HostReport) -> Findings:
    if report.survey.gpu_error is not None:
        fix = "on the host: sudo dmesg | grep -i nvrm; after a driver update, reboot"
        yield report.finding("GPUs", "GPU tool", "failure", report.survey.gpu_error, fix)
    driver = next((gpu.driver for gpu in report.survey.gpus if gpu.driver), None)
    if driver is None:
        return
    cuda = cuda_for(driver)
    if cuda is None or cuda < 12:
        oldest = ".".join(map(str, DRIVERS[12]))
        what = f"its driver {driver} is too old for CUDA 12, which torch needs: a CPU build is used, or an old torch"
        yield report.finding("GPUs", "driver", "warning", what, f"install driver {oldest} or newer on the host")
    else:
        yield report.finding("GPUs", "driver", "ok", f"driver {driver}: torch is chosen for CUDA {cuda}")
