"""The distribution: its name, its contents in an empty environment, and what runs with little else."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from fork_server import run_fresh
from launch import ROOT

import sparkdl
from sparkdl import __main__ as report_module
from sparkdl.settings import DISTRIBUTION, __version__

CONFIGURATION = ROOT / "conf/digits.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_distribution_has_a_name_of_its_own() -> None:
    """Extras that include others name them by it; PyPI's sparkdl is another project."""
    assert PROJECT["name"] == DISTRIBUTION
    assert PROJECT["version"] == __version__
    needed = [text for extra in PROJECT["optional-dependencies"].values() for text in extra]
    assert any(text.startswith(f"{DISTRIBUTION}[") for text in needed)
    assert not any(text.startswith("sparkdl[") for text in needed)
    for text in needed:
        for extra in re.findall(rf"{DISTRIBUTION}\[([\w,]+)\]", text):
            assert {*extra.split(",")} <= PROJECT["optional-dependencies"].keys()
    texts = [ROOT / "README.md", ROOT / "Makefile", *ROOT.glob("docs/**/*.md")]
    texts += ROOT.glob("sparkdl/**/*.py")
    for path in texts:
        assert not re.search(r"pip install \S*\bsparkdl(\[|\s|$)", path.read_text()), path


def test_the_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:hunter2@host/x")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.sparkdl.timeout.seconds 60\nspark.hadoop.fs.s3a.secret.key hunter2\n"
        "spark.python.daemon.module=sparkdl.daemon\n"
    )
    (tmp_path / "sparkdl-1.6.0.dist-info").mkdir()
    (tmp_path / "sparkdl-1.6.0.dist-info" / "METADATA").write_text(
        "Name: sparkdl\nVersion: 1.6.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    report_module.main([])
    told = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in told.splitlines()]
    assert lines[0] == f"sparkdl {__version__}"
    for line in (
        f"installed at {ROOT / 'sparkdl'}",
        "WARNING the distribution sparkdl 1.6.0 is another project's and has the same import name: "
        f"uninstall it (pip uninstall sparkdl) and install {DISTRIBUTION} anew.",
        "spark.sparkdl.timeout.seconds 60",
        "spark.python.daemon.module sparkdl.daemon",
        "MLFLOW_TRACKING_URI https://(redacted)@host/x",
    ):
        assert line in lines
    assert "hunter2" not in told
    assert any(line.startswith("Java openjdk version") for line in lines)
    assert any(line.startswith("torch CUDA ") for line in lines)


PROGRAM = """
import sparkdl, torch
from functools import partial
from torch import nn
assert all(hasattr(sparkdl, name) for name in sparkdl.__all__)
spark = sparkdl.session("local[1]", **{"spark.ui.enabled": "false"})
data = spark.range(8).selectExpr("array(float(id)) AS features", "array(float(id)) AS label")
trainer = sparkdl.Trainer(
    model=partial(nn.Linear, 1, 1), loss=nn.MSELoss(), optimizer=torch.optim.SGD,
    replicas=1, stop=sparkdl.max_iteration(2),
)
print(sparkdl.__file__, len(trainer.fit(data).history))
"""


@pytest.mark.soak
@pytest.mark.slow
def test_wheel_and_sdist_in_an_empty_environment(tmp_path: Path) -> None:
    """The wheel and one built from the sdist are alike; it trains where nothing else of ours is."""
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    assert wheel.name == f"sparkdl_torch-{__version__}-py3-none-any.whl"
    names = {*zipfile.ZipFile(wheel).namelist()}
    assert {"sparkdl/__init__.py", "sparkdl/py.typed", "sparkdl/conf/digits.yaml"} <= names
    assert {name.split("/")[0] for name in names} == {
        "sparkdl",
        f"sparkdl_torch-{__version__}.dist-info",
    }
    metadata = zipfile.ZipFile(wheel).read(f"sparkdl_torch-{__version__}.dist-info/METADATA")
    assert not re.search(r"\]\((?!https?:|#)", metadata.decode())  # no file is beside it
    with tarfile.open(sdist) as archive:
        assert not [name for name in archive.getnames() if "/tests/" in name]
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    subprocess.run(
        [*build[:-2], "-t", "wheel", "-d", str(tmp_path / "again")], cwd=unpacked, check=True
    )
    (again,) = (tmp_path / "again").glob("*.whl")
    assert {*zipfile.ZipFile(again).namelist()} == names

    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    subprocess.run([*install, "--no-index", wheel], check=True)
    (site,) = (tmp_path / "env" / "lib").glob("*/site-packages")
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")  # torch, pyspark, ...
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYSPARK_PYTHON")}
    environment["PYSPARK_PYTHON"] = str(python)
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    told = subprocess.run([python, "-m", "sparkdl"], check=True, **run).stdout
    assert str(site / "sparkdl") in told
    done = subprocess.run([python, "-c", PROGRAM], timeout=280, **run)
    assert done.stdout == f"{site / 'sparkdl' / '__init__.py'} 2\n", done.stderr
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "empty").mkdir()
    (tmp_path / "example.py").write_text(example)
    run["cwd"] = tmp_path / "empty"
    done = subprocess.run([python, tmp_path / "example.py"], timeout=280, **run)
    assert done.stdout.startswith("{'loss': "), done.stderr
    subprocess.run([python.with_name("sparkdl"), "conf"], check=True, **run)
    assert (tmp_path / "empty/conf/digits.yaml").read_bytes() == CONFIGURATION.read_bytes()


def test_the_import_brings_no_library() -> None:
    """Torch, Spark and pandas wait for the first use: a mistake in a job's file is told before."""
    text = """
import sys, sparkdl
assert not {"torch", "pyspark", "pyspark.sql", "pandas", "pyarrow"} & sys.modules.keys()
assert callable(sparkdl.session) and sparkdl.__version__
assert set(sparkdl.__all__) <= set(dir(sparkdl))
"""
    subprocess.run([sys.executable, "-c", text], cwd=ROOT, check=True)


def test_type_checkers_see_the_public_names() -> None:
    """And take each from the module where it is found."""
    imports = ast.parse(Path(sparkdl.__file__).read_text())
    seen = {
        alias.asname: node.module
        for node in ast.walk(imports)
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }
    assert {*sparkdl.__all__} == seen.keys() - {"__version__"}
    assert sparkdl._MODULE_OF.items() <= seen.items()


def test_every_public_name_is_imported_when_it_is_used() -> None:
    text = """
import sparkdl
from sparkdl import *
assert tune.search and predict and fit_groups and not hasattr(sparkdl, "nothing")
"""
    done = run_fresh(text, cwd=ROOT)
    assert done.returncode == 0, done.stderr


LACKS = ("yaml", "sklearn", "torchmetrics", "PIL", "bokeh", "tensorboard", "mlflow", "torchvision")
COLLECT = f"""
import sys
for name in {LACKS}:
    sys.modules[name] = None
import pytest
status = pytest.main(["-q", "-m", "gpu", "--collect-only", "-p", "no:cacheprovider", "tests"])
sys.path.insert(0, "benchmarks")
import smoke_on_gpu, gpu
sys.exit(status)
"""


@pytest.mark.soak
def test_tests_for_gpus_are_found_without_other_libraries():
    """A machine with a GPU may have only Python, torch, numpy, pandas, pytest, hypothesis, safetensors,
    and what Spark needs."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = {line.partition(":")[0] for line in done.stdout.splitlines()}
    assert found >= {"tests/spark/test_on_gpu.py", "tests/gang/test_gang_on_gpu.py"}
