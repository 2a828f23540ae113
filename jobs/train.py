"""Train a model that a YAML file describes: ``spark-submit jobs/train.py --config conf/digits.yaml``.

The job writes a new folder, ``runs/<name>-<time>``: config.yaml, history.json and .csv, curves.png,
summary.json, model/ (the last), best/ (of the best validation), ema/, checkpoints/. Any key can be
changed on the command line: ``--set training.epochs=5 --set model.width=16``. ``--resume`` goes on
from the checkpoints of an earlier run, in a new folder. Ctrl-C ends the training after its iteration:
the folder has the model as it stands, and the exit status is 130; a second Ctrl-C ends it at once.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to import `jobs` from anywhere

import sparkdl
from jobs import building, console, datasets
from jobs.config import read_config
from jobs.resuming import LATEST, config_file, resume_point
from jobs.run_folder import RunFolder, models_of
from jobs.sections import Config
from sparkdl import summaries
from sparkdl.loop.interrupt import INTERRUPTED


def main() -> None:
    parser = console.config_parser(
        "train.py", "Train a model as a YAML file says.", "training.epochs=5"
    )
    parser.add_argument(
        "--resume", metavar="latest|PATH",
        help="go on from a run folder, a checkpoint, or the latest run of this name",
    )  # fmt: skip
    arguments = parser.parse_args()
    config = read_config(config_file(arguments.config, arguments.resume), arguments.set)
    trainer = building.trainer_of(config)
    resume = arguments.resume and resume_point(arguments.resume, config)
    datasets.prepare(config.data)
    with console.session(f"train {config.name}", config.spark.master, config.spark.settings) as s:
        if arguments.resume == LATEST and resume is None:
            print(f"no run of {config.name} to continue: starting from the beginning")
        train(s, config, trainer, resume)


def train(spark: Any, config: Config, trainer: sparkdl.Trainer, resume: str | None = None) -> None:
    """Train, write the run folder, evaluate, and print the results."""
    data = config.data
    samples, held = read_samples(spark, config)
    test = data.test and datasets.read(spark, data.test, data.format, data.options)
    count = samples.count()
    batch = trainer.batch_size * trainer.options.local_steps
    iterations = building.training_iterations(config.training, batch, count)
    lines = console.EpochLines(
        config.training.epochs, spark.conf.get("spark.sparkdl.progress", "auto")
    )
    if lines.shown:  # they take the place of those that fit logs without a terminal
        spark.conf.set("spark.sparkdl.progress", "false")
    print(
        f"{config.name}: {count:,} samples{f' and {held.count():,} to validate on' if held else ''}"
        f", batches of {trainer.batch_size}, {iterations:,} iterations "
        f"on {spark.sparkContext.master}",
        flush=True,
    )
    with RunFolder.create(config.runs, config.name) as folder:
        folder.write_config(config)
        trainer = dataclasses.replace(
            trainer,
            schedule=config.schedule and building.schedule_of(config.schedule, iterations),
            validation=trainer.validation and dataclasses.replace(trainer.validation, data=held),
            checkpoint=config.checkpoint and building.checkpoint_of(config.checkpoint, folder.path),
            callbacks=[folder, lines, *summaries_of(config, folder.path), *trainer.callbacks],
        )
        trained = trainer.fit(samples, resume=resume)
        interrupted = trained.history.stopped == INTERRUPTED
        if interrupted and not len(trained.history):
            raise KeyboardInterrupt
        folder.write_training(trained)
        summary = summarize(trained, count, lines.state, config)
        folder.write_summary(summary)
        if interrupted:
            print(f"what was trained is in {folder.path}", file=sys.stderr)
            raise KeyboardInterrupt
        if test:
            metrics = building.metrics_of(config.metrics)
            for which, model in models_of(trained).items():
                prefix = "" if which == "model" else f"{which} "
                found = model.evaluate(test, metrics)
                summary |= {f"{prefix}test {name}": value for name, value in found.items()}
            folder.write_summary(summary)
    print(f"\n{console.table(summary)}\n\n{folder.path}")


def read_samples(spark: Any, config: Config) -> tuple[Any, Any]:
    """Return the training data and the validation data, or None."""
    data, validation = config.data, config.validation
    samples = datasets.read(spark, data.train, data.format, data.options)
    if validation is None:
        return samples, None
    if validation.share is not None:
        return datasets.split(samples, validation.share, config.training.seed)
    return samples, datasets.read(spark, validation.data, data.format, data.options)


def summaries_of(config: Config, folder: Path) -> list[sparkdl.Callback]:
    """Return the callbacks that ``config.summaries`` asks for."""
    section = config.summaries
    found: list[sparkdl.Callback] = []
    if section.csv:
        found.append(summaries.HistoryFile(folder / "history.csv"))
    if section.tensorboard:
        found.append(summaries.TensorBoard(folder / "tensorboard"))
    if section.mlflow:
        found.append(summaries.MLflow(folder.name))
    return found


def summarize(
    trained: sparkdl.TrainedModel, count: int, state: sparkdl.TrainState, config: Config
) -> dict[str, Any]:
    """Return the figures of the final table."""
    epochs = trained.history.epochs()
    found = {
        "samples": count,
        "parameters": sum(p.numel() for p in trained.module.parameters()),
        "epochs": len(epochs),
        "iterations": len(trained.history),
        "seconds": state.seconds,
        "samples/s": state.samples / state.seconds,
        "train loss": epochs[-1]["loss"],
        **({"stopped": stopped} if (stopped := trained.history.stopped) else {}),
        **{f"validation {name}": value for name, value in state.metrics.items()},
    }
    if trained.best is not None and config.validation is not None and config.validation.best:
        best = state.best
        if best is not None:
            found["best epoch"] = best.epoch
    return found


if __name__ == "__main__":
    console.run(main)
