"""The first minute: processor seconds from the start of README's program to its first iteration.

    python benchmarks/first_minute.py [--trees /path/to/another/checkout] [--runs 3] [--quick]

Each run is README's example in a process of its own, as it stands up to the call of ``fit``, and a
second fit in the same session. Its processor time is read from /proc after each part: that of the
driver's Python, of the JVM (its compilers apart), and of Spark's Python workers with their daemon. A
machine that is busy with something else stretches seconds by the clock, and hardly these. Runs of
other trees, and runs with the archive of Java's classes (``python -m sparkdl archive``) where there is
one, alternate with those of this tree without it. The table has medians.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from usage import COMPILERS, KINDS, cpu_by_kind

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = (*KINDS, COMPILERS)
PARTS = ("imports", "session", "DataFrame", "fit", "second fit")
"""``fit``: from its call to the end of the first iteration; likewise ``second fit``."""


def program() -> tuple[list[str], str]:
    """README's example up to its fit: imports and what begins with ``spark =``, ``points =``."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = text.partition("## A complete example")[2].partition("```python\n")[2]
    code = code.partition("trained = ")[0]
    imports, _, rest = code.partition("spark = ")
    session, _, rest = rest.partition("points = ")
    data, _, trainer = rest.partition("\n\n\n")
    return [imports, f"spark = {session}", f"points = {data}"], trainer


def run_example() -> list[dict[str, float]]:
    """Run the example in this process; return the seconds of each of PARTS by kind of process."""
    marks, clocks, names = [cpu_by_kind(ended=True)], [time.perf_counter()], {}

    def mark() -> None:
        marks.append(cpu_by_kind(ended=True))
        clocks.append(time.perf_counter())

    parts, trainer = program()
    for part in parts:
        exec(part, names)
        mark()
    exec(trainer, names)
    import dataclasses

    import sparkdl

    class First(sparkdl.Callback):
        def on_iteration_end(self, trainer: Any, state: Any) -> None:
            mark()

    again = dataclasses.replace(
        names["trainer"], callbacks=[First()], stop=sparkdl.max_iteration(1)
    )
    again.fit(names["train"])
    began = cpu_by_kind(ended=True)
    clock = time.perf_counter()
    again.fit(names["train"])
    ends = [*itertools.pairwise(marks[:-1]), (began, marks[-1])]
    walls = [*itertools.pairwise(clocks[:-1]), (clock, clocks[-1])]
    names["spark"].stop()
    return [
        {"clock": end - start, **{kind: after[kind] - before[kind] for kind in COLUMNS}}
        for (before, after), (start, end) in zip(ends, walls, strict=True)
    ]


def main() -> None:
    from harness import hardware, markdown, options, write_json

    parser = options(__doc__)
    parser.add_argument("--trees", nargs="*", default=[], help="other checkouts, to compare with")
    parser.add_argument("--runs", type=int, default=3, help="of each")
    given = parser.parse_args()
    variants = {"this tree": (ROOT, "off"), **{tree: (Path(tree), "off") for tree in given.trees}}
    variants["this tree, archive"] = ROOT, ""
    runs: dict[str, list[list[dict[str, float]]]] = {name: [] for name in variants}
    for _ in range(1 if given.quick else given.runs):
        for name, (tree, classes) in variants.items():
            environment = {**os.environ, "PYTHONPATH": str(tree), "SPARKDL_CLASSES": classes}
            command = [sys.executable, __file__, "--example"]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(hardware(), "\n")
    rows = []
    for name, some in runs.items():
        table = [
            [statistics.median(run[i][key] for run in some) for key in (*COLUMNS, "clock")]
            for i in range(len(PARTS))
        ]
        first = [sum(column) for column in zip(*table[:4], strict=True)]
        for part, (*seconds, clock) in zip(
            (*PARTS, "to iteration 1"), (*table, first), strict=True
        ):
            rows.append((name, part, *seconds, sum(seconds), clock))
    print(markdown(("", "part", *COLUMNS, "together", "by the clock"), rows))
    write_json(given.json, runs)


if __name__ == "__main__":
    if sys.argv[1:] == ["--example"]:
        print(json.dumps(run_example()))
    else:
        main()
