"""Lines that a worker prints, with their labels."""

from __future__ import annotations

import io
import sys

import pytest

from sparkdl.process.labelled_output import label_output


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
