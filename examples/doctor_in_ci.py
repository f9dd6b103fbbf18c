"""Examine hosts before a CI job uses them: python examples/doctor_in_ci.py [node1,node2]

A failure ends the job with exit code 1. Warnings and advice are shown, and the job continues. In GitHub Actions,
findings are annotations of the job; elsewhere, each finding is a line.
"""

import json
import os
import subprocess
import sys

COMMANDS = {"failure": "error", "warning": "warning", "advice": "notice"}
"""Levels of the doctor, worst first, and the workflow commands of GitHub Actions for them."""


def escaped(text):
    """A finding on one line: text that a host has sent cannot become a command of its own."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def shown(finding, annotate):
    text = f"{finding['host']}: {finding['what']}"
    if finding["fix"]:
        text += f"\nfix: {finding['fix']}"
    if annotate:
        return f"::{COMMANDS[finding['level']]} title=skyfab doctor::{escaped(text)}"
    return f"{finding['level']}: {text}".replace("\n", "\n  ")


def main(hosts):
    doctor = [sys.executable, "-m", "skyfab", "doctor", "--json", f"--hosts={hosts}"]
    done = subprocess.run(doctor, stdout=subprocess.PIPE, text=True)
    if not done.stdout:  # nothing was examined; the doctor has printed why
        return done.returncode
    findings = json.loads(done.stdout)
    for level in COMMANDS:
        for finding in findings:
            if finding["level"] == level:
                print(shown(finding, annotate="GITHUB_ACTIONS" in os.environ))
    levels = [finding["level"] for finding in findings]
    print(f"checks: {len(findings)}", *(f"{level}: {levels.count(level)}" for level in COMMANDS), sep=", ")
    return 1 if "failure" in levels else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "local"))
