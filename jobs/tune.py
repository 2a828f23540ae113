"""Search for good values: ``spark-submit jobs/tune.py --config conf/digits.yaml``.

The section ``tune`` of the file names what varies. The job writes a new folder,
``runs/<name>-tune-<time>``: config.yaml, trials.csv, trials.png, summary.json, model/ (the best, with
history.json, history.csv and curves.png), and trials/, with which ``--resume`` goes on in a new
folder. Any key can be changed on the command line: ``--set tune.trials=8 --set training.epochs=5``.
Ctrl-C ends the search with what is finished, and the exit status is 130.
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
from jobs.resuming import config_file
from jobs.run_folder import RunFolder
from jobs.sections import Config
from jobs.train import read_samples

SHOWN = 10
"""The largest number of trials in the table on the console."""


def main() -> None:
    parser = console.config_parser(
        "tune.py", "Search for good values as a YAML file says.", "tune.trials=8"
    )
    parser.add_argument(
        "--resume", metavar="PATH", help="go on with the trials of an earlier run folder"
    )
    arguments = parser.parse_args()
    config = read_config(config_file(arguments.config, arguments.resume), arguments.set)
    trainer = building.trainer_of(config)
    search = building.search_of(config)
    datasets.prepare(config.data)
    with console.session(f"tune {config.name}", config.spark.master, config.spark.settings) as s:
        tune(s, config, trainer, search, arguments.resume)


def tune(
    spark: Any,
    config: Config,
    trainer: sparkdl.Trainer,
    search: dict[str, Any],
    resume: str | None = None,
) -> None:
    """Search, write the run folder, evaluate the best model, and print the results."""
    samples, held = read_samples(spark, config)
    iterations = building.training_iterations(
        config.training, trainer.batch_size * trainer.options.local_steps, samples.count()
    )
    with RunFolder.create(config.runs, f"{config.name}-tune") as folder:
        folder.write_config(config)
        distributed = search["parallel"] == 1 and config.checkpoint is not None
        checkpoint = building.checkpoint_of(config.checkpoint, folder.path) if distributed else None
        trainer = dataclasses.replace(
            trainer,
            schedule=config.schedule and building.schedule_of(config.schedule, iterations),
            validation=trainer.validation and dataclasses.replace(trainer.validation, data=held),
            checkpoint=checkpoint,
        )
        trials = Path(resume or folder.path) / "trials"
        result = sparkdl.tune.search(trainer, samples, path=trials, **search)
        folder.trained = bool(result.trials)
        if result.trials:
            table = result.to_pandas()
            table.to_csv(folder.path / "trials.csv")
            result.plot(folder.path / "trials.png")
            best_first = search["metric"], not result.higher_is_better
            print(table.sort_values(best_first[0], ascending=best_first[1]).head(SHOWN).to_string())
        summary: dict[str, Any] = {"trials": len(result.trials)}
        if result.best is not None:
            folder.write_training(result.best_model)
            summary |= {"best trial": result.best.number, **result.best.arguments}
            summary |= {f"validation {name}": v for name, v in result.best.metrics.items()}
        folder.write_summary(summary)
        if result.stopped is not None:
            print(f"the finished trials are in {folder.path}", file=sys.stderr)
            raise KeyboardInterrupt
        if config.data.test and result.best is not None:
            data = config.data
            test = datasets.read(spark, data.test, data.format, data.options)
            found = result.best_model.evaluate(test, building.metrics_of(config.metrics))
            summary |= {f"test {name}": value for name, value in found.items()}
            folder.write_summary(summary)
    print(f"\n{console.table(summary)}\n\n{folder.path}")


if __name__ == "__main__":
    console.run(main)
