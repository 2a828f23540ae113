"""Lines that a worker prints, with their labels."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import fork_server
import pytest

from sparkdl.process.system import label_output, print_escaped


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


def test_letters_that_the_console_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the C locale: a rank's line must not end the fit."""
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, "ascii"))
    print_escaped("[rank 1] größe")
    sys.stdout.flush()
    assert content.getvalue() == rb"[rank 1] gr\xf6\xdfe" + b"\n"
    sys.stdout.detach()


LOADS = """
import sys
from functools import partial
from sparkdl.model.recipe import Recipe
from sparkdl.process.system import reports_silenced
with reports_silenced():
    import transformers
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, intermediate_size=8, num_attention_heads=1
    )
    transformers.BertModel(config).save_pretrained("bert")
    load = partial(transformers.BertForSequenceClassification.from_pretrained, "bert")
    load()
build = Recipe(load, None, None, 0).build
for loads in (build, partial(build, reported=True), load):
    print("NEXT", file=sys.stderr)
    loads()
"""


@pytest.mark.soak
def test_transformers_reports_what_it_loads_once(tmp_path: Path) -> None:
    """Each process that trains builds the model, and the driver does so several times. The library may
    be imported while it is silenced."""
    pytest.importorskip("transformers")
    run = fork_server.run_fresh(LOADS, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    imported, silent, reported, afterwards = run.stderr.split("NEXT\n")
    assert "MISSING" not in imported
    assert silent == ""
    assert "MISSING" in reported
    assert "MISSING" in afterwards
