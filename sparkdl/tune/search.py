"""The search: its arguments, and trial after trial until the algorithm has no more.

While it runs it shows the table of its trials. Logs, such as runs of MLflow, are what callbacks of the
trainer or of every fit offer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from pyspark import RDD
from pyspark.sql import DataFrame

from sparkdl.care.rules import Rule
from sparkdl.codec.describe import describe, describe_trainer
from sparkdl.errors import ModelError, ParameterError, nearest, raise_all, shown
from sparkdl.gang.slots import SLOT_SECONDS, task_slots
from sparkdl.infer.model import TrainedModel
from sparkdl.loop.callbacks import added_callbacks, none_added
from sparkdl.loop.history import History
from sparkdl.loop.interrupt import INTERRUPTED, Interrupt, interruptible
from sparkdl.loop.progress import LOG_SECONDS, bar_class, log_line, shows_bar
from sparkdl.metrics.named import resolve, scalar_names
from sparkdl.metrics.scorer import Scorer
from sparkdl.plain import is_whole, plain
from sparkdl.session import SessionFacts
from sparkdl.spark.executors import own_properties, warming_up
from sparkdl.train.chosen import decided
from sparkdl.train.course import LocalFit
from sparkdl.train.fit import run
from sparkdl.train.request import FitRequest
from sparkdl.train.trainer import Trainer
from sparkdl.tune.algorithms import Algorithm, Grid, Optuna, OptunaSearch, Random
from sparkdl.tune.arguments import SearchSpec, problems_of_names
from sparkdl.tune.folder import Objective, SearchFolder, TrialOutcome, TrialRecord
from sparkdl.tune.result import SearchResult
from sparkdl.tune.runner import (
    ConnectedTrials,
    FitsHere,
    Placements,
    Proposed,
    Runner,
    RunningTrial,
    SearchInterrupted,
    SideBySide,
    check_search,
)
from sparkdl.tune.space import domains_of

if TYPE_CHECKING:
    from sparkdl.tune.result import SearchResult


class SearchLog(Protocol):
    """A place where a search is logged, by the driver."""

    def open(self, trainer: Trainer, space: Mapping[str, str]) -> None:
        """Begin to log a search over ``space`` in words; raise ParameterError if that cannot be."""

    def add(self, trainer: Trainer | None, record: TrialRecord, history: History | None) -> None:
        """Log a trial that has ended; ``history`` is None if only the record is known."""

    def close(self, result: Any) -> None:
        """End the log; ``result`` is None if the search failed."""


def logs_of(trainer: Trainer) -> tuple[list[SearchLog], Trainer]:
    """Return the logs that callbacks offer, and the trainer with the other callbacks alone."""
    own = [(callback, callback.for_search()) for callback in trainer.callbacks]
    added = [callback.for_search() for callback in added_callbacks(trainer.callbacks)]
    logs = [log for log in (*(log for _, log in own), *added) if log is not None]
    return logs, replace(trainer, callbacks=[callback for callback, log in own if log is None])


def close(logs: Sequence[SearchLog], result: SearchResult | None) -> None:
    """End all logs of a search."""
    for log in logs:
        log.close(result)


class TrialTable:
    """The finished trials while a search runs, in a folder and in logs too if there are such.

    It is a context manager that shows the progress.
    """

    def __init__(
        self,
        spec: SearchSpec,
        folder: SearchFolder | None,
        progress: str,
        trials: int,
        logs: Sequence[SearchLog],
    ) -> None:
        self._spec, self._trials, self._progress = spec, trials, progress
        self.folder, self._logs = folder, logs
        self.earlier = {} if folder is None else dict(folder.records)
        self.records: dict[int, TrialRecord] = {}
        self.best_outcome: TrialOutcome | None = None  # without weights if only the folder has it
        self._bar: Any = None
        self._told_at = time.monotonic()

    @property
    def best(self) -> TrialRecord | None:
        """The best record so far."""
        return None if self.best_outcome is None else self.best_outcome.record

    def add(self, outcome: TrialOutcome) -> None:
        """Add a trial that has just ended."""
        if self.folder is not None:
            self.folder.add(outcome)
        self.note(outcome)
        now = time.monotonic()
        if self._progress == "auto" and self._bar.disable and now - self._told_at > LOG_SECONDS:
            self._told_at = now
            far = f"{len(self.records)} of {self._trials} trials"
            log_line(", ".join(filter(None, (f"search: {far}", self._best_so_far))))

    def note(self, outcome: TrialOutcome) -> None:
        """Add a trial to the records and the logs."""
        record, own = outcome.record, None
        if self._logs:
            with contextlib.suppress(ModelError, ParameterError):
                own = self._spec.trainer_of(record.arguments)
        for log in self._logs:
            log.add(own, record, outcome.history)
        self.records[record.number] = record
        if self._spec.objective.is_better(record, self.best):
            self.best_outcome = outcome
        self._bar.update()
        self._bar.set_postfix_str(self._best_so_far)

    @property
    def _best_so_far(self) -> str:
        best, metric = self.best, self._spec.objective.metric
        return "" if best is None else f"best {metric} {best.value:.4g} in trial {best.number}"

    def __enter__(self) -> TrialTable:
        how = {"dynamic_ncols": True, "disable": not shows_bar(self._progress)}
        self._bar = bar_class()(total=self._trials, unit="trial", desc="search", **how)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()


logger = logging.getLogger("sparkdl")
ALGORITHMS = ("grid", "random", "optuna")
WAIT_SECONDS = 0.005
_TOLD = (
    "interrupted: the search ends, and returns the trials that are finished. Interrupt again to end at "
    "once, without them."
)


def search(
    trainer: Trainer,
    data: DataFrame | RDD[Any],
    space: Mapping[str, Any],
    *,
    metric: str = "loss",
    trials: int | None = None,
    algorithm: str | Optuna = "random",
    parallel: int | None = None,
    seed: int = 0,
    path: str | os.PathLike[str] | None = None,
) -> SearchResult:
    """Train with different values of some arguments, and return the results and the best model.

    The data is read once. A trial that fails is a row of the table with the reason, and the others go
    on. The same arguments give the same table, apart from the times::

        result = sparkdl.tune.search(
            trainer,
            df,
            {
                "optimizer.lr": sparkdl.tune.loguniform(1e-4, 1e-1),
                "model.hidden": [16, 32, 64],
                "batch_size": [64, 256],
            },
            metric="accuracy",
        )
        result.to_pandas()
        result.best_model.transform(df)

    Args:
        trainer: The trainer; its validation scores the trials.
        data: The training data, as for ``Trainer.fit``.
        space: The values to try, by the names of arguments: a field of the trainer (``"batch_size"``)
            or a keyword argument of what it builds with (``"model.hidden"``, ``"optimizer.lr"``,
            ``"schedule.gamma"``, ``"stop.epochs"``). The values are a list, :func:`uniform`,
            :func:`loguniform` or :func:`integers`.
        metric: The metric of the validation to make as good as possible. A trial counts by its last
            validation; or by its best one with ``Validation(best=metric)``, whose weights are kept.
        trials: The number of trials. None is all combinations of a grid, and otherwise 16. A grid and
            a random search try each combination once, and end when there is no other.
        algorithm: "random", "grid" (all combinations), "optuna", or :class:`Optuna` with settings.
        parallel: The number of trials that run at once, each in one task of Spark, by the local
            engine, on CPUs. None is as many as the cluster runs tasks at once. 1 makes one trial
            after another, each by the engine of the trainer on the whole cluster: for models that
            need it.
        seed: The seed of the algorithm. The trials themselves have the trainer's seed.
        path: A folder or a URI for the finished trials. The same call goes on from what is there,
            after the driver was killed for example.

    Returns:
        The table of trials and the best model.

    Raises:
        UserError: An argument, the space or the data cannot work.
        TrainingError: Spark has ended.
        CheckpointError: ``path`` cannot be read or written.
        KeyboardInterrupt: The user interrupted twice.
    """
    facts = SessionFacts.of(data, "search")
    context, settings = facts.context, facts.settings
    connected = context is None
    trials, parallel, seed = plain(trials), plain(parallel), plain(seed)
    arguments = (trainer, space, trials, parallel, seed)
    raise_all(
        ParameterError,
        [
            *(
                problem
                for (name, rule), value in zip(ARGUMENTS.items(), arguments, strict=True)
                for problem in rule.broken_by(name, value)
            ),
            *_problems_of_search(trainer, space, metric, algorithm, parallel, connected),
        ],
    )
    if connected:
        check_search(trainer, path)
    spec = SearchSpec(trainer, domains_of(space), _objective(trainer, metric))
    logs, own = logs_of(trainer)
    together, slots = parallel != 1, 1
    if together and not connected:
        own = replace(own.settled(), engine="local", replicas=own.number_of_replicas or 1)
        slots = parallel or task_slots(context, seconds=min(SLOT_SECONDS, settings.timeout or 30))
    elif not connected:
        own = decided(data, FitRequest(trainer=own), facts, run).trainer  # type: ignore[assignment]
    folder, here = None, replace(spec, trainer=own)
    described = _described(spec, algorithm, together, seed)
    if path is not None:
        folder = SearchFolder.open(path, described, spec.objective)
    search_id = folder.search_id if folder else secrets.token_hex(8)
    chosen = _algorithm(algorithm, spec, trials, seed, search_id)
    table = TrialTable(spec, folder, settings.progress, chosen.trials, logs)
    result: SearchResult | None = None
    with contextlib.ExitStack() as stack:
        if not connected:
            stack.enter_context(warming_up(context))
            stack.enter_context(own_properties(context))
        placed = stack.enter_context(contextlib.ExitStack())  # ends after the runner
        placements = Placements(data, spec.space, folder, placed)
        for log in logs:
            log.open(trainer, {name: describe(domain) for name, domain in spec.space.items()})
        stack.callback(lambda: close(logs, result))
        runner: Runner
        if connected:
            runner = ConnectedTrials(
                context=None, spec=here, placements=None, data=data, parallel=parallel
            )
        elif together:
            runner = SideBySide(
                context=context,
                spec=here,
                placements=placements,
                slots=slots,
                name=f"sparkdl-{search_id}",
                settings=settings,
                logged=bool(logs),
            )
        else:
            keep = folder is not None
            runner = FitsHere(
                context=context, spec=here, placements=placements, described=described, keep=keep
            )
            if logs:
                stack.enter_context(none_added())
        stack.callback(runner.close)
        asked = interruptible(_TOLD) if together else contextlib.nullcontext(Interrupt())
        with asked as interrupt, table:
            stopped = _make_trials(chosen, runner, table, interrupt)
        records = tuple(table.records[number] for number in sorted(table.records))
        if table.best is None and records:
            logger.warning("no trial was completed; the first one says: %s", records[0].reason)
        model = _model(table, here, placements)
        result = SearchResult(records, table.best, stopped, spec, model)
    return result


def _make_trials(
    algorithm: Algorithm, runner: Runner, table: TrialTable, interrupt: Interrupt
) -> str | None:
    """Make all trials, and return why the search ended early, or None.

    An algorithm that learns is asked for trial k when exactly the trials up to k - slots have been
    told, whichever others have ended: so what it chooses does not depend on how fast tasks are.
    """
    running: dict[int, RunningTrial] = {}
    asked = told = 0
    while len(table.records) < algorithm.trials:
        if interrupt.asked:
            return INTERRUPTED
        while algorithm.learns and told <= asked - runner.slots and told in table.records:
            algorithm.tell(table.records[told])
            told += 1
        ready = not algorithm.learns or told > asked - runner.slots
        if asked < algorithm.trials and len(running) < runner.slots and ready:
            earlier = table.earlier.get(asked)
            arguments = algorithm.ask(asked, earlier.arguments if earlier else None)
            if earlier is not None:
                table.note(TrialOutcome(earlier))
            else:
                try:
                    trial = Proposed(asked, arguments, algorithm.pruning(), table.best)
                    running[asked] = runner.start(trial)
                except SearchInterrupted:
                    return INTERRUPTED
            asked += 1
            continue
        ended = [number for number, trial in running.items() if trial.done()]
        for number in ended:
            table.add(running.pop(number).result())
        if not ended:
            time.sleep(WAIT_SECONDS)
    for number in range(told, algorithm.trials):
        algorithm.tell(table.records[number])
    return None


def _model(table: TrialTable, spec: SearchSpec, placements: Placements) -> TrainedModel | None:
    """Return the trained model of the best trial, if there is one."""
    outcome = table.best_outcome
    if outcome is None:
        return None
    trained, arguments = outcome.trained, outcome.record.arguments
    if trained is None:
        weights, history = outcome.weights, outcome.history
        if history is None:
            assert table.folder is not None
            weights, history = table.folder.model(outcome.record.number)
        own = spec.trainer_of(arguments)
        placed = placements.of(own, arguments)
        fit = LocalFit(placed.training, placed.validation, placed.float_dtype)
        trained = fit.trained(own, list(weights), weights.__getitem__, history)
    return trained if trained.best is None or not spec.objective.best else trained.best


def _algorithm(
    algorithm: str | Optuna, spec: SearchSpec, trials: int | None, seed: int, search_id: str
) -> Algorithm:
    """Return the algorithm that the user asked for."""
    if algorithm == "grid":
        return Grid(spec.space, trials)
    if algorithm == "random":
        return Random(spec.space, trials, seed)
    options = algorithm if isinstance(algorithm, Optuna) else Optuna()
    return OptunaSearch(options, spec, trials, seed, search_id)


def _objective(trainer: Trainer, metric: str) -> Objective:
    validation = trainer.validation
    assert validation is not None
    directions = Scorer(trainer.objective, tuple(resolve(validation.metrics))).higher_is_better
    return Objective(metric, directions[metric], validation.best == metric)


def _described(
    spec: SearchSpec, algorithm: str | Optuna, together: bool, seed: int
) -> dict[str, str]:
    """Return what is searched, in words: what must be the same for a search to go on."""
    told = describe_trainer(spec.trainer)
    for name in ("callbacks", "validation", "checkpoint"):
        told.pop(name, None)
    validation, options = spec.trainer.validation, algorithm
    assert validation is not None
    if isinstance(algorithm, Optuna):
        options = f"optuna, {describe(algorithm.sampler)}, {describe(algorithm.pruner)}"
    return {
        "space": describe(spec.space),
        "metric": spec.objective.metric,
        "algorithm": str(options),
        "trials run": "side by side" if together else "one after another",
        "seed": str(seed),
        "validation": describe([validation.every, validation.best]),
        **{f"trainer.{name}": text for name, text in told.items()},
    }


_COUNT = Rule(
    remedy="give a whole number of at least 1, or None", fits=lambda v: v is None or is_whole(v, 1)
)
ARGUMENTS = {
    "trainer": Rule(remedy="give a sparkdl.Trainer", kind=Trainer),
    "space": Rule(remedy='give a mapping, such as {"optimizer.lr": [0.01, 0.1]}', kind=Mapping),
    "trials": _COUNT,
    "parallel": _COUNT,
    "seed": Rule(
        remedy="give a whole number", fits=lambda v: isinstance(v, int) and not isinstance(v, bool)
    ),
}
"""The rules of arguments that need no other one."""


def _problems_of_search(
    trainer: Any, space: Any, metric: Any, algorithm: Any, parallel: Any, connected: bool
) -> Iterator[str]:
    """Yield what arguments of :func:`sparkdl.tune.search` that are right alone have wrong together.

    In a session of Spark Connect (``connected``) trials are fits of gangs.
    """
    if not isinstance(trainer, Trainer):
        return
    if isinstance(space, Mapping):
        yield from problems_of_names(trainer, space)
    if trainer.validation is None:
        yield (
            "the trainer has no validation, and a search compares trials by one: give "
            "Trainer(validation=sparkdl.Validation(df, metrics=[...]))."
        )
    else:
        names = scalar_names(trainer.validation.metrics)
        if metric not in names:
            yield (
                f'metric="{metric}" is not in the validation, which has {", ".join(names)}.'
                f"{nearest(str(metric), names)}"
            )
    if not isinstance(algorithm, Optuna) and algorithm not in ALGORITHMS:
        yield (
            f"algorithm={shown(algorithm)}: use one of {', '.join(ALGORITHMS)}, or tune.Optuna(...)."
            f"{nearest(str(algorithm), ALGORITHMS)}"
        )
    if parallel != 1:
        for wrong, what in (
            (trainer.engine == "gang" and not connected, 'engine="gang"'),
            (trainer.checkpoint is not None, "checkpoint"),
            (trainer.keep_optimizer_state, "keep_optimizer_state"),
        ):
            if wrong:
                yield (
                    f"the trainer has {what}, and trials side by side are short fits by the local "
                    "engine: leave it out, or give parallel=1, which makes one distributed trial "
                    "after another."
                )
