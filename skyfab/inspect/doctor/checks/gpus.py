"""GPUs whose memory had errors, GPUs that are slowed down, and GPUs that others use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from skyfab.inspect.doctor.finding import Findings, HostReport
from skyfab.inspect.survey import Gpu


def check(report: HostReport) -> Findings:
    gpus = report.survey.gpus
    yield from _damaged(report)
    fix = "check fans, dust and the power limit: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"
    for reasons, some in _alike(gpus, lambda gpu: ", ".join(gpu.throttled)):
        what = f"{_numbers(some)} slowed down by {reasons}{_range([gpu.temperature for gpu in some], 'at ', ' °C')}"
        yield report.finding("GPUs", "throttling", "warning", what, fix)
    fix = "wait, or use hosts that are free: --where='not busy'"
    for users, some in _alike(gpus, _users):
        what = f"{_numbers(some)} in use by {users}{_range([gpu.use for gpu in some], '', ' %')}"
        yield report.finding("GPUs", "in use", "advice", what, fix)
    for gpu in gpus:
        if not gpu.is_busy:
            yield report.finding("GPUs", "in use", "ok", f"GPU {gpu.index}, {gpu.name}, is free")


def _damaged(report: HostReport) -> Findings:
    damaged = [gpu.index for gpu in report.survey.gpus if gpu.ecc_errors]
    whole = [gpu.index for gpu in report.survey.gpus if not gpu.ecc_errors]
    if damaged:
        which = ", ".join(map(str, damaged))
        what = f"GPU {which} had uncorrectable memory errors: results may be wrong"
        fix = "on the host: sudo nvidia-smi --gpu-reset, or a reboot; if the errors return, it is broken"
        fix += f": gpus = {whole} in the inventory excludes it" if whole else ""
        setting = ("gpus", str(whole)) if whole else None
        yield report.finding("GPUs", "ECC", "failure", what, fix, setting)


def _users(gpu: Gpu) -> str:
    users = dict.fromkeys(f"{one.user or '?'} ({one.command or one.pid})" for one in gpu.processes)
    return (", ".join(users) or "an unknown user") if gpu.is_busy else ""


def _alike(gpus: Sequence[Gpu], text_of: Callable[[Gpu], str]) -> Iterable[tuple[str, list[Gpu]]]:
    """GPUs with the same text, together: a host may have sixteen. Those without a text are left out."""
    found: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        if text := text_of(gpu):
            found.setdefault(text, []).append(gpu)
    return found.items()


def _numbers(gpus: Sequence[Gpu]) -> str:
    return f"GPU {', '.join(str(gpu.index) for gpu in gpus)} {'is' if len(gpus) == 1 else 'are'}"


def _range(values: Sequence[int | None], before: str, unit: str) -> str:
    known = sorted({value for value in values if value is not None})
    return f", {before}{' to '.join(map(str, dict.fromkeys((known[0], known[-1]))))}{unit}" if known else ""
