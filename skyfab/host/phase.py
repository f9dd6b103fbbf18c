"""The phase of a rank in a detached run, such as waiting or ready: written by the rank, read by host/ask/runs.py."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time

from skyfab import context

TYPE_CHECKING = False  # as in all modules that hosts import
if TYPE_CHECKING:
    from typing import Literal

    Phase = Literal["waiting", "starting", "ready", "restarting", "giving way", "in use"]


def leave() -> None:
    """This rank has no phase any longer: the run is running."""
    if folder := context.run_folder():
        with contextlib.suppress(OSError):
            os.unlink(f"{folder}/phase.{context.instance_info().rank}")


def enter(phase: Phase, text: str = "") -> None:
    """Notes the phase of this rank, with a text for users. Does nothing if the run is not detached."""
    if folder := context.run_folder():
        path = f"{folder}/phase.{context.instance_info().rank}"
        with contextlib.suppress(OSError):  # a full disk must not end the run
            with open(os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump({"phase": phase, "text": text, "since": time.time()}, file)
            os.rename(f"{path}.new", path)


def without_times(text: str) -> str:
    """A text without the times since when others hold GPUs: whether it has changed apart from these."""
    return re.sub(r", [^,()]* so far", "", text)
