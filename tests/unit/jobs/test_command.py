"""The command ``sparkdl`` without Spark: what it says to mistakes, and what its file can say."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import summary_runs as runs
import yaml
from job_files import SMALLEST
from launch import ROOT
from py4j.protocol import Py4JError

import sparkdl
from sparkdl.codec.describe import REDACTED
from sparkdl.jobs import commands
from sparkdl.jobs.main import main
from sparkdl.jobs.run_folder import RunFolder

FILE = ["train", "--config", "a.yaml"]
FILES = {
    "a.yaml": yaml.safe_dump(SMALLEST),
    "twice.yaml": "name: a\nname: b\n",
    "list.yaml": "- a\n",
    "open.yaml": "data:\n  train: [a\n",
    "typo.yaml": "data:\n  trian: a\n",
    "variable.yaml": "name: ${oc.env:NOT_SET}\n",
    "elsewhere.yaml": yaml.safe_dump({**SMALLEST, "trainer": "none.yaml"}),
    "fields.yaml": yaml.safe_dump({**SMALLEST, "trainer": {"engine": "shufle"}}),
    "optional.yaml": yaml.safe_dump({**SMALLEST, "checkpoint": {"every_epoch": 5}}),
    "inside.yaml": yaml.safe_dump({**SMALLEST, "checkpoint": {"every_epochs": "five"}}),
    "short.yaml": yaml.safe_dump({k: v for k, v in SMALLEST.items() if k != "model"}),
    "hidden.yaml": yaml.safe_dump({**SMALLEST, "name": f"a{REDACTED}"}),
    "failing_net.py": "import torch\ndef sizes():\n    return {}[1]\nsizes()\n",
    "run/model.json": "{",
}
BEFORE_TORCH: dict[str, tuple[list[str], str]] = {
    "command": (["trian"], 'unknown command "trian". Did you mean "train"?'),
    "no file": (["train"], "missing: data.train, model, optimizer. Give --config FILE"),
    "no key": (
        ["train", "a.yaml"],
        "a.yaml: give --config a.yaml; sparkdl train --help lists all keys",
    ),
    "no key for a word": (["train", "5"], "5: give --KEY VALUE; "),
    "no value": (["train", "--config"], "--config: give --KEY VALUE; "),
    "no value before a flag": ([*FILE, "--name", "--dry-run"], "--name: give --KEY VALUE; "),
    "missing file": (
        ["train", "--config", "b.yaml"],
        "b.yaml cannot be read: [Errno 2] No such file",
    ),
    "no mapping": (["train", "--config", "list.yaml"], "give a mapping of keys to values."),
    "no YAML": (
        ["train", "--config", "open.yaml"],
        "open.yaml cannot be read: while parsing a flow ",
    ),
    "a section without keys": (
        [*FILE, "--trainer=null"],
        "trainer: give a mapping of keys to values.",
    ),
    "a key is missing": (["train", "--config", "short.yaml"], "missing: model.\n"),
    "a key of a section that may be null": (
        ["train", "--config", "optional.yaml"],
        'unknown key "checkpoint.every_epoch". Did you mean "checkpoint.every_epochs"?',
    ),
    "a key twice": (["train", "--config", "twice.yaml"], "found duplicate key name"),
    "a key in the file": (
        ["train", "--config", "typo.yaml"],
        'unknown key "data.trian". Did you mean "data.train"? (line 2 of typo.yaml)\n',
    ),
    "a variable": (
        ["train", "--config", "variable.yaml"],
        "\"Environment variable 'NOT_SET' not found\" (line 1 of variable.yaml)\n",
    ),
    "a section that is a file": (
        ["train", "--config", "elsewhere.yaml"],
        "none.yaml cannot be read: [Errno 2] No such file",
    ),
    "a key": (
        [*FILE, "--trainer.batchsize=3"],
        'unknown key "trainer.batchsize". Did you mean "trainer.batch_size"?',
    ),
    "a key of another section": (
        [*FILE, "--batch_size", "3"],
        'unknown key "batch_size". Did you mean "trainer.batch_size"?',
    ),
    "redacted": (
        ["train", "--config", "hidden.yaml"],
        "name was redacted when it was written: give it again, with --name=...",
    ),
    "resume": (
        ["train", "--resume", "none"],
        "none/config.yaml cannot be read: [Errno 2] No such ",
    ),
    "no model": (["evaluate", "--data", "a"], "missing: model."),
}
BEFORE_SPARK: dict[str, tuple[list[str], str]] = {
    "a value": ([*FILE, "--trainer.engine", "shufle"], 'engine="shufle": use one of local, shuffle'),
    "a value of the file": (["train", "--config", "fields.yaml"], '"shuffle"? (line 14 of fields.y'),
    "a value in a section that may be null": (
        ["train", "--config", "inside.yaml"],
        "checkpoint: every_epoch('five'): give a whole number",
    ),
    "a type": ([*FILE, "--trainer.batch_size=2.5"], "batch_size=2.5: give a whole number of at leas"),
    "types": ([*FILE, "--trainer.l1=much"], "l1='much': give a number of at least 0, or a mapping"),
    "no loss": ([*FILE, "--loss=null"], "neither loss= nor step= is given: give loss="),
    "a count": ([*FILE, "--trainer.epochs=0"], "trainer: max_epoch(0): give a whole number"),
    "an argument": (
        [*FILE, "--optimizer.learning_rate=1"],
        'optimizer: torch.optim.SGD has no argument "learning_rate". It takes params, lr, moment',
    ),
    "a type of an argument": (
        [*FILE, "--model.in_features", "many"],
        "model: in_features: give int, not 'many'.",
    ),
    "a name": ([*FILE, "--loss", "torch.nn.MSELos"], "attribute 'MSELos'). Did you mean \"MSELoss\"?"),
    "no callable": ([*FILE, "--loss", "math.pi"], '"math.pi" is a float, which cannot be called.'),
    "a module": ([*FILE, "--model", "nets.small"], 'model: "nets.small" cannot be imported (Module'),
    "a file": ([*FILE, "--model", "nets.py:small"], "model: there is no file {tmp}/nets.py."),
    "code that fails": (
        [*FILE, "--model", "failing_net.py:small"],
        'model: "failing_net.py:small" cannot be imported (KeyError: 1).\n'
        '  File "{tmp}/failing_net.py", line 3, in sizes\n    return {}[1]',
    ),
    "no component": (
        [*FILE, "--schedule", "{name: a:b}"],
        "schedule: give a name, or a mapping with class_path and init_args.\n",
    ),
    "a metric": ([*FILE, "--metrics", "[acuracy]"], 'metrics: unknown metric "acuracy". Did you mean'),
    "a share": (
        [*FILE, "--validation.share=1.0"],
        "validation: share=1.0: give a number between 0 and 1, such as 0.1.",
    ),
    "early stopping": (
        [*FILE, "--early_stopping.patience=2"],
        'stop needs the metric "loss", and there is no validation: give validation=',
    ),
    "best": (
        [*FILE, "--validation", "{share: 0.5, metrics: [accuracy], best: accurcy}"],
        'validation: Validation(best="accurcy") is not one of its metrics: loss, accuracy.',
    ),
    "a column": (
        [*FILE, "--data.columns", "{photo: {class_path: sparkdl.Image, init_args: {mode: X}}}"],
        "data.columns: Image: mode=",
    ),
    "data to prepare": ([*FILE, "--data.prepare=digts"], 'data.prepare: "digts" cannot be imported'),
    "a domain": (
        ["tune", *FILE[1:], "--tune.space",
         "{a: {class_path: sparkdl.tune.loguniform, low: 0, high: 1}}"],
        "tune.space.a: tune.loguniform(0, 1): give two numbers above 0, the smaller one first.",
    ),
    "no folder": (["evaluate", "--model", "none", "--data", "a"], "none"),
    "a damaged model": (
        ["evaluate", "--model", "run", "--data", "a"],
        "run/model.json cannot be read: Expecting property name",
    ),
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def no_session(*_: Any, **__: Any) -> None:
        raise AssertionError("a session is started")

    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sparkdl, "session", no_session)
    return tmp_path


def ended(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code, *capsys.readouterr()


@pytest.mark.parametrize("row", [*BEFORE_TORCH, *BEFORE_SPARK])
def test_a_mistake_ends_the_command_before_its_session(
    row: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = (BEFORE_TORCH | BEFORE_SPARK)[row]
    status, out, err = ended(arguments, capsys)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message.replace("{tmp}", str(here)) in err
    assert "Traceback" not in err
    assert not (here / "runs").exists()


def test_mistakes_of_keys_and_types_are_told_before_torch_and_spark_are_imported(
    here: Path,
) -> None:
    text = f"""
import sys
from sparkdl.jobs.main import main
for arguments in {[arguments for arguments, _ in BEFORE_TORCH.values()]!r}:
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 2
assert not {{"torch", "pyspark"}} & sys.modules.keys()
"""
    environment = {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", text], check=True, env=environment, capture_output=True)


def test_all_mistakes_of_components_are_told_at_once(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = ended([*FILE, "--loss=math.pi", "--model=a.b", "--trainer.epochs=0"], capsys)
    assert status == 2
    assert [line[4:].partition(":")[0] for line in err.splitlines()[1:]] == [
        "model", "loss", "trainer"
    ]  # fmt: skip


def test_a_printed_configuration_is_one(here: Path) -> None:
    """Variables of the environment are filled in, and the last of several files counts."""

    def printed(*arguments: str) -> str:
        command = [sys.executable, "-m", "sparkdl.jobs.main", "train", *arguments, "--print_config"]
        environment = {"PYTHONPATH": str(ROOT), "RATE": "0.5"}
        return subprocess.check_output(command, text=True, env=environment)

    (here / "b.yaml").write_text(
        "data: {train: b, options: {sep: ;}}\nname: ${oc.env:NAME,mine}\n"
        "trainer: {ema: '${oc.env:RATE}'}\n"
    )
    changed = ["--model.bias=false", "--trainer.l1", '{"*.weight": 1e-4}']
    text = printed("--config", "a.yaml", "--config", "b.yaml", *changed)
    content = yaml.safe_load(text)
    assert (content["name"], content["data"]["train"]) == ("mine", "b")
    assert content["data"]["options"] == {"sep": ";"}
    assert (content["trainer"]["l1"], content["trainer"]["ema"]) == ({"*.weight": 1e-4}, 0.5)
    (here / "c.yaml").write_text(text)
    assert printed("--config", "c.yaml") == text


def test_the_configurations_are_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["conf", "mine"], capsys)[0] == 0
    names = {str(path.relative_to(ROOT / "conf")) for path in (ROOT / "conf").rglob("*.*")}
    assert {str(path.relative_to(here / "mine")) for path in (here / "mine").rglob("*.*")} == names
    (here / "mine/digits.yaml").write_text("mine")
    assert "mine/digits.yaml is there already and stays" in ended(["conf", "mine"], capsys)[1]
    assert ended(["conf", "--help"], capsys)[0] == 0
    assert not Path("--help").exists()
    assert (here / "mine/digits.yaml").read_text() == "mine"


def test_help_and_version(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "  tune      search for good values" in ended([], capsys)[1]
    assert ended(["--version"], capsys)[1] == f"{sparkdl.__version__}\n"
    status, out, _ = ended(["train", "--help"], capsys)
    assert status == 0
    assert "\n  batch_size: 256\n" in out
    monkeypatch.setitem(sys.modules, "omegaconf", None)  # installed without the extra
    for arguments in (["train", "--help"], FILE):
        status, out, err = ended(arguments, capsys)
        assert (status, out) == (2, "")
        assert err.startswith("error: a job needs ")
        assert 'extra "jobs"' in err


@pytest.mark.parametrize("kind", [sparkdl.DataError, sparkdl.CheckpointError, RuntimeError])
@pytest.mark.parametrize(("iterations", "complete"), [(0, False), (1, False), (0, True)])
def test_a_mistake_takes_away_nothing_of_a_run_that_has_trained(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: type[Exception],
    iterations: int,
    complete: bool,
) -> None:
    """Wherever its checkpoints are, and whether or not its model was saved."""
    folder = RunFolder(str(tmp_path), "run", {})
    runs.play([folder], runs.states(last=iterations), finish=complete)
    mistake = kind("that ends it")
    folder.__exit__(type(mistake), mistake, None)
    fault, stays = kind is RuntimeError, complete or iterations > 0
    assert folder.path.exists() == (stays or fault)
    said = f"what was trained is in {folder.path}\n" if stays and not fault else ""
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("error", "interrupted", "status", "message"),
    [
        (Py4JError("Gateway must be connected to send cancel cmd."), True, 130, "interrupted."),
        (sparkdl.CheckpointError("there is none"), False, 2, "there is none"),
        (sparkdl.TrainingError("iteration 3 failed"), False, 1, "iteration 3 failed"),
        (sparkdl.TrustError("pass trust=True."), False, 2, "pass trust=True (here: --trust)."),
        (
            sparkdl.DataError('label="y": no column'),
            False,
            2,
            'label="y": no column (line 3 of a.yaml)',
        ),
    ],
)
def test_how_a_command_ends(
    error: Exception,
    interrupted: bool,
    status: int,
    message: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An interrupt is one whatever Py4J makes of it."""

    def job(*_: Any) -> None:
        if interrupted:
            commands._interrupted.set()
        raise error

    (here / "a.yaml").write_text("data:\n  train: a\n  label: y\nmodel: a\noptimizer: b\n")
    monkeypatch.setattr(commands, "_interrupted", threading.Event())
    monkeypatch.setattr(commands, "train", job)
    assert ended(FILE, capsys) == (status, "", f"error: {message}\n")
