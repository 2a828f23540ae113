"""A notebook's kernel: what it shows, its errors, its stop button, and the examples' notebooks."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fork_server
import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
manager = pytest.importorskip("jupyter_client.manager")
pytest.importorskip("ipykernel")

pytestmark = [pytest.mark.spark, pytest.mark.slow]

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A kernel of this interpreter, in a folder of its own."""
    monkeypatch.setenv("PYSPARK_PYTHON", fork_server.start())
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    started = manager.KernelManager(kernel_name="python3")
    yield started
    if started.has_kernel:
        started.shutdown_kernel(now=True)


def run(kernel: Any, cells: list[str], folder: Path, **options: Any) -> list[Any]:
    """The cells after they were run in a kernel."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(
        notebook, km=kernel, timeout=250, resources=resources, **options
    ).execute()
    return notebook.cells


def shown(cell: Any, kind: str) -> str:
    """What a cell shows of a MIME type, or what it printed."""
    if kind in ("stdout", "stderr"):
        return "".join(o.text for o in cell.outputs if o.get("name") == kind)
    return "".join(o.data.get(kind, "") for o in cell.outputs if "data" in o)


BEGIN = """
from pathlib import Path
import sparkdl, torch
from torch import nn

spark = sparkdl.session("local[2]", **{"spark.ui.enabled": "false"})
data = spark.range(64).selectExpr("array(rand(1), rand(2)) AS features", "id % 2 AS label")

class Begun(sparkdl.Callback):
    def on_iteration_end(self, trainer, state):
        Path("begun").touch()

def make_model():
    return nn.Linear(2, 2)

trainer = sparkdl.Trainer(
    model=make_model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD,
    replicas=2, stop=sparkdl.max_iteration(1_000_000), callbacks=[Begun()],
)
"""


@pytest.mark.soak
def test_what_a_notebook_shows(kernel: Any, tmp_path: Path) -> None:
    """The stop button ends the fit and keeps the model; errors have the user's frames alone."""

    def stop() -> None:
        until = time.monotonic() + 200
        while not (tmp_path / "begun").exists() and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(1)
        kernel.interrupt_kernel()

    threading.Thread(target=stop, daemon=True).start()
    cells = [
        BEGIN,
        "trainer",
        "trained = trainer.fit(data)",
        "print(trained.history.stopped, trained.transform(data).count())\ntrained",
        "sparkdl.compare([trained, trained.history])",
        "trained.transform(data.drop('features'))",
        "sparkdl.Trainer(model=make_model, loss=nn.MSELoss(), optimizer=torch.optim.SGD, batch_size=0)",
    ]
    _, trainer, fitted, used, compared, *wrong = run(kernel, cells, tmp_path, allow_errors=True)
    assert "replicas" in shown(trainer, "text/html")
    assert "batch_size" not in shown(trainer, "text/html")
    assert re.search(r"epoch \d+: .*loss", shown(fitted, "stderr")), fitted.outputs  # the bar
    assert shown(fitted, "text/html").count("<svg") == 1  # the curves, which grew
    assert "TqdmWarning" not in shown(fitted, "stderr")
    assert "interrupted: training ends" in shown(fitted, "stderr")
    assert shown(used, "stdout") == "interrupted 64\n"
    assert "<svg" in shown(used, "text/html")
    assert "<svg" in shown(compared, "text/html")
    for cell, message in zip(wrong, ("DataError", "ParameterError"), strict=True):
        (output,) = cell.outputs
        lines = "\n".join(output.traceback).splitlines()
        assert len(lines) < 8, lines
        assert f"sparkdl.errors.{message}: " in lines[-1]
        assert "ipykernel" in lines[1] or "<ipython" in lines[1].lower()


def titles() -> list[str]:
    return sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.soak
@pytest.mark.parametrize("name", titles())
def test_a_notebook_of_the_examples_runs(kernel: Any, tmp_path: Path, name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, km=kernel, timeout=280, resources=resources).execute()
    printed = "".join(shown(cell, "stdout") for cell in notebook.cells if cell.cell_type == "code")
    found = [float(value) for value in re.findall(r"accuracy (\d\.\d+)", printed)]
    assert found
    assert min(found) > 0.85


@pytest.mark.parametrize("name", titles())
def test_a_notebook_is_stored_without_results(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)
    assert os.path.getsize(NOTEBOOKS / name) < 20_000
