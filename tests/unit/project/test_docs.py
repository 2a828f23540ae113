"""The pages in docs/ and beside it: links lead somewhere, and what they name is in the code."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import sparkdl

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
NOTE = re.compile(r"\[Note: ([^]]+)\]")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
ARCHITECTURE = ROOT / "docs" / "architecture.md"
INDEX = ROOT / "docs" / "internals" / "index.md"


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name: str) -> None:
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name}: {link}"
        assert not anchor or anchor in anchors(target), f"{name}: {link}"


@pytest.mark.parametrize(
    "page", [ARCHITECTURE, INDEX, *sorted(INDEX.parent.glob("*-*.md"))], ids=lambda p: p.name
)
def test_every_file_that_is_named_exists(page: Path) -> None:
    """A path is below sparkdl/; one without a folder is beside a file of the same row."""
    files = {path.name for path in ROOT.glob("sparkdl/**/*.py")}
    for path in re.findall(r"`([\w/]+\.py)`", prose(page)):
        known = (ROOT / "sparkdl" / path).exists() if "/" in path else path in files
        assert known, f"{page.name}: {path}"


def test_every_field_of_a_trainer_is_in_its_reference() -> None:
    cells = re.findall(r"^\| (`.+?) \|", (ROOT / "docs/trainer.md").read_text(), re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    fields = {field.name for field in dataclasses.fields(sparkdl.Trainer)}
    arguments = {*inspect.signature(sparkdl.Trainer.fit).parameters} - {"self"}
    assert named == {name for name in fields if name[0] != "_"} | arguments


def test_every_function_on_the_path_of_an_iteration_exists() -> None:
    code = "\n".join(path.read_text() for path in ROOT.glob("sparkdl/**/*.py"))
    defined = set(re.findall(r"^ *(?:class|def) (\w+)", code, re.MULTILINE))
    steps = re.findall(r"^\| \d \| ([^|]+) \|", ARCHITECTURE.read_text(), re.MULTILINE)
    assert len(steps) > 30
    for step in steps:
        for name in re.findall(r"`([A-Za-z_.]+)`", step):
            assert set(name.split(".")) <= {*defined, "clip_norm"}, name


def test_contributing_names_files_that_exist() -> None:
    for path in re.findall(r"`([\w/]+/[\w.]+\.py)`", prose(ROOT / "CONTRIBUTING.md")):
        if "NAME" not in path:
            assert (ROOT / "sparkdl" / path).exists() or (ROOT / path).exists(), path


def test_every_note_is_in_the_index() -> None:
    """Beside the file in whose docstring it begins a paragraph."""
    notes: dict[str, str] = {}
    named: set[str] = set()
    for path in ROOT.glob("sparkdl/**/*.py"):
        text = path.read_text()
        named |= set(NOTE.findall(" ".join(text.split())))
        for title in re.findall(r"\n\n *\[Note: ([^]]+)\]", text):
            notes[title] = str(path.relative_to(ROOT / "sparkdl"))
    assert named == set(notes)
    rows = re.findall(r"^\| ([^|`]+) \| `([\w/]+\.py)` \|$", INDEX.read_text(), re.MULTILINE)
    assert {re.sub(r" \(.*\)", "", title): path for title, path in rows} == notes
    for page in PAGES:
        assert set(NOTE.findall(" ".join(prose(page).split()))) <= {*notes, "..."}, page.name
