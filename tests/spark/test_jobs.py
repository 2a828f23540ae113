"""The jobs as a user starts them: spark-submit and python, in an empty directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "conf/digits.yaml"


@dataclass(frozen=True)
class Done:
    """What a job left: its exit status and its console, without the JVM's own line."""

    status: int
    out: str
    err: str


def job(name: str, *arguments: object, cwd: Path, submit: bool = False) -> Done:
    """Run ``jobs/<name>.py`` in ``cwd``, with nothing of ours in the environment."""
    start = [sys.executable]
    if submit:
        start = [str(Path(sys.executable).with_name("spark-submit")), "--master", "local[1]"]
    environment = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SPARK_", "PYSPARK_", "PYTHONPATH"))
    }
    environment["SPARK_LOCAL_IP"] = "127.0.0.1"
    done = subprocess.run(
        [*start, str(ROOT / f"jobs/{name}.py"), *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    err = [line for line in done.stderr.splitlines() if "incubator" not in line]
    return Done(done.returncode, done.stdout, "\n".join(err))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def trained(work: Path) -> Path:
    """A run folder of a short training, started with spark-submit."""
    done = job(
        "train", "--config", CONFIG, "--set", "training.epochs=4", "--set", "model.width=8",
        "--set", "optimizer.lr=3e-3", "--set", "schedule=null", "--set", "name=short",
        "--set", "spark.settings.spark.test.password=hunter2",
        cwd=work, submit=True,
    )  # fmt: skip
    assert done.status == 0, done.err
    assert done.err == ""
    lines = done.out.splitlines()
    assert lines[0] == "short: 1,437 samples, batches of 64, 92 iterations on local[1]"
    assert lines[1].startswith("epoch   1/4   loss ")
    table = {line.rsplit("   ", 1)[0].strip() for line in lines[6:-2]}
    assert table == {
        "samples", "parameters", "epochs", "iterations", "seconds", "samples/s",
        "train loss", "test loss", "test accuracy",
    }  # fmt: skip
    return work / lines[-1]


def test_the_run_folder(trained: Path, work: Path) -> None:
    assert trained.parent == work / "runs"
    files = sorted(str(p.relative_to(trained)) for p in trained.rglob("*") if p.is_file())
    assert [f for f in files if f != "evaluation.json"] == [
        "config.yaml", "history.json", "loss.png", "model/history.json", "model/model.json",
        "model/model.safetensors", "summary.json",
    ]  # fmt: skip
    history = json.loads((trained / "history.json").read_text())
    assert len(history["iterations"]) == 92
    assert len(history["epochs"]) == 4
    recipe = json.loads((trained / "model/model.json").read_text())["recipe"]
    assert recipe["kind"] == "name"
    assert recipe["name"] == "jobs.models:digits_convnet"
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["iterations"] == 92
    assert summary["test accuracy"] > 0.8


def test_the_resolved_configuration(trained: Path) -> None:
    text = (trained / "config.yaml").read_text()
    assert "hunter2" not in text
    config = yaml.safe_load(text)
    assert config["training"]["epochs"] == 4
    assert config["training"]["engine"] == "shuffle"
    assert config["model"]["width"] == 8
    assert config["schedule"] is None
    assert config["spark"]["settings"]["spark.test.password"] == "[redacted]"


def test_the_loss_curve_is_an_image(trained: Path) -> None:
    from matplotlib import image

    pixels = image.imread(trained / "loss.png")
    assert pixels.shape == (540, 960, 4)
    assert pixels.std() > 0.01


def test_evaluate(trained: Path, work: Path) -> None:
    done = job("evaluate", "--model", trained, "--data", "data/digits/test.parquet", cwd=work)
    assert (done.status, done.err) == (0, "")
    content = json.loads((trained / "evaluation.json").read_text())
    summary = json.loads((trained / "summary.json").read_text())
    assert content["samples"] == 360
    assert content["accuracy"] == pytest.approx(summary["test accuracy"])
    assert content["loss"] == pytest.approx(summary["test loss"])
    lines = done.out.splitlines()
    assert lines[0] == "samples    360"
    assert lines[2] == f"accuracy   {content['accuracy']:.4g}"
    assert lines[-1] == str(trained / "evaluation.json")


def test_predict(trained: Path, work: Path) -> None:
    arguments = [
        "--model", trained / "model", "--data", "data/digits/test.parquet", "--output", "predicted",
        "--argmax",
    ]  # fmt: skip
    done = job("predict", *arguments, cwd=work, submit=True)
    assert (done.status, done.err) == (0, "")
    table = parquet.read_table(work / "predicted")
    right = sum(a == b for a, b in zip(*(table[c] for c in ("label", "prediction")), strict=True))
    assert table.num_rows == 360
    assert right / 360 > 0.8
    lines = done.out.splitlines()
    assert lines[0] == "360 rows with the column prediction; the first of them:"
    assert "|label|prediction|" in lines
    assert lines[-1] == "predicted"

    again = job("predict", *arguments, cwd=work)
    assert again.status == 2
    assert again.out == ""
    assert again.err.startswith("error: ")
    assert "already exists" in again.err
    assert "Traceback" not in again.err


def test_other_formats_and_models_of_a_file(work: Path) -> None:
    (work / "mine").mkdir()
    (work / "mine/line.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def net() -> nn.Module:\n"
        "    return nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 1), nn.Flatten(0))\n"
        "def loss(output, target):\n"
        "    return (output - target).abs().mean()\n"
    )
    rows = "".join(f"{i / 50},{2 * i / 50 + 1}\n" for i in range(100))
    (work / "line.csv").write_text("x,y\n" + rows)
    (work / "line.yaml").write_text(
        "data: {train: line.csv, format: csv, features: x, label: y}\n"
        "model: mine/line.py:net\n"
        "loss: mine/line.py:loss\n"
        "optimizer: {use: torch.optim:SGD, lr: 0.1}\n"
        "training: {epochs: 2, batch_size: 50}\n"
    )
    done = job("train", "--config", "line.yaml", cwd=work)
    assert (done.status, done.err) == (0, "")
    folder = done.out.splitlines()[-1]
    assert json.loads((work / folder / "model/model.json").read_text())["recipe"]["name"] == (
        "mine.line:net"
    )
    evaluate = ["--model", folder, "--data", "line.csv", "--format", "csv"]
    refused = job("evaluate", *evaluate, cwd=work)
    assert (refused.status, refused.out) == (2, "")
    assert refused.err == (
        f'error: {folder}/config.yaml names the loss "mine/line.py:loss", which is not of '
        "torch.nn. Pass --loss mine/line.py:loss if that is yours, or --trust if you trust the "
        "folder."
    )
    done = job("evaluate", *evaluate, "--loss", "mine/line.py:loss", "--metrics", "mae", cwd=work)
    assert (done.status, done.err) == (0, "")
    content = json.loads((work / folder / "evaluation.json").read_text())
    assert content["loss"] == pytest.approx(content["mae"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["training.epoch=3"],
            f'{CONFIG}: unknown key "training.epoch". Did you mean "training.epochs"? Known here: '
            "epochs, max_iterations, batch_size, replicas, slices, engine, seed.",
        ),
        (
            ["model=jobs.models:digits_convnett", "training.epochs=0"],
            '2 problems:\n  - model: "jobs.models" has no "digits_convnett". Did you mean '
            '"digits_convnet"?\n  - training.epochs=0: give a whole number of at least 1.',
        ),
        (["data.prepare=null", "data.train=none.parquet"], None),
    ],
    ids=["key", "name", "path"],
)
def test_mistakes(tmp_path: Path, changes: list[str], message: str | None) -> None:
    arguments = [part for change in changes for part in ("--set", change)]
    done = job("train", "--config", CONFIG, *arguments, cwd=tmp_path)
    message = message or f"Path does not exist: file:{tmp_path}/none.parquet."
    assert (done.status, done.out, done.err) == (2, "", f"error: {message}")


@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_a_mistake_in_a_row_is_told_without_a_stack_trace(
    trained: Path, work: Path, name: str
) -> None:
    table = pa.table({"features": [[0.0] * 64, None], "label": [1, 2]})
    parquet.write_table(table, work / "null.parquet")
    more = ["--output", "never"] if name == "predict" else []
    done = job(name, "--model", trained, "--data", "null.parquet", *more, cwd=work)
    assert (done.status, done.out) == (2, "")
    assert done.err == (
        'error: column "features", row 1 of the partition: is null. '
        'Drop such rows with df.dropna(subset=["features"]), or fill them.'
    )
