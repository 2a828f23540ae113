"""Every page of the guide, and the README's program, run from top to bottom as they stand there."""

from __future__ import annotations

import linecache
import re
import sys
import textwrap
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from launch import soak_but
from pyspark import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide"
README = ROOT / "README.md"
PAGES = sorted(page.name for page in GUIDE.glob("*.md"))
COMING = "../coming/torch_distributor.md"
OTHERS = ["../start.md", *sorted(f"../coming/{page.name}" for page in GUIDE.glob("../coming/*.md"))]
"""Pages beside the guide that have programs; one is always run."""
LONG = [
    "checkpoints.md",
    "connect.md",
    "consistency.md",
    "continuing.md",
    "data.md",
    "gang.md",
    "generate.md",
    "gradients.md",
    "groups.md",
    "inference.md",
    "metrics.md",
    "models.md",
    "optimizers.md",
    "parameter_server.md",
    "pipelines.md",
    "planner.md",
    "predictions.md",
    "recipes.md",
    "recommenders.md",
    "report.md",
    "sampling.md",
    "schedules.md",
    "sparse.md",
    "summaries.md",
    "time_series.md",
    "transformers.md",
    "triggers.md",
    "tuning.md",
    "validation.md",
]
"""Pages that take some seconds soak."""
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^   \.\. code-block:: python\n\n((?: {6}.*\n|\n)+)", re.MULTILINE)
"""A block in the description of a public name."""


@pytest.fixture
def namespace(spark: SparkSession) -> Iterator[ModuleType]:
    """What a page's blocks share; what they define travels to the workers as from a notebook."""
    module = sys.modules["guide_page"] = ModuleType("guide_page")
    module.spark = spark
    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["guide_page"]


def run_page(page: Path, module: ModuleType) -> None:
    """Run the page's blocks in order; a failure names the page and its line."""
    text = page.read_text()
    linecache.cache[str(page)] = (len(text), None, text.splitlines(keepends=True), str(page))
    for block in sorted([*BLOCK.finditer(text), *EXAMPLE.finditer(text)], key=re.Match.start):
        line = text.count("\n", 0, block.start(1))
        code = textwrap.dedent(block[1])
        try:
            exec(compile("\n" * line + code, str(page), "exec"), vars(module))
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            at = next((f.lineno for f in reversed(frames) if f.filename == str(page)), None)
            at = at or getattr(error, "lineno", None) or line + 1
            pytest.fail(
                f"{page.name}, line {at}: {type(error).__name__}: {error}\n"
                + "".join(traceback.format_exception(error)),
                pytrace=False,
            )


@pytest.mark.parametrize(
    "page", soak_but([COMING, *(page for page in PAGES if page not in LONG)], [*PAGES, *OTHERS])
)
def test_page_runs(
    page: str, namespace: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(GUIDE / page, namespace)


@pytest.mark.soak
def test_the_examples_of_the_reference(
    namespace: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page goes on with what the index has defined."""
    monkeypatch.chdir(tmp_path)
    index = ROOT / "docs" / "api" / "index.md"
    run_page(index, namespace)
    defined = dict(vars(namespace))
    for page in sorted(index.parent.glob("*.md")):
        vars(namespace).update(defined)
        run_page(page, namespace)


def test_the_program_of_the_readme(
    namespace: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = BLOCK.findall(README.read_text())
    assert len([line for line in program.splitlines() if line.strip()]) <= 25
    run_page(README, namespace)
    printed = capsys.readouterr().out
    accuracy = re.match(r"\{'loss': [\d.]+, 'accuracy': ([\d.]+)\}\n", printed)
    assert accuracy, printed
    assert float(accuracy[1]) > 0.95
    assert "prediction" in printed


def test_a_failure_names_page_and_line(namespace: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "broken.md"
    page.write_text("# Title\n\n```python\nx = 1\n```\n\nText.\n\n```python\ny = x\ny / 0\n```\n")
    with pytest.raises(pytest.fail.Exception, match=r"broken\.md, line 11: ZeroDivisionError"):
        run_page(page, namespace)


def test_every_page_is_in_the_index() -> None:
    index = (GUIDE / "index.md").read_text()
    listed = re.findall(r"^- \[[^]]+\]\((\w+\.md)\): .+", index, re.MULTILINE)
    assert sorted(listed) == [page for page in PAGES if page != "index.md"]


def test_every_link_leads_somewhere() -> None:
    for page in (README, *(GUIDE / name for name in PAGES)):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert "://" in link or (page.parent / link).exists(), f"{page}: {link}"
