"""What the jobs say to a wrong command line or file: one line, exit status 2, and no session."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import summary_runs as runs
import yaml
from job_files import SMALLEST

import sparkdl
from jobs import console, evaluate, predict, train
from jobs.run_folder import RunFolder

DATA = (
    "train, test, format, options, prepare, features, label, weight, class_weights, columns, "
    "augment, bucketing"
)


@dataclass(frozen=True)
class Mistake:
    """``arguments``: of the command line, where "a.yaml" holds ``text``, by default a good file.
    "{tmp}" in the ``message`` is the working directory."""

    name: str
    arguments: list[str]
    message: str
    text: str = yaml.safe_dump(SMALLEST)
    job: Any = train
    files: dict[str, str] = field(default_factory=dict)


CHANGES = {
    "training.epochs": '--set "training.epochs": give NAME=VALUE, such as training.epochs=5.',
    "training.epochs=2.5": "a.yaml: training.epochs: give a whole number, not a number.",
    "data=[a]": f"a.yaml: data: give a mapping with {DATA}.",
    "data.train.x=1": '--set "data.train.x": data.train has no keys below it.',
    "training.epochs=0": "training.epochs=0: give a whole number of at least 1.",
    "training.engine=shufle": 'engine="shufle": use one of local, shuffle, gang. Did you mean '
    '"shuffle"?',
    "loss=torch.nn:MSELos": 'loss: "torch.nn" has no "MSELos". Did you mean "MSELoss"?',
    "loss=torch.nn.MSELoss": 'loss: "torch.nn.MSELoss" is not of the form module:name or file.py:name. '
    'Did you mean "torch.nn:MSELoss"?',
    "loss=math:pi": 'loss: "math:pi" is a float, which cannot be called.',
    "optimizer.learning_rate=1": 'optimizer: "torch.optim:SGD" takes no argument "learning_rate". It '
    "takes: params, lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, "
    "differentiable, fused.",
    "model=nets:small": 'model: module "nets" cannot be imported (ModuleNotFoundError: No module named '
    "'nets').",
    "model=nets.py:small": "model: there is no file {tmp}/nets.py.",
    "metrics=[acuracy]": 'metrics: unknown metric "acuracy". Did you mean "accuracy"? Known: loss, '
    "accuracy, top1, top5, top@k, mae, mse, auc, hit_ratio, hit_ratio@k, ndcg, ndcg@k, or a "
    "sparkdl.Metric or torchmetrics.Metric.",
    "validation.share=1.0": "validation: share=1.0: give a number between 0 and 1, such as 0.1.",
    "early_stopping.patience=2": "early_stopping needs a validation: set validation.share or .data.",
    "care.weights=.": "care.weights: . is neither a run folder nor a model (no model.json in it).",
    "data.columns={features: {use: 'sparkdl:Convert', function: {use: 'math:pow', x: 2}}}":
    'data.columns: the function partial of column "features" cannot be saved by name: define it at the '
    "top level of a module that can be imported.",
    "data.prepare=digts": 'data.prepare: "digts" is not a known data set. Did you mean "digits"? '
    "Known: digits.",
    "data={prepare: digits, train: 's3://b/a', test: b}": "data.prepare writes to local paths, not to "
    "a URI such as s3://b/a: copy the files there, and set data.prepare=null.",
}  # fmt: skip
MISTAKES = [
    Mistake("no file", [], "give --config FILE; only --resume with a run folder goes without."),
    Mistake("missing file", ["--config", "b.yaml"], "there is no configuration file b.yaml."),
    Mistake("a folder", ["--config", "."], "there is no configuration file .."),
    Mistake(
        "no YAML",
        ["--config", "a.yaml"],
        "a.yaml, line 3: expected ',' or ']', but got '<stream end>'.",
        "data:\n  train: [a\n",
    ),
    Mistake(
        "no mapping", ["--config", "a.yaml"], "a.yaml: give a mapping of keys to values.", "- a\n"
    ),
    Mistake(
        "nothing in it", ["--config", "a.yaml"], "a.yaml: give a mapping of keys to values.", ""
    ),
    Mistake(
        "missing keys",
        ["--config", "a.yaml"],
        "a.yaml: 3 problems:\n  - data is missing.\n  - model is missing.\n"
        "  - optimizer is missing.",
        "name: a\n",
    ),
    Mistake(
        "a module that fails",
        ["--config", "a.yaml", "--set", "model=failing_net.py:small"],
        'model: module "failing_net" cannot be imported (KeyError: 1).\n'
        "  raised in {tmp}/failing_net.py, line 3, in sizes: return {}[1]",
        files={"failing_net.py": "import torch\ndef sizes():\n    return {}[1]\nsizes()\n"},
    ),
    Mistake(
        "resume from nowhere",
        ["--resume", "runs/none"],
        "--resume: runs/none is not a run folder (there is no config.yaml in it). Give one such as "
        "runs/digits-20261124-105124; for a checkpoint or latest, give --config FILE too.",
    ),
    Mistake(
        "resume without a checkpoint",
        ["--resume", "run"],
        "--resume: run has no checkpoint: it ended before the first one, or has no checkpoint section. "
        "Train anew, for instance with --set checkpoint.every_epochs=1.",
        files={"run/config.yaml": yaml.safe_dump(SMALLEST)},
    ),
    Mistake(
        "no model",
        ["--model", "none", "--data", "a.parquet"],
        "there is no folder none.",
        job=evaluate,
    ),
    Mistake(
        "a folder without a model",
        ["--model", ".", "--data", "a.parquet", "--output", "b.parquet"],
        ". is neither a run folder nor a model (no model.json in it).",
        job=predict,
    ),
    Mistake(
        "no option",
        ["--model", ".", "--data", "a.parquet", "--option", "header"],
        '--option "header": give NAME=VALUE.',
        job=evaluate,
    ),
    Mistake(
        "a damaged model",
        ["--model", "run", "--data", "a.parquet"],
        "run/model.json cannot be read: Expecting property name enclosed in double quotes: line 1 "
        "column 2 (char 1).",
        job=evaluate,
        files={"run/model.json": "{"},
    ),
    *(
        Mistake(change, ["--config", "a.yaml", "--set", change], told)
        for change, told in CHANGES.items()
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_ends_a_job_before_its_session(
    mistake: Mistake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_session(*_: Any, **__: Any) -> None:
        raise AssertionError("a session is started")

    for name, text in {"a.yaml": mistake.text, **mistake.files}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["job", *mistake.arguments])
    monkeypatch.setattr(sparkdl, "session", no_session)
    with pytest.raises(SystemExit) as caught:
        console.run(mistake.job.main)
    shown = capsys.readouterr()
    assert shown.err == f"error: {mistake.message.replace('{tmp}', str(tmp_path))}\n"
    assert shown.out == ""
    assert caught.value.code == 2
    assert not (tmp_path / "runs").exists()


def test_a_mistake_in_code_of_the_user_is_told_with_its_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def net() -> None:
        yaml.safe_load("[")  # of a library, called from here

    def job() -> None:
        try:
            net()
        except yaml.YAMLError as error:
            raise sparkdl.ModelError("model() failed.") from error

    with pytest.raises(SystemExit) as caught:
        console.run(job)
    assert caught.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: model() failed."
    assert second.startswith(f"  raised in {__file__}, line ")
    assert ', in net: yaml.safe_load("[")' in second


@pytest.mark.parametrize("kind", [sparkdl.DataError, sparkdl.CheckpointError])
@pytest.mark.parametrize(("iterations", "ended"), [(0, False), (1, False), (0, True)])
def test_a_mistake_takes_away_nothing_of_a_run_that_has_trained(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: type[Exception],
    iterations: int,
    ended: bool,
) -> None:
    """Wherever its checkpoints are, and whether or not its model was saved."""
    made = RunFolder.create(str(tmp_path), "run")
    folder = made.__enter__()
    (folder.path / "config.yaml").touch()
    runs.play([folder], runs.states(last=iterations), finish=ended)
    mistake = kind("that ends it")
    assert not made.__exit__(type(mistake), mistake, None)
    stays = ended or iterations > 0
    assert folder.path.exists() == stays
    said = f"what was trained is in {folder.path}\n" if stays else ""
    assert capsys.readouterr().err == said
