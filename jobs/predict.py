"""Predict: ``spark-submit jobs/predict.py --model runs/... --data new.parquet --output predicted``.

The job writes the data with a column of predictions, and prints a few rows.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to import `jobs` from anywhere

import torch
from pyspark.errors import AnalysisException

from jobs import console, datasets
from jobs.saved import add_arguments, load
from sparkdl import ParameterError
from sparkdl.data.schema import quoted


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="predict.py", description="Predictions of a saved model, as a column."
    )
    add_arguments(parser)
    parser.add_argument("--output", required=True, metavar="PATH", help="where to write")
    parser.add_argument(
        "--output-format", default="parquet", metavar="NAME", help="default: parquet"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is at --output")
    parser.add_argument(
        "--argmax", action="store_true", help="the number of the highest output: the class"
    )
    parser.add_argument("--column", default="prediction", help="default: prediction")
    arguments = parser.parse_args()
    options = console.read_options(arguments.option)
    saved = load(arguments.model, arguments.trust)
    with console.session("predict", arguments.master) as spark:
        data = datasets.read(spark, arguments.data, arguments.format, options)
        predicted = saved.trained.transform(
            data,
            prediction_col=arguments.column,
            postprocess=functools.partial(torch.argmax, dim=1) if arguments.argmax else None,
        )
        mode = "overwrite" if arguments.overwrite else "errorifexists"
        if arguments.overwrite:
            datasets.check_apart(data, arguments.output, saved.folder)
        try:
            datasets.write(predicted, arguments.output, arguments.output_format, mode)
        except AnalysisException as error:
            if error.getCondition() != "PATH_ALREADY_EXISTS":
                raise
            raise ParameterError(
                f"{arguments.output} already exists: give --overwrite, or another --output."
            ) from None
        written = datasets.read(spark, arguments.output, arguments.output_format, {})
        shown = [quoted(c) for c in written.columns if c not in saved.trained.features]
        print(f"{written.count():,} rows with the column {arguments.column}; the first of them:\n")
        written.select(shown).show(5, truncate=60)
    print(arguments.output)


if __name__ == "__main__":
    console.run(main)
