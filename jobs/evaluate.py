"""Evaluate a saved model: ``spark-submit jobs/evaluate.py --model runs/... --data test.parquet``.

The job prints the loss and the metrics, and writes them to ``evaluation.json`` in the run folder, or
in the folder of the model (``best/``, ``ema/`` or another) that is given.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to import `jobs` from anywhere

from jobs import console, datasets
from jobs.saved import add_arguments, load


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="evaluate.py", description="Loss and metrics of a saved model on labelled data."
    )
    add_arguments(parser)
    parser.add_argument(
        "--metrics", metavar="NAMES",
        help="names of metrics, with commas: accuracy,top@5,auc, say; default: those of the run",
    )  # fmt: skip
    parser.add_argument(
        "--loss", metavar="MODULE:NAME", help="such as torch.nn:MSELoss; default: that of the run"
    )
    arguments = parser.parse_args()
    options = console.read_options(arguments.option)
    saved = load(arguments.model, arguments.trust, arguments.loss, needs_loss=True)
    metrics = saved.metrics
    if arguments.metrics is not None:
        metrics = [name.strip() for name in arguments.metrics.split(",") if name.strip()]
    with console.session("evaluate", arguments.master) as spark:
        data = datasets.read(spark, arguments.data, arguments.format, options)
        found = saved.trained.evaluate(data, metrics)
        count = data.count()
    path = saved.folder / "evaluation.json"
    content = {
        "data": arguments.data,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "samples": count,
        **found,
    }
    print(console.table({"samples": count, **found}), flush=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"\n{path}")


if __name__ == "__main__":
    console.run(main)
