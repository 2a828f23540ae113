"""The lists of files and ports in ``docs/security.md`` beside what runs write and listen on."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT, launch

pytestmark = [pytest.mark.gang, pytest.mark.spark, pytest.mark.soak]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
PLACES = {"temporary": "temporary directory", "slabs": "slab.dir", "sockets": "socket directory"}
ELSEWHERE = {  # what these runs do not write: Spark Connect, failures, searches, and the like
    *("kept-by-sparkdl-RANDOM/", "tmpRANDOM/", "result-RANDOM/", "piece-N", "PATH.sparkdl-old"),
    *("buffers.safetensors", "buffers-RANDOM.safetensors", "recipe-RANDOM.pkl", "probe-RANDOM"),
    *("search.json", "data.json", "trial-N.json", "model-N.safetensors"),
    *("parameter_server.json", "owner-N-of-N-RANDOM.safetensors"),
    *("model/", "config.yaml", "summary.json", "history.csv", "report.html"),
    # here for a moment
    *("model-RANDOM.json", "model-RANDOM.safetensors", "history-RANDOM.json", "PATH.sparkdl-new"),
    *("_new/", "predictions-are-being-replaced.json", "sparkdl-RANDOM.parquet"),
}


def table_after(heading: str, column: str) -> Iterator[dict[str, str]]:
    """The rows of the tables in a section that have a column, as cells by the name of the column."""
    _, _, section = PAGE.partition(f"\n{heading}\n")
    section = re.split(r"\n#{2,3} ", section)[0]
    names: list[str] = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|"):
            names = []
        elif not names:
            names = cells
        elif column in names and not line.startswith("|---"):
            yield dict(zip(names, cells, strict=True))


def patterns_of(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def matches(patterns: Iterable[str], name: str) -> list[str]:
    """Return the names in a table, with capital letters for what differs, that this one may have."""
    found = []
    for pattern in patterns:
        parts = re.split(r"([A-Z]+)", pattern.rstrip("/"))
        if re.fullmatch("".join(".+" if p.isupper() else re.escape(p) for p in parts), name):
            found.append(pattern)
    return found


NODES = list(table_after("## Know what is written where", "mode"))
PATHS = [
    pattern
    for row in table_after("## Know what is written where", "whoever may write there can")
    for pattern in patterns_of(row["name"])
]


@pytest.fixture(scope="module", name="found")
def what_is_written_and_listens(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Any]]:
    sockets = tempfile.mkdtemp(prefix="s", dir="/tmp")  # paths of sockets are short
    folder = tmp_path_factory.mktemp("written")
    found = launch(Path(__file__).with_name("write_and_listen.py"), folder, sockets=sockets)
    found["files"] = {
        path.replace(sockets, "sockets", 1): mode for path, mode in found["files"].items()
    }
    yield found
    shutil.rmtree(sockets)


@pytest.mark.parametrize("place", PLACES)
def test_what_is_on_the_nodes_is_listed_and_of_this_user_alone(found: Any, place: str) -> None:
    listed = [row for row in NODES if PLACES[place] in row["where"]]
    patterns = [pattern for row in listed for pattern in patterns_of(row["name"])]
    there = {
        tuple(path.split("/")[1:]): mode
        for path, mode in found["files"].items()
        if path.startswith(f"{place}/") and not path.endswith(".sock")  # PySpark's
    }
    assert there
    assert [path for path in there if not matches(patterns, path[0])] == []
    closed = [path for path in there if place == "slabs" or len(path) == 1]
    assert {path: oct(there[path]) for path in closed if there[path] & 0o077} == {}


def test_what_is_at_the_paths_of_users_is_listed(found: Any) -> None:
    names = set()
    for path in found["files"]:
        place, _, *inside = path.split("/")
        if place == "paths" and inside and "metadata" not in inside[:-1]:  # Spark's
            names.add(re.sub(r"^\.(.+?)\.[0-9a-f]{16}\.part(\..*)?$", r"\1\2", inside[-1]))
    names = {name for name in names if not name.endswith(".crc")}  # Hadoop's
    names = {name for name in names if not re.fullmatch(r"\.tmp\w{6}", name)}  # safetensors' part
    assert {name for name in names if not matches(PATHS, name)} == set()
    assert {*PATHS} - {p for name in names for p in matches(PATHS, name)} - ELSEWHERE == set()


def test_nothing_is_written_to_the_working_directory(found: Any) -> None:
    assert [path for path in found["files"] if path.startswith("working/")] == []


def test_the_ports_are_those_that_are_listed(found: Any) -> None:
    listed = {
        f"{process} {protocol}"
        for row in table_after("### A gang", "process")
        for process in patterns_of(row["process"])
        for protocol in patterns_of(row["address"])[:1]
    }
    loopback = "0100007F"
    ports = {" ".join(port.split()[:2]) for port in found["ports"]}
    assert ports == listed == {"driver tcp", "worker tcp"}
    assert {port.split()[2].partition(":")[0] for port in found["ports"]} == {loopback}
    assert found["roles"] == ["daemon", "driver", "worker"]
