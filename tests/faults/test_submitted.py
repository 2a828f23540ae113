"""Scripts sent with spark-submit to a standalone cluster whose Python has no sparkdl."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import secured
import submitted as script
from harness.cluster import PATIENT, SPARK_HOME, Standalone
from harness.processes import wait_until
from launch import NO_CONFIGURATION, QUIET, ROOT, SHORT_LIVES, answer_in, run_to_end, soak_but

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]
DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "2",
    "spark.executor.cores": "1",
}


@dataclass(frozen=True)
class Way:
    """A way to submit: what brings sparkdl to the executors, and the settings of the session.

    ``disturbed``: a worker of two is killed, and another one comes; else there is one, of two cores.
    """

    ships: str = ""
    settings: Mapping[str, str] = field(default_factory=lambda: {"spark.cores.max": "2"})
    secured: bool = False
    disturbed: bool = True


WAYS = {
    "undisturbed": Way("zip", disturbed=False),
    "zip": Way("zip"),
    "archive": Way("archive"),
    "secured": Way("zip", secured=True),
    "dynamic": Way("zip", DYNAMIC),
    "archive, secured, dynamic": Way("archive", DYNAMIC, secured=True),
}


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what docs/guide/packaging.md makes: an environment that lacks sparkdl, a zip of
    sparkdl, and an archive of the environment with sparkdl in it.

    The packages are where the environment's .pth names them, outside of any site-packages.
    """
    folder = tmp_path_factory.mktemp("shipped")
    libraries = [path for path in sys.path if Path(path).name == "site-packages"]
    for name in ("env", "full"):
        venv.create(folder / name, symlinks=True)
        (own,) = (folder / name).glob("lib/python*/site-packages")
        for number, path in enumerate(libraries):
            (folder / f"packages-{number}").unlink(missing_ok=True)
            (folder / f"packages-{number}").symlink_to(path)
        names = [f"{folder / f'packages-{number}'}\n" for number in range(len(libraries))]
        (own / "libraries.pth").write_text("".join(names))
    shutil.copytree(ROOT / "sparkdl", own / "sparkdl", ignore=shutil.ignore_patterns("__pycache__"))
    with tarfile.open(folder / "environment.tar.gz", "w:gz", compresslevel=1) as archive:
        archive.add(folder / "full", ".")
    with zipfile.ZipFile(folder / "sparkdl.zip", "w") as archive:
        for path in sorted((ROOT / "sparkdl").rglob("*.py")):
            archive.write(path, path.relative_to(ROOT))
    return folder


def submit(
    shipped: Path,
    folder: Path,
    master: str,
    way: Way,
    program: Path,
    *arguments: str,
    mode: str = "client",
) -> tuple[int, str]:
    """The exit status of ``spark-submit`` and what it printed."""
    folder.mkdir(exist_ok=True)
    options, python = [], str(shipped / "env/bin/python")
    driver, settings = python, {**QUIET, **PATIENT, **way.settings}
    settings["spark.sparkdl.slab.dir"] = "slabs"
    if way.ships == "zip":
        options += ["--py-files", str(shipped / "sparkdl.zip")]
        settings["spark.executorEnv.PYTHONPATH"] = "sparkdl.zip"
    elif way.ships == "archive":
        options += ["--archives", f"{shipped / 'environment.tar.gz'}#environment"]
        driver, python = str(shipped / "full/bin/python"), "./environment/bin/python"
    if way.secured:
        settings |= secured.SETTINGS
    file = folder / "spark.properties"
    file.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    environment = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        **{"SPARK_HOME": str(SPARK_HOME), "SPARK_CONF_DIR": NO_CONFIGURATION},
        **{"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": driver},
        **{"SPARK_LOCAL_DIRS": str(folder / "local"), "SPARK_SUBMIT_OPTS": SHORT_LIVES},
    }
    command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", master, "--deploy-mode", mode]
    command += ["--properties-file", str(file), *options, str(program), *arguments]
    status, output = run_to_end(command, folder, environment, 400)
    (folder / "output").write_text(output)
    return status, output


def cluster(folder: Path, way: Way) -> Standalone:
    """Two task slots; nothing in the environment of the workers names sparkdl or a Python."""
    workers = 2 if way.disturbed else 1
    settings = secured.SETTINGS if way.secured else {}
    nothing = {"PYTHONPATH": "", "PYSPARK_PYTHON": "", "SPARK_CONF_DIR": NO_CONFIGURATION}
    return Standalone(
        workers, 2 // workers, folder / "cluster", settings=settings, environment=nothing
    )


@pytest.mark.parametrize("name", soak_but([], WAYS))
def test_the_bits_are_those_of_local_mode(name: str, shipped: Path, tmp_path: Path, spark) -> None:
    go, steps, way = tmp_path / "go", tmp_path / "steps", WAYS[name]
    go.touch()
    expected = script.outcome(spark, [script.Steps(tmp_path)])
    steps.unlink()
    if way.disturbed:
        go.unlink()
    with cluster(tmp_path, way) as running, ThreadPoolExecutor(1) as pool:
        ended = pool.submit(
            *(submit, shipped, tmp_path / "driver", running.url, way),
            *(Path(script.__file__), str(tmp_path)),
        )

        def wait(happens: Callable[[], object], what: str) -> None:
            wait_until(lambda: happens() or ended.done(), 300, what)
            assert not ended.done(), ended.result()[1][-4000:]

        if way.disturbed:
            wait(lambda: steps.exists() and steps.read_text().count("\n") >= 6, "six iterations")
            running.running[0].kill()
            another = running.add_worker()
            wait(another.executors, "an executor of the new worker")
            go.touch()
        status, output = ended.result()
    assert status == 0, output[-4000:]
    result = answer_in(output)
    ending = {"zip": "sparkdl.zip/sparkdl/__init__.py"}.get(
        way.ships, "site-packages/sparkdl/__init__.py"
    )
    assert result.pop("file").endswith(ending)
    assert result == expected
    assert ("Lost executor" in output) == way.disturbed


@pytest.mark.soak
def test_a_job_of_a_checkout_that_executors_lack_reads_no_data(
    shipped: Path, tmp_path: Path
) -> None:
    """The packages that the driver has elsewhere are none of what the job sends along."""
    config = "--config", str(ROOT / "conf/digits.yaml"), "--data.prepare=null"
    config += (f"--data.train={tmp_path}/none.parquet",)
    way = Way(disturbed=False)
    with cluster(tmp_path, way) as running:
        status, output = submit(
            shipped, tmp_path / "driver", running.url, way, ROOT / "jobs/train.py", *config
        )
    assert status == 2, output[-4000:]
    assert output.strip().splitlines()[-1] == (
        f'error: the Python of the executors ("{shipped}/env/bin/python") has no sparkdl, which the '
        f"driver imports from {ROOT}/sparkdl: install it there, or ship it with spark-submit "
        "--py-files or --archives, as docs/guide/packaging.md says."
    )


@pytest.mark.soak
def test_a_job_trains_where_packages_are_elsewhere(shipped: Path, tmp_path: Path) -> None:
    config = "--config", str(ROOT / "conf/digits.yaml"), "--trainer.epochs=1"
    way = WAYS["undisturbed"]
    with cluster(tmp_path, way) as running:
        status, output = submit(
            shipped, tmp_path / "driver", running.url, way, ROOT / "jobs/train.py", *config
        )
    assert status == 0, output[-4000:]
    assert "test accuracy" in output


@pytest.mark.soak
def test_a_standalone_master_runs_no_python_driver(shipped: Path, tmp_path: Path) -> None:
    """Spark's own sentence, for which no master need be there."""
    status, output = submit(
        shipped, tmp_path, "spark://127.0.0.1:1", WAYS["zip"], Path(script.__file__), mode="cluster"
    )
    assert status == 1
    assert (
        "Cluster deploy mode is currently not supported for python applications on standalone "
        "clusters." in output
    )
