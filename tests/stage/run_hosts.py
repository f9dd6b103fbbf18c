"""Hosts that answer questions about detached runs in this process, and what they may say."""

from __future__ import annotations

from typing import Any

import skyfab as sky
from skyfab.detached.find import survey
from skyfab.protocol import codec
from skyfab.protocol.messages import Message, Raised, Result
from skyfab.session.ask import Asker
from skyfab.session.question import Question, Reply

ID = "0123456789abcdef"


def part(place: int, state: str = "done", *, hosts: tuple[str, ...] = ("a", "b"), **more: Any) -> dict[str, Any]:
    """What a host says about a run; options are fields of the description, or of the state where that has them."""
    about: dict[str, Any] = {
        "id": ID,
        "name": "night",
        "function": "train",
        "hosts": list(hosts),
        "place": place,
        "ranks": [place],
        "world": len(hosts),
        "on": "all",
        "elastic": False,
    }
    status = {"state": state, "started": 1000.0 + place}
    for key, value in more.items():
        (status if key in ("started", "last", "files", "failed") else about)[key] = value
    return {**status, "about": about}


def stored(message: Message, *parts: bytes) -> list[Reply]:
    """The answer to a question for the result of a rank, in two pieces."""
    head = message.encode()
    content = len(head).to_bytes(4, "big") + head + b"".join(parts)
    return [Reply(True, b""), Reply(None, content[:9]), Reply(None, content[9:])]


def returned(value: Any) -> list[Reply]:
    data = codec.dumps(value).data
    return stored(Result(parts=[len(data)]), data)


def raised(error: Exception) -> list[Reply]:
    data = codec.dumps(error).data
    kind = f"builtins.{type(error).__name__}"
    return stored(Raised(parts=[len(data)], kind=kind, text=str(error), traceback="train.py"), data)


def lines(*found: tuple[int, str, float], more: bool = False) -> dict[str, Any]:
    """A page of logs."""
    return {"lines": [[rank, "out", text, time] for rank, text, time in found], "cursors": {}, "more": more}


class Hosts:
    """Hosts that answer: `says[host, question]` is a value, replies, an error, or a list of several for one after
    another, of which the last one stays. Of a question for a result, the name includes the rank.
    """

    def __init__(self, *names: str) -> None:
        self.hosts = [sky.Host(name=name) for name in names]
        self.inventory = sky.Inventory(hosts={host.name: host for host in self.hosts})
        self.says: dict[tuple[str, str], Any] = {}
        self.asked: list[tuple[str, str]] = []
        self.arguments: list[dict[str, Any]] = []

    def answer(self, _asker: Asker, question: Question[Any], host: sky.Host) -> Any:
        name = question.name
        if name == "runs.content":
            name = str(question.arguments["name"])
        self.asked.append((host.name, name))
        self.arguments.append(dict(question.arguments))
        found = self.says.get((host.name, name), None if name == "runs.fetched" else [])
        if isinstance(found, Several):
            found = found.answers.pop(0) if len(found.answers) > 1 else found.answers[0]
        if isinstance(found, Exception):
            raise found
        replies = found if isinstance(found, list) else [Reply(found, b"")]
        return question.parse(host, iter(replies))

    def run(self, **options: Any) -> sky.Run:
        """As the hosts report it now."""
        with Asker(self.hosts, self.inventory) as asker:
            (found,), _ = survey(asker, **options)
        return found


class Several:
    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)


def lost(host: str) -> sky.HostLost:
    return sky.HostLost("its connection broke", host=host)
