"""Compare the engine that ``engine="auto"`` takes for the programs of ``examples/`` with each engine.

    python benchmarks/auto.py [--quick] [--examples digits,images] [--json FILE]

Each program runs in a fresh process with a session of local[2]. Its first fit is done by "shuffle", by
"gang" and by "auto", one after another; the last third of the iterations counts. "more" is how much
longer an iteration of the engine that was taken is than one of the faster engine. A fit of fewer than
50 iterations measures nothing and takes the default.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import tempfile
from dataclasses import replace
from typing import Any

from harness import (
    HERE,
    hardware,
    in_fresh_process,
    laps,
    markdown,
    median_ms,
    options,
    session,
    write_json,
)
from pyspark import cloudpickle

import sparkdl

EXAMPLES = (
    *("digits", "early_stopping", "fine_tune_text", "fine_tuning", "images", "rdd_samples"),
    *("sequences", "several_tasks", "tabular_etl", "two_inputs", "two_optimizers"),
)
ENGINES = ("shuffle", "gang")


class Found(Exception):
    """The figures of a program's first fit; the rest of it is not run."""


def milliseconds(trained: Any) -> float:
    each = [lap["whole"] for lap in laps(trained.history)]
    return median_ms(each[2 * len(each) // 3 :])


def of_example(name: str) -> dict[str, Any]:
    """Milliseconds of an iteration by engine, and what "auto" took."""
    fit = sparkdl.Trainer.fit

    @functools.wraps(fit)
    def compared(trainer: Any, data: Any, *args: Any, **more: Any) -> Any:
        sparkdl.Trainer.fit = fit  # type: ignore[method-assign]
        figures: dict[str, Any] = {}
        for engine in (*ENGINES, "auto"):
            trained = replace(trainer, engine=engine, strategy="ddp").fit(data, *args, **more)
            figures[engine] = milliseconds(trained)
            figures["iterations"] = len(trained.history)
        plan = trained.history.plan
        figures["took"] = plan["fields"]["engine"] if plan else "shuffle"
        raise Found(figures)

    with tempfile.TemporaryDirectory() as home:  # a plan must not know what was measured before
        os.environ["XDG_CACHE_HOME"] = home
        spark = session("local[2]")
        try:
            path = HERE.parent / "examples" / f"{name}.py"
            spec = importlib.util.spec_from_file_location(f"example_{name}", path)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            cloudpickle.register_pickle_by_value(module)
            sparkdl.Trainer.fit = compared  # type: ignore[method-assign]
            module.main(spark)
        except Found as found:
            return found.args[0]
        finally:
            spark.stop()
    raise RuntimeError(f"{name} did not fit")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--examples", default=",".join(EXAMPLES))
    asked = parser.parse_args()
    names = ["digits"] if asked.quick else asked.examples.split(",")
    print(hardware(), flush=True)
    figures = {}
    for name in names:
        figures[name] = in_fresh_process(of_example, name)
        print(name, figures[name], flush=True)
    rows = [
        [
            name, found["iterations"], found["shuffle"], found["gang"], found["took"],
            f"{100 * (found[found['took']] / min(found[e] for e in ENGINES) - 1):.0f} %",
        ]
        for name, found in figures.items()
    ]  # fmt: skip
    print(markdown(["example", "iterations", "shuffle ms", "gang ms", '"auto" took', "more"], rows))
    write_json(asked.json, figures)


if __name__ == "__main__":
    main()
