"""The jobs as a user starts them: spark-submit and python, in an empty directory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import fork_server
import pyarrow as pa
import pyspark
import pytest
import secured
import yaml
from launch import NO_CONFIGURATION, SHORT_LIVES
from pyarrow import parquet
from pyspark.sql import functions

import sparkdl
from sparkdl.jobs import commands
from sparkdl.jobs.main import main

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "conf/digits.yaml"


@dataclass(frozen=True)
class Done:
    """What a job left: its exit status and its console, without the JVM's own line."""

    status: int
    out: str
    err: str


def job(
    name: str, *arguments: object, cwd: Path, submit: bool = False, interrupt_at: str = ""
) -> Done:
    """Run ``jobs/<name>.py`` in ``cwd``, with nothing of ours in the environment.

    But for the place of this checkout: its workers import it, whichever one is installed; for the
    program that is Python; and without ``submit`` for an empty configuration, with which a JVM starts
    faster. The job is interrupted at the line that begins with ``interrupt_at``.
    """
    python = fork_server.start()
    start = [python]
    if submit:
        start = [str(Path(sys.executable).with_name("spark-submit")), "--master", "local[1]"]
        for which in ("python", "driver.python"):
            start += ["--conf", f"spark.pyspark.{which}={python}"]
    environment = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SPARK_", "PYSPARK_", "PYTHONPATH"))
    }
    environment |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    environment |= {"SPARK_SUBMIT_OPTS": f"{SHORT_LIVES} -Dspark.sparkdl.progress=false"}
    if not submit:
        environment |= {"SPARK_CONF_DIR": NO_CONFIGURATION, "PYSPARK_PYTHON": python}
    environment |= secured.environment()
    process = subprocess.Popen(
        [*start, str(ROOT / f"jobs/{name}.py"), *map(str, arguments)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    before = ""
    if interrupt_at:
        assert process.stdout is not None
        for line in process.stdout:
            before += line
            if line.startswith(interrupt_at):
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
                break
    try:
        out, err = process.communicate(timeout=280)
    finally:
        process.kill()
    lines = [line for line in err.splitlines() if "incubator" not in line]
    return Done(process.returncode, before + out, "\n".join(lines))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def trained(work: Path) -> Path:
    """A run folder of a short training, started with spark-submit."""
    done = job(
        "train", "--config", CONFIG, "--trainer.epochs=2", "--model.width=8",
        "--optimizer.lr=1e-2", "--schedule=null", "--name=short",
        "--checkpoint.every_epochs=1", "--checkpoint.keep=null",
        "--trainer.clip_norm=5", "--trainer.ema=0.9",
        "--summaries.tensorboard=true",
        "--spark.settings.spark.test.password=hunter2",
        cwd=work, submit=True,
    )  # fmt: skip
    assert done.status == 0, done.err
    assert done.err == ""
    lines = done.out.splitlines()
    assert lines[0] == (
        "short: 1,296 samples and 141 to validate on, batches of 64, 42 iterations on local[1]"
    )
    table = [line.rsplit("   ", 1)[0].strip() for line in lines[2:-2]]
    assert table == [
        "samples", "parameters", "epochs", "iterations", "ended by", "seconds", "samples/s",
        "train loss", "validation loss", "validation accuracy", "best epoch", "test loss",
        "test accuracy", "best test loss", "best test accuracy", "ema test loss", "ema test accuracy",
    ]  # fmt: skip
    return work / lines[-1]


def test_the_run_folder(trained: Path, work: Path) -> None:
    assert trained.parent == work / "runs"
    kinds = {str(p.relative_to(trained)) for p in trained.iterdir()} - {"evaluation.json"}
    assert kinds == {
        "best", "checkpoints", "config.yaml", "ema", "history.csv", "history.json",
        "model", "report.html", "summary.json", "tensorboard",
    }  # fmt: skip
    for name in ("model", "best", "ema"):
        found = sorted(path.name for path in (trained / name).iterdir())
        assert found == ["history.json", "model.json", "model.safetensors"]
    history = sparkdl.History.load(trained / "history.json")
    assert len(history) == 42
    assert len(history.epochs()) == 2
    assert [record["epoch"] for record in history.validations] == [1, 2]
    assert sparkdl.History.load(trained / "history.csv").losses == history.losses
    recipe = json.loads((trained / "model/model.json").read_text())["recipe"]
    assert recipe["kind"] == "name"
    assert recipe["name"] == "sparkdl.jobs.digits:convnet"
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["iterations"] == 42
    assert summary["test accuracy"] > 0.6
    scores = [record["metrics"]["accuracy"] for record in history.validations]
    assert summary["best epoch"] == scores.index(max(scores)) + 1
    made = [path.name.split("-")[1] for path in sorted((trained / "checkpoints").iterdir())]
    assert [int(iteration) for iteration in made] == [21, 42]
    assert len(list((trained / "tensorboard").iterdir())) == 1


@pytest.mark.soak
def test_a_broken_run_goes_on(trained: Path, work: Path) -> None:
    """It ends with the bits of the run that was never broken, in another engine too."""
    broken = work / "runs/short-20200101-000000"
    first = min((trained / "checkpoints").iterdir())
    shutil.copytree(first, broken / "checkpoints" / first.name)
    shutil.copy(trained / "config.yaml", broken)
    done = job(
        "train", "--resume", broken, "--trainer.engine=local",
        "--spark.settings.spark.test.password=hunter2",
        cwd=work,
    )  # fmt: skip
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[1].startswith("on from iteration 21: ")
    assert lines[1].endswith(first.name)
    resumed = work / lines[-1]
    assert resumed != broken
    for name in ("model", "best", "ema"):
        weights = [(run / name / "model.safetensors").read_bytes() for run in (trained, resumed)]
        assert weights[0] == weights[1]
    losses = [sparkdl.History.load(run / "history.json").losses for run in (trained, resumed)]
    assert losses[0] == losses[1]


@pytest.mark.soak
def test_a_search(work: Path) -> None:
    """Its run folder has the table, a picture and the best model, which other jobs read."""
    done = job(
        "tune", "--config", CONFIG, "--trainer.epochs=2", "--model.width=4",
        "--tune.trials=3", "--name=few", "--tune.space.model.width=[2, 4]",
        cwd=work,
    )  # fmt: skip
    assert (done.status, done.err) == (0, "")
    folder = work / done.out.splitlines()[-1]
    assert folder.name.startswith("few-tune-")
    kinds = {str(p.relative_to(folder)) for p in folder.iterdir()}
    assert kinds == {
        "best.html", "config.yaml", "history.csv", "history.json", "model", "report.html",
        "summary.json", "trials", "trials.csv",
    }  # fmt: skip
    lines = (folder / "trials.csv").read_text().splitlines()
    assert lines[0].startswith("trial,schedule.max_lr,optimizer.weight_decay,model.dropout,")
    assert len(lines) == 4
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["trials"] == 3
    assert 0 < summary["test accuracy"] <= 1
    assert summary["model.width"] in (2, 4)
    assert len(sparkdl.load(folder / "model").history) == len(
        sparkdl.History.load(folder / "history.json")
    )


def test_what_is_held_out_does_not_depend_on_partitions(spark: SparkSession) -> None:
    data = spark.range(2000).selectExpr("id", "map('a', id) AS extra")
    held = []
    for partitions in (1, 5):
        parts = commands.split(data.repartition(partitions), 0.2, seed=3)
        ids = [{row.id for row in part.select("id").collect()} for part in parts]
        assert ids[0] | ids[1] == set(range(2000))
        assert not ids[0] & ids[1]
        held.append(ids[1])
    assert held[0] == held[1]
    assert 300 < len(held[0]) < 500
    assert {row.id for row in commands.split(data, 0.2, seed=4)[1].collect()} != held[0]


def test_rows_with_maps_anywhere_are_held_out(spark: SparkSession) -> None:
    """Without one, the rows are those that a hash of the seed and all columns says."""
    plain = spark.range(2000).select("id", (functions.col("id") % 7).alias("x.y"))
    chosen = functions.xxhash64(functions.lit(3), functions.col("id"), functions.col("`x.y`"))
    wanted = plain.where(functions.pmod(chosen, functions.lit(1 << 20)) < round(0.2 * (1 << 20)))
    kept, held = commands.split(plain, 0.2, seed=3)
    assert held.schema == kept.schema == plain.schema
    assert set(held.collect()) == set(wanted.collect())
    maps = plain.selectExpr(
        "id", "named_struct('m', map('a', id)) AS s", "array(map(id, 'b'), null) AS a"
    )
    parts = [
        {row.id for row in part.select("id").collect()} for part in commands.split(maps, 0.2, 3)
    ]
    assert parts[0] | parts[1] == set(range(2000))
    assert not parts[0] & parts[1]
    assert 300 < len(parts[1]) < 500


def test_spark_submit_takes_the_python_of_the_environment() -> None:
    lines = (Path(pyspark.__file__).parent / "conf/spark-defaults.conf").read_text().splitlines()
    (found,) = [line.split()[1] for line in lines if line.startswith("spark.pyspark.python ")]
    assert Path(found).parent.resolve() == Path(sys.executable).parent.resolve()


def test_the_resolved_configuration(trained: Path) -> None:
    text = (trained / "config.yaml").read_text()
    assert "hunter2" not in text
    config = yaml.safe_load(text)
    assert config["trainer"]["epochs"] == 2
    assert config["trainer"]["engine"] == "shuffle"
    assert config["model"]["init_args"] == {"width": 8, "dropout": 0.5}
    assert config["schedule"] is None
    assert config["spark"]["settings"]["spark.test.password"] == "(redacted)"


def test_the_report(trained: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (trained / "report.html").read_text()
    assert f"sparkdl.load(&#x27;{trained / 'model'}&#x27;)" in page
    for text in ("validation accuracy", "features", "local[", "shuffle: an iteration"):
        assert text in page
    for arguments, path in (([], "report.html"), ([trained / "model"], "comparison.html")):
        with pytest.raises(SystemExit):
            main(["report", str(trained), *map(str, arguments), "--output", str(work / path)])
        told = capsys.readouterr().out
        assert told.endswith(f"{work / path}\n")
        assert "samples a second" in (work / path).read_text()


@pytest.mark.soak
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


@pytest.fixture
def run_here(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Runs a job in this process, in the session of the tests."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(commands, "session", lambda *_, **__: contextlib.nullcontext(spark))
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, arguments)))
        said = capsys.readouterr()
        return Done(ended.value.code, said.out, said.err)

    return run


def test_predict(trained: Path, work: Path, run_here: Callable[..., Done]) -> None:
    arguments = [
        "--model", trained / "model", "--data", work / "data/digits/test.parquet",
        "--output", work / "predicted", "--argmax",
    ]  # fmt: skip
    done = run_here("predict", *arguments)
    assert (done.status, done.err) == (0, "")
    table = parquet.read_table(work / "predicted")
    right = sum(a == b for a, b in zip(*(table[c] for c in ("label", "prediction")), strict=True))
    assert table.num_rows == 360
    assert right / 360 > 0.6
    lines = done.out.splitlines()
    assert lines[0] == "360 rows with the column prediction; the first of them:"
    assert "|label|prediction|" in lines
    assert lines[-1] == str(work / "predicted")

    before = (work / "data/digits/test.parquet").read_bytes()
    onto = ["--output", work / "data/digits", "--overwrite"]
    refused = run_here("predict", *arguments[:4], *onto)
    assert (refused.status, refused.out) == (2, "")
    assert refused.err.startswith("error: --overwrite would delete ")
    assert (work / "data/digits/test.parquet").read_bytes() == before

    again = run_here("predict", *arguments)
    assert (again.status, again.out) == (2, "")
    assert 'already exists. Set mode as "overwrite" to overwrite' in again.err

    selected = shutil.copytree(trained, work / "selected")
    config = yaml.safe_load((trained / "config.yaml").read_text())
    config["data"]["select"] = ["array(x) AS features"]
    (selected / "config.yaml").write_text(yaml.safe_dump(config))
    parquet.write_table(pa.table({"x": [1.0]}), work / "x.parquet")
    lacking = run_here("predict", "--model", selected, "--data", work / "x.parquet", *arguments[4:])
    assert lacking.err.endswith(
        'x.parquet has no column "features", which the run made of others: '
        """give --select '["array(x) AS features"]'\n"""
    )


def test_predictions_never_replace_what_they_are_made_of(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark would delete it first: the data, a folder around it, the run."""
    run = tmp_path / "runs/r\u00fcn 1"
    for part in ("a=1", "a=2"):
        spark.range(3).write.parquet(f"{tmp_path}/new data/{part}")
    run.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "new data")
    whole, part = (
        commands.read(spark, "--data", f"{tmp_path}/new data{p}", {"format": "parquet"})
        for p in ("", "/a=1")
    )
    refused = [
        (whole, f"{tmp_path}/new data"), (whole, f"file:{tmp_path}/new data/a=2"),
        (part, f"{tmp_path}/link"), (part, str(tmp_path)), (part, str(run)), (part, str(run.parent)),
    ]  # fmt: skip
    for data, output in refused:
        with pytest.raises(sparkdl.ParameterError) as caught:
            commands.check_apart(data, output, run)
        assert str(caught.value).startswith(f"--overwrite would delete file://{tmp_path}/")
    for output in (f"{tmp_path}/new data/a=2", f"{tmp_path}/new", f"{run}2"):
        commands.check_apart(part, output, run)


def test_predictions_that_replace_others_leave_nothing_of_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    for rows in (3, 5):
        commands.write(spark.range(rows), f"{tmp_path}/new ones", "csv", overwrite=True)
    read = commands.read(spark, "--data", f"{tmp_path}/new ones", {"format": "csv"})
    assert read.count() == 5
    assert [path.name for path in tmp_path.iterdir()] == ["new ones"]


@pytest.mark.soak
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
        "optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}\n"
        "trainer: {epochs: 2, batch_size: 50}\n"
    )
    done = job("train", "--config", "line.yaml", cwd=work)
    assert (done.status, done.err) == (0, "")
    folder = done.out.splitlines()[-1]
    assert json.loads((work / folder / "model/model.json").read_text())["recipe"]["name"] == (
        "mine.line:net"
    )
    (work / "dots.csv").write_text("x,y,not.a.part\n" + "".join(f"{i}.5,0,0\n" for i in range(8)))
    predict = ["--model", folder, "--data", "dots.csv", "--format", "csv", "--output", "lines.csv"]
    done = job("predict", *predict, "--output_format", "csv", "--trust", cwd=work)
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines()[0] == "8 rows with the column prediction; the first of them:"
    evaluate = ["--model", folder, "--data", "line.csv", "--format", "csv"]
    refused = job("evaluate", *evaluate, cwd=work)
    assert (refused.status, refused.out) == (2, "")
    assert refused.err == (
        f"error: {folder}/config.yaml names a loss that is not of torch.nn, mine/line.py:loss. Give "
        "it as --loss if it is yours, or --trust if you trust the folder."
    )
    done = job("evaluate", *evaluate, "--loss", "mine/line.py:loss", "--metrics", "[mae]", cwd=work)
    assert (done.status, done.err) == (0, "")
    content = json.loads((work / folder / "evaluation.json").read_text())
    assert content["loss"] == pytest.approx(content["mae"])
    source = work / "mine/line.py"
    source.write_text(source.read_text().replace(" -> nn.Module", ""))
    refused = job("predict", *predict, cwd=work)
    assert (refused.status, refused.out) == (2, "")
    assert refused.err.endswith(" or pass trust=True (here: --trust).")


POINTS = """
data: {train: HERE/points.csv, format: csv, select: ["array(a, b) AS features", label]}
model: {class_path: torch.nn.Linear, init_args: {in_features: 2, out_features: 2}}
loss: torch.nn.CrossEntropyLoss
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
trainer: {epochs: 2, batch_size: 8, engine: local}
validation: {share: 0.2, metrics: [accuracy]}
"""
MISTAKES = {
    "no data": (
        ["--data.train", "none.csv"],
        "data.train: none.csv cannot be read as csv: Path does",
    ),
    "another format": (["--data.format", "parquet"], "The name ends in .csv: data.format: csv?"),
    "no format": (["--data.format", "parket"], "Failed to find the data source: parket."),
    "no column": (["--data.select", "[c]"], "data.select: "),
    "no label": (["--data.label", "kind"], '"kind"'),
    "number columns as one input": (
        ["--data.select", "null", "--data.features", "[a, b]"],
        'df.selectExpr("array(a, b) AS features", ...), which is data.select of a job',
    ),
    "a rate": (["--optimizer.lr=-1"], "ValueError: Invalid learning rate: -1"),
    "other shapes": (["--model.in_features", "3"], "mat1 and mat2 shapes cannot be multiplied"),
}


@pytest.fixture
def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{i / 50},{i % 7 / 7},{i % 2}\n" for i in range(50))
    (tmp_path / "points.csv").write_text("a,b,label\n" + rows)
    (tmp_path / "points.yaml").write_text(POINTS.replace("HERE", str(tmp_path)))
    return tmp_path


@pytest.mark.parametrize("row", MISTAKES)
def test_mistakes_that_the_data_show(row: str, points: Path, run_here: Callable[..., Done]) -> None:
    arguments, message = MISTAKES[row]
    done = run_here("train", "--config", "points.yaml", "--dry-run", *arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert message in done.err
    assert "\tat " not in done.err


def test_a_dry_run_tells_what_would_be_trained_and_leaves_nothing(
    points: Path, run_here: Callable[..., Done]
) -> None:
    more = ["--trainer.engine=shuffle", "--trainer.replicas=2", "--checkpoint.every_epochs=1"]
    done = run_here("train", "--config", "points.yaml", "--dry-run", *more)
    assert done.status == 0, done.err
    table = dict(line.split("   ", 1) for line in done.out.splitlines() if "   " in line)
    names = [name.strip() for name in table]
    assert names == [
        "samples", "to validate on", "column features", "column label", "parameters",
        "MB of weights", "engine", "iterations", "untrained loss",
    ]  # fmt: skip
    assert done.out.endswith("ready to train: nothing was trained, there is no run folder\n")
    assert {path.name for path in points.iterdir()} == {"points.csv", "points.yaml"}


@pytest.mark.soak
def test_a_plan_is_printed_and_leaves_nothing(points: Path, run_here: Callable[..., Done]) -> None:
    done = run_here(
        "plan", "--config", "points.yaml", "--spark.settings.spark.sparkdl.plan.cache=off"
    )
    assert done.status == 0, done.err
    assert done.out.splitlines()[1].split()[:4] == ["engine", "replicas", "strategy", "ms"]
    assert {path.name for path in points.iterdir()} == {"points.csv", "points.yaml"}


@pytest.mark.soak
@pytest.mark.parametrize("submit", [False, True], ids=["python", "spark-submit"])
def test_an_interrupted_job_goes_on_where_it_was(tmp_path: Path, submit: bool) -> None:
    """It says no more than that, and leaves its model as it stands and its checkpoints."""
    changes = [
        "trainer.epochs=60", "model.width=4", "validation=null", "schedule=null",
        "checkpoint.every_epochs=2", "name=cut", "callbacks=[say.py:Say]",
    ]  # fmt: skip
    (tmp_path / "say.py").write_text(
        "import sparkdl\n"
        "class Say(sparkdl.Callback):\n"
        "    def on_epoch_end(self, trainer, state):\n"
        "        print('epoch', flush=True)\n"
    )
    arguments = ["--config", CONFIG, *(f"--{change}" for change in changes)]
    done = job("train", *arguments, cwd=tmp_path, submit=submit, interrupt_at="epoch")
    assert done.status == 130
    told, kept, last = (done.out if submit else done.err).splitlines()[
        -3:
    ]  # Spark's own merges both
    assert told.startswith("interrupted: training ends after the current iteration")
    assert last == "error: interrupted."
    folder = tmp_path / kept.removeprefix("what was trained is in ")
    trained = sparkdl.load(folder / "model", trust=True)
    iterations = len(trained.history)
    assert trained.history.stopped == "interrupted"
    assert json.loads((folder / "summary.json").read_text())["stopped"] == "interrupted"
    newest = sparkdl.load(folder / "checkpoints", model=trained.model)
    assert len(newest.history) == iterations
    arguments += ["--trainer.epochs=1", "--resume", "latest"]
    done = job("train", *arguments, cwd=tmp_path)
    assert (done.status, done.err) == (0, "")
    assert "on from iteration " in done.out


@pytest.mark.soak
def test_a_session_that_cannot_start_is_a_mistake(tmp_path: Path) -> None:
    done = job("train", "--config", CONFIG, "--spark.master=nowhere://a", cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert done.err.splitlines()[-1] == (
        "error: Spark cannot start: Could not parse Master URL: 'nowhere://a'"
    )
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("path", "format", "message"),
    [
        ("a.txt", "parket", "Failed to find the data source: parket."),
        ("a.txt", "parquet", "Encountered error while reading file"),
        ("a.txt", "jdbc", "requirement failed: Option 'url' is required"),
        ("nowhere://a", "csv", 'No FileSystem for scheme "nowhere"'),
    ],
)
def test_what_spark_cannot_read_is_a_mistake(
    spark: SparkSession, tmp_path: Path, path: str, format: str, message: str
) -> None:
    (tmp_path / "a.txt").write_text("no Parquet")
    given = path if ":" in path else str(tmp_path / path)
    with pytest.raises(sparkdl.ParameterError) as caught:
        commands.read(spark, "data.train", given, {"format": format})
    assert str(caught.value).startswith(
        f"data.train: {given} cannot be read as {format}: {message}"
    )
    assert "\tat " not in str(caught.value)


def test_what_spark_cannot_write_is_told_in_one_line(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    told = {
        f"{tmp_path}/a.txt/b": (
            sparkdl.TrainingError,
            "writing predictions: .*Parent path is not a",
        ),
        "": (sparkdl.ParameterError, "--output: Can not create a Path from an empty string"),
        f"{tmp_path}/a.txt": (sparkdl.ParameterError, "--output: Path .*a.txt already exists"),
    }
    for path, (kind, message) in told.items():
        with pytest.raises(kind, match=message):
            commands.write(spark.range(1), path, "json", overwrite=False)
    failing = spark.range(1).selectExpr("raise_error('a fault')")
    with pytest.raises(sparkdl.SparkdlError, match="a fault"):
        commands.write(failing, f"{tmp_path}/c", "json", overwrite=False)


@pytest.mark.parametrize("name", ["evaluate", "predict"])
@pytest.mark.soak
def test_a_mistake_in_a_row_is_told_without_a_stack_trace(
    trained: Path, work: Path, name: str
) -> None:
    table = pa.table({"features": [[0.0] * 64, None], "label": [1, 2]})
    parquet.write_table(table, work / "null.parquet")
    more = ["--output", "never"] if name == "predict" else []
    doing = "writing predictions: " if name == "predict" else ""
    done = job(name, "--model", trained, "--data", "null.parquet", *more, cwd=work)
    assert (done.status, done.out) == (2, "")
    assert done.err == (
        f'error: {doing}column "features", row 1 of partition 0: is null. '
        'Drop such rows with df.dropna(subset=["features"]), or fill them.'
    )
