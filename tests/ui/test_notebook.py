"""A real notebook: one kernel, whose cells are executed one after another."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from stage.spot import until

pytestmark = pytest.mark.programs

pytest.importorskip("ipykernel")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

BEGIN = """
import time
import skyfab as sky

@sky.function
def work(steps, seconds=0.0):
    for step in range(steps):
        print("step", step)
        time.sleep(seconds)
    return sky.instance_info().rank

compute = sky.Compute("local", ranks=2).open()
"""


class Notebook:
    """A notebook that grows by the cells that tests execute."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.messages: list[Any] = []
        """What the kernel has sent for the last cell."""
        process = client.process_message
        client.process_message = lambda message, *rest: self.messages.append(message) or process(message, *rest)

    def execute(self, code: str, *, interrupt_at: str = "") -> list[Any]:
        """The outputs of a cell. With `interrupt_at`, the kernel is interrupted when the cell has printed that."""
        cell = nbformat.v4.new_code_cell(code)
        self._client.nb.cells.append(cell)
        self.messages.clear()

        def interrupt() -> None:
            until(lambda: interrupt_at in printed(cell.outputs), timeout=170)
            os.kill(self._client.km.provisioner.pid, signal.SIGINT)

        with contextlib.ExitStack() as stack:
            if interrupt_at:
                thread = threading.Thread(target=interrupt, daemon=True)
                thread.start()
                stack.callback(thread.join)
            self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        return cell.outputs


def printed(outputs: list[Any], name: str = "stdout") -> str:
    return "".join(one["text"] for one in list(outputs) if one["output_type"] == "stream" and one["name"] == name)


def of_type(outputs: list[Any], kind: str) -> list[Any]:
    return [one for one in outputs if one["output_type"] == kind]


@pytest.fixture(scope="module")
def notebook(home: object) -> Iterator[Notebook]:
    client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=170, allow_errors=True, kernel_name="python3")
    client.create_kernel_manager()
    client.km.transport = "ipc"  # over TCP the kernel warns
    with client.setup_kernel():
        notebook = Notebook(client)
        assert notebook.execute(BEGIN) == []
        yield notebook
        notebook.execute("compute.close()")


def test_a_cell_has_the_result_and_what_ranks_print(notebook: Notebook) -> None:
    outputs = notebook.execute("work(1) @ compute")
    assert sorted(printed(outputs).splitlines()) == ["local[0] step 0", "local[1] step 0"]
    assert outputs[-1]["data"] == {"text/plain": "[0, 1]"}
    (again,) = of_type(notebook.execute("work(0) >> compute"), "execute_result")
    assert again["data"] == {"text/plain": "0"}


def test_a_future_can_be_awaited(notebook: Notebook) -> None:
    outputs = notebook.execute("await (work(1) > compute)")
    assert printed(outputs) == "local step 0\n", "below the cell that made the call"
    assert outputs[-1]["data"] == {"text/plain": "0"}


def test_progress_is_one_display_that_is_updated_in_place(notebook: Notebook) -> None:
    outputs = notebook.execute("work(1, 3.5) @ compute; work(1, 1.5) >> compute")
    kinds = [message["msg_type"] for message in notebook.messages]
    shown = [
        message["content"]["data"]["text/plain"]
        for message in notebook.messages
        if message["msg_type"] in ("display_data", "update_display_data")
    ]
    assert kinds.count("display_data") == 1
    assert {re.sub(r"\d", "#", text) for text in shown} >= {"work · # ranks · #:##", ""}
    assert len(set(shown)) == len([text for text in shown if text]) + 1, "nothing is sent that is shown already"
    (display,) = of_type(outputs, "display_data")
    assert display["data"]["text/plain"] == "", "it is gone at the end"
    assert "·" not in printed(outputs) + printed(outputs, "stderr")


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("compute", "<Compute local: open>"),
        ("compute.hosts[0]", "<Host local: ready>"),
        ("future = work(0) > compute; future.result(); future", "<Future of work: done>"),
        ("sky.Image(pip=['numpy'])", "Image("),
        ("compute.inventory", "Inventory"),
        ("run = compute.launch(work(0)); run.result(); run", "<run "),
    ],
)
def test_values_are_shown_as_tables(notebook: Notebook, code: str, shown: str) -> None:
    (result,) = of_type(notebook.execute(code), "execute_result")
    html = result["data"]["text/html"]
    assert html.startswith("<table>") and html.endswith("</table>")
    assert shown in result["data"]["text/plain"]


def test_a_rank_that_fails_shows_its_lines_and_the_cause_last(notebook: Notebook) -> None:
    outputs = notebook.execute("""
@sky.function
def bad():
    raise ValueError("bad batch")

bad() @ compute""")
    (error,) = outputs
    assert (error["output_type"], error["ename"]) == ("error", "BroadcastError")
    lines = error["traceback"]
    frames = [line.rpartition(", ")[2] for line in lines if line.startswith("  File ")]
    assert frames == ["in <module>", "in bad"], "neither IPython's nor ours"
    assert '    raise ValueError("bad batch")' in lines
    assert re.fullmatch(r"local\[\d\] ValueError: bad batch \(same error on 1 more rank\)", lines[-1])
    (own,) = notebook.execute("1 / 0")
    assert len(own["traceback"]) > 1 and "ZeroDivisionError" in own["traceback"][-1], "others are IPython's"


def test_an_interrupted_cell_is_one_line_and_the_next_one_works(notebook: Notebook) -> None:
    outputs = notebook.execute("work(600, 0.1) @ compute", interrupt_at="step 3")
    (error,) = of_type(outputs, "error")
    assert error["traceback"] == ["interrupted: stopped on local"]
    outputs = notebook.execute("work(1) @ compute")
    assert outputs[-1]["data"] == {"text/plain": "[0, 1]"}
