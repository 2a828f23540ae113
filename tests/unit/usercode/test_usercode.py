"""What another process makes of a value with modules of the user's behind it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import re
import site
import subprocess
import sys
import tomllib
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fork_server
import pytest
from pyspark import cloudpickle

from sparkdl.usercode import accompanied

WORKER = """
import json, pickle, sys
for line in sys.stdin:
    try:
        said = pickle.loads(bytes.fromhex(line))()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps(said), flush=True)
"""


class Worker:
    """A process that lives, and calls what it is sent."""

    def __init__(self, folder: Path) -> None:
        own = str(Path(__file__).resolve().parents[3])
        self._process = subprocess.Popen(
            [fork_server.fresh(), "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": own},
        )

    def says(self, value: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        data = cloudpickle.dumps(accompanied(value))
        assert pickle.loads(data)  # here it is itself
        print(data.hex(), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with contextlib.closing(Worker(tmp_path_factory.mktemp("worker"))) as found:
        yield found


class Folder:
    """Modules of a user's in a folder that only this process has on its path."""

    def __init__(self, path: Path) -> None:
        self.path, self._edits = path, 0

    def write(self, name: str, text: str) -> None:
        """Later than before, as Python's own cache looks at seconds."""
        file = self.path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        self._edits += 10
        os.utime(file, (1e9 + self._edits, 1e9 + self._edits))

    def load(self, name: str, text: str) -> types.ModuleType:
        self.write(f"{name}.py", text)
        return importlib.import_module(name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield Folder(tmp_path)
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


SAYS = "def says():\n    return {}\n"
CLASS = "class Says:\n    width = {}\n    def __call__(self):\n        return self.width\n"


def test_a_module_beside_the_script_is_found_where_the_disk_is_the_same(
    worker: Worker, folder: Folder
) -> None:
    assert worker.says(folder.load("uc_beside", SAYS.format(1)).says) == 1
    folder.write("uc_pack/__init__.py", "")
    folder.write("uc_pack/inner.py", SAYS.format(2))
    assert worker.says(importlib.import_module("uc_pack.inner").says) == 2


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("function", SAYS),
        ("constant", "WIDTH = {}\ndef says():\n    return WIDTH\n"),
        ("class", CLASS),
        ("table", "TABLE = [int({}) for _ in range(3)]\ndef says():\n    return TABLE[0]\n"),
    ],
)
def test_what_was_edited_and_reloaded_is_new_in_a_process_that_lives(
    name: str, code: str, worker: Worker, folder: Folder
) -> None:
    module = folder.load(f"uc_edited_{name}", code.format(1))

    def value() -> Callable[[], int]:
        return module.says if hasattr(module, "says") else module.Says()

    assert worker.says(value()) == 1
    folder.write(f"uc_edited_{name}.py", code.format(2))
    importlib.reload(module)
    assert worker.says(value()) == 2


def test_so_is_a_module_that_another_one_imports(worker: Worker, folder: Folder) -> None:
    helper = folder.load("uc_helper", SAYS.format(1))
    user = folder.load("uc_user", "import uc_helper\ndef says():\n    return uc_helper.says()\n")
    assert worker.says(user.says) == 1
    assert worker.says(lambda: helper.says() + 10) == 11  # by value, with a name in it
    folder.write("uc_helper.py", SAYS.format(2))
    importlib.reload(helper)
    assert worker.says(user.says) == 2
    assert worker.says(lambda: helper.says() + 10) == 12


def test_so_is_one_that_a_function_imports(worker: Worker, folder: Folder) -> None:
    module = folder.load("uc_lazy", SAYS.format(1))

    def says() -> int:
        import uc_lazy  # type: ignore[import-not-found]

        return uc_lazy.says()

    worker.says(module.says)
    folder.write("uc_lazy.py", SAYS.format(2))
    importlib.reload(module)
    assert worker.says(says) == 2


def test_edited_and_not_reloaded_is_told_where_it_is_not_loaded(
    worker: Worker, folder: Folder, tmp_path: Path
) -> None:
    module = folder.load("uc_unsaved", SAYS.format(1))
    folder.write("uc_unsaved.py", "# a comment is nothing\n\n" + SAYS.format(1))
    assert worker.says(module.says) == 1
    folder.write("uc_unsaved.py", SAYS.format(2))
    assert worker.says(module.says) == 1  # as here: a fit goes on while its code is edited
    with contextlib.closing(Worker(tmp_path)) as new:
        said = new.says(module.says)
    assert said.startswith(
        'ModelError: the executors have other code for "uc_unsaved" than this process: says differs'
    )
    importlib.reload(module)
    assert worker.says(module.says) == 2


def test_a_definition_that_was_chosen_by_an_if_is_not(
    worker: Worker, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os\nif 'UC_HERE' in os.environ:\n    def says():\n        return 1\n"
    code += "else:\n    def says():\n        return 2\n"
    monkeypatch.setenv("UC_HERE", "1")
    module = folder.load("uc_chosen", code)
    assert module.says() == 1
    assert worker.says(module.says) == 2


def test_a_module_that_is_missing_is_told(worker: Worker, folder: Folder) -> None:
    alone = folder.load("uc_missing", SAYS.format(1))
    folder.write("uc_gone/__init__.py", "")
    folder.write("uc_gone/inner.py", SAYS.format(1))
    inner = importlib.import_module("uc_gone.inner")
    needing = folder.load("uc_needing", "import uc_missing\n" + SAYS.format(1))
    (folder.path / "uc_missing.py").unlink()
    (folder.path / "uc_gone").rename(folder.path / "elsewhere")
    path = folder.path
    assert worker.says(alone.says) == (
        f'ModelError: the executors cannot import "uc_missing", which is {path}/uc_missing.py at the '
        f'driver. Ship it: spark.sparkContext.addPyFile("{path}/uc_missing.py"), or spark-submit '
        f"--py-files {path}/uc_missing.py, or with Spark Connect "
        f'spark.addArtifacts("{path}/uc_missing.py", pyfile=True); see docs/guide/packaging.md.'
    )
    assert 'addPyFile("uc_gone.zip")' in worker.says(inner.says)
    assert worker.says(needing.says).startswith(
        'ModelError: the executors cannot import "uc_needing": it needs "uc_missing", which they do '
        "not have. Install it there, or ship it"
    )


def test_libraries_and_what_travels_by_value_are_left_alone(folder: Folder) -> None:
    from sparkdl.usercode.travel import modules_behind

    module = folder.load("uc_by_value", SAYS.format(1))
    assert set(modules_behind([module.says, pytest.raises, os.path.join, accompanied])) == {
        "uc_by_value"
    }
    cloudpickle.register_pickle_by_value(module)
    try:
        assert not modules_behind([module.says])
    finally:
        cloudpickle.unregister_pickle_by_value(module)


RECORDS = {
    "pip install --target, on PYTHONPATH": (
        "packages",
        "{0}/__init__.py,,\n{0}/inner.py,,\n",
        True,
    ),
    "a .pth over preinstalled packages": ("preinstalled", "{0}/inner.py,sha256=x,9\n", True),
    "an archive of packages": ("packages.zip", "{0}/__init__.py,,\n", True),
    "the user's site": ("lib/python3.11/site-packages", None, True),
    "Debian's": ("python3/dist-packages", None, True),
    "a checkout on the path": ("checkout", None, False),
    "a checkout beside installed packages": ("packages", "other/__init__.py,,\n", False),
    "an editable install": ("source", "__editable__.{0}.pth,,\n", False),
}


@pytest.mark.parametrize("name", RECORDS)
def test_what_is_installed_anywhere_is_never_the_users(name: str, folder: Folder) -> None:
    from sparkdl.jobs.building import ship
    from sparkdl.usercode.travel import is_library, modules_behind

    place, record, installed = RECORDS[name]
    package = f"uc_record_{list(RECORDS).index(name)}"
    files = {f"{package}/__init__.py": "", f"{package}/inner.py": SAYS.format(1)}
    if record is not None:
        files[f"{package}-1.0.dist-info/METADATA"] = f"Name: {package}\nVersion: 1.0\n"
        files[f"{package}-1.0.dist-info/RECORD"] = record.format(package)
    path = folder.path / place
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for file, text in files.items():
                archive.writestr(file, text)
    else:
        for file, text in files.items():
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_text(text)
    (folder.path / "named.pth").write_text(f"{path}\n")
    site.addsitedir(str(folder.path))
    try:
        module = importlib.import_module(f"{package}.inner")
        assert is_library(module.__name__) == installed
        assert bool(modules_behind([module.says])) == (not installed)
        ship(module.says)
        assert (package in cloudpickle.list_registry_pickle_by_value()) == (not installed)
        assert cloudpickle.loads(cloudpickle.dumps(module.says))() == 1
    finally:
        if package in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.unregister_pickle_by_value(sys.modules[package])
        sys.path.remove(str(path))


def test_what_sparkdl_requires_is_never_the_users() -> None:
    from sparkdl.usercode.travel import is_library

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    required = [re.match(r"[\w-]+", line)[0] for line in project["dependencies"]]  # type: ignore[index]
    assert [name for name in ["sparkdl", *required] if not is_library(name)] == []
