"""The results of a contest as a document, and that document as tables, one for each job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.chart import by_job
from benchmarks.peers.contest import Contest
from benchmarks.peers.contestants import OURS, Contestant
from benchmarks.peers.jobs import PROGRAMS, SESSIONS, Job
from benchmarks.result import Result
from benchmarks.table import number


def document(
    contest: Contest,
    contestants: Sequence[Contestant],
    peers: Sequence[Mapping[str, str]],
    facts: Mapping[str, Any],
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Has results in the shape of other benchmarks, one for each job and peer, with skyfab's own sample in `ours`.

    `peers` has the name of each contestant with its version, or with the reason why it does not take part; `missing`
    has the same for jobs.
    """
    ours, *others = contestants
    assert ours.name == OURS
    results, missing, notes = [], [], []
    for job in (*PROGRAMS, *SESSIONS):
        if only and job.name not in only:
            continue
        own = contest.sample(job, ours)
        if own is None:
            notes.append(f"{job.name}: skyfab: {contest.reasons.get((job.name, OURS), 'not measured')}")
            continue
        for each in others:
            found = contest.sample(job, each)
            if found is not None:
                result = Result(
                    row=job.name,
                    what=title(job, contest),
                    unit=job.unit,
                    ours=own,
                    baseline=found,
                    against=each.label(job.name),
                )
                results.append(result.document())
            elif why := contest.reasons.get((job.name, each.name)):
                missing.append({"row": job.name, "against": each.label(job.name), "why": why})
    return {"facts": dict(facts), "peers": list(peers), "results": results, "missing": missing, "notes": notes}


def title(job: Job, contest: Contest) -> str:
    size = contest.size
    return job.what.format(calls=size.calls, tasks=size.tasks, array=size.array, file=size.file, files=size.files)


def text(found: Mapping[str, Any]) -> list[str]:
    """The tables, each with the median and how many times skyfab's it is; then versions and what is missing."""
    lines: list[str] = []
    about = {result["row"]: result for result in found["results"]}
    for job, rows in by_job(found).items():
        ours = next(sample["median"] for name, sample in rows if name == OURS)
        lines += [f"{job}: {about[job]['what']}"]
        for name, sample in rows:
            figure = number(sample["median"], about[job]["unit"])
            noise = f"±{sample['noise']:.0%}" if len(sample["values"]) > 1 else ""
            lines.append(f"  {name:<16}{figure:>12} {noise:<6}{sample['median'] / ours:8.2f}×".rstrip())
        lines += [f"  {each['against']:<16}{each['why']}" for each in found["missing"] if each["row"] == job]
        lines.append("")
    versions = [f"{each['name']} {each['version']}" for each in found["peers"] if each["version"]]
    absent = [f"{each['name']} does not take part: {each['why']}" for each in found["peers"] if not each["version"]]
    return [*lines, f"median, and how many times skyfab's it is; {', '.join(versions)}", *absent, *found["notes"]]
