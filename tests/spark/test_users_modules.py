"""Modules of the user's beside a script: found by tasks, new after an edit, told where missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import PATHS, QUIET

MODULE = """
import torch
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
    def forward(self, x):
        return super().forward(x) * SCALE

def features(value):
    return [float(value % 7), SCALE * float(value % 5)]

def scaled(output, target):
    return torch.full((len(output),), float(SCALE))
"""
SCRIPT = """
import importlib, json, os, sys, time
from functools import partial
from pathlib import Path
import sparkdl, torch
from torch import nn
import mynet

here = Path(__file__).parent
spark = sparkdl.session("local[2]", **QUIET)
rows = spark.range(96).selectExpr("id AS features", "id % 2 AS label")

def fit(engine, data, model=None, **more):
    return sparkdl.Trainer(
        model=model or mynet.Net, loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        replicas=2, engine=engine, batch_size=24, stop=sparkdl.max_epoch(1), **more).fit(data)

def found(engine):
    metrics = [sparkdl.MeanMetric("scaled", mynet.scaled)]
    trained = fit(engine, rows, columns={"features": sparkdl.Convert(mynet.features)},
                  validation=sparkdl.Validation(rows, metrics=metrics))
    predictions = [list(row.prediction) for row in trained.transform(rows).limit(3).collect()]
    measured = trained.evaluate(rows, metrics=metrics)["scaled"]
    seen = trained.history.validations[-1]["metrics"]["scaled"]
    return [trained.history.losses, seen, predictions, measured]

def edit(text):
    (here / "mynet.py").write_text(text)
    os.utime(here / "mynet.py", (time.time() + 9, time.time() + 9))

said = {"before": [found(engine) for engine in ENGINES]}
code = (here / "template.txt").read_text()
edit(code.replace("SCALE", "0"))
importlib.reload(mynet)
said["after"] = [found(engine) for engine in ENGINES]
(here / "gone.py").write_text(code.replace("SCALE", "1"))
import gone
(here / "gone.py").unlink()
said["told"] = []
for engine in ("shuffle", "gang"):
    try:
        fit(engine, rows.selectExpr("array(float(features), 1.0F) AS features", "label"), gone.Net)
    except sparkdl.ModelError as error:
        said["told"].append(str(error))
print("SAID", json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.soak
def test_modules_beside_a_script(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "mynet.py").write_text(MODULE.replace("SCALE", "1"))
    engines = ("local", "shuffle", "gang")
    (folder / "template.txt").write_text(MODULE)
    script = SCRIPT.replace("QUIET", repr(QUIET)).replace("ENGINES", repr(engines))
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, str(folder / "train.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PATHS[1]},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert lines, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(lines[0].removeprefix("SAID "))
    for scale, when in ((1.0, "before"), (0.0, "after")):
        local, *others = said[when]
        assert others == [local] * 2
        assert local[1] == local[3] == scale
    assert said["after"][0][0] == [pytest.approx(0.6931472)] * 4
    assert len(said["told"]) == 2
    for told in said["told"]:
        assert told.startswith('the executors cannot import "gone", which is ')
        assert "addPyFile" in told
