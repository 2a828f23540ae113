"""Lines that a worker prints, with their labels."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from sparkdl.model.recipe import Recipe
from sparkdl.process.output import label_output


def test_each_line_has_the_label_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    print("before")
    label_output("one")
    print("a", 1)
    sys.stdout.writelines(["b\nc", "d\n"])
    print("half ", end="")
    assert out.getvalue() == "before\n[one] a 1\n[one] b\n[one] cd\n"
    label_output("two")
    print("\nwhole")
    label_output("")
    print("after", file=sys.stdout)
    assert out.getvalue().endswith("[one] half [two] \n[two] whole\nafter\n")
    assert sys.stdout.getvalue() == out.getvalue()  # all else is the stream itself


def test_transformers_reports_what_it_loads_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each process that trains builds the model, and the driver does so several times."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8}
    config = transformers.BertConfig(num_attention_heads=1, **small)
    transformers.BertModel(config).save_pretrained(tmp_path)
    load = partial(transformers.BertForSequenceClassification.from_pretrained, tmp_path)
    recipe = Recipe(load, None, None, 0)
    capfd.readouterr()
    recipe.build(reported=True)
    assert "MISSING" in capfd.readouterr().err
    recipe.build()
    assert capfd.readouterr().err == ""
    load()
    assert "MISSING" in capfd.readouterr().err


IMPORTED_INSIDE = """
import sys
from sparkdl.process.output import reports_silenced
with reports_silenced():
    import transformers
    transformers.BertForSequenceClassification.from_pretrained(sys.argv[1])
print("silenced", file=sys.stderr)
transformers.BertForSequenceClassification.from_pretrained(sys.argv[1])
"""


def test_transformers_may_be_imported_while_it_is_silenced(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8}
    transformers.BertModel(transformers.BertConfig(num_attention_heads=1, **small)).save_pretrained(
        tmp_path
    )
    run = subprocess.run(
        [sys.executable, "-c", IMPORTED_INSIDE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},  # as in a worker
    )
    before, after = run.stderr.split("silenced\n")
    assert before == ""
    assert "MISSING" in after
