"""GPUs whose memory had errors."""

from __future__ import annotations

from skyfab.inspect.doctor.host_report import Findings, HostReport


def check(report: HostReport) -> Findings:
    damaged = [gpu.index for gpu in report.survey.gpus if gpu.ecc_errors]
    whole = [gpu.index for gpu in report.survey.gpus if not gpu.ecc_errors]
    if damaged:
        which = ", ".join(map(str, damaged))
        what = f"GPU {which} had memory errors that could not be corrected: results may be wrong"
        fix = "on the host: sudo nvidia-smi --gpu-reset, or a reboot; if the errors return, it is broken"
        fix += f": gpus = {whole} in the inventory leaves it out" if whole else ""
        setting = ("gpus", str(whole)) if whole else None
        yield report.finding("GPUs", "ECC", "failure", what, fix, setting)
