"""What to do when uv finds no versions: a hint for what it says."""

from __future__ import annotations

import re

from skyfab.calls.results import image_option, index_option


def hint_for(why: str) -> str:
    """The next thing to try, for the reason that uv gives."""
    if re.search(r"No space left|[Dd]isk quota|quota exceeded", why):
        return "uv's cache on this machine has no room: uv cache prune, or UV_CACHE_DIR=/path/with/room"
    if re.search(r"\b(401|403)\b|authentic|Unauthorized|Forbidden", why):
        return "put user and password into the index's URL, pip's configuration or ~/.netrc"
    if re.search(r"/whl/(cpu|cu|rocm|xpu)\S*/torch", why):
        named = index_option("URL", ["torch"])
        return f"name an index that has torch, as PyPI (its build needs more room): {named}, or put one where pip looks"
    if re.search(r"Failed to fetch|error sending request|[Cc]onnect|dns|timed out|certificate", why):
        return "is the index up? Where pip was told to look: pip config list"
    if "not found in" in why:
        return "is the name right? Where pip was told to look: pip config list"
    if re.search(r"no wheels? with a matching|[Ww]heels are available|no usable wheels", why):
        return "choose a version that has a wheel for that platform and Python"
    return f"change the versions in {image_option('pip')}"
