"""The algorithms that choose the values of each trial: all combinations, random ones, or Optuna's."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import ParameterError, optional_library
from sparkdl.loop.callbacks import Callback, StopTraining
from sparkdl.loop.state import TrainState
from sparkdl.tune.arguments import SearchSpec
from sparkdl.tune.folder import FAILED, PRUNED, PRUNING, Objective, TrialRecord
from sparkdl.tune.space import Choice, Domain

logger = logging.getLogger("sparkdl")
TRIALS = 16
"""The number of trials if none is given, unless the values have fewer combinations."""


class Algorithm:
    """A choice of values for trial after trial.

    What it chooses is a function of the seed, the number of the trial, and the records that it was
    told before.
    """

    trials: int
    """The number of trials."""
    learns: bool = False
    """True if it must be told the earlier records, in their order, before it is asked."""

    def ask(self, number: int, known: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Return the values of a trial, as they are shown.

        Args:
            number: The number of the trial; the calls have the numbers 0, 1, 2, ...
            known: The values, if the trial has been made already.
        """
        raise NotImplementedError

    def pruning(self) -> Callback | None:
        """Return the callback that stops the trial asked for last if it is not worth going on; by
        default None."""
        return None

    def tell(self, record: TrialRecord) -> None:
        """Take the record of a trial into account; by default nothing is done."""


def combinations(space: Mapping[str, Domain]) -> float:
    """Return the number of combinations of the values of a space, or infinity."""
    return math.prod(domain.size for domain in space.values())


def trials_that_differ(space: Mapping[str, Domain], trials: int | None, default: int) -> int:
    """Return the number of trials, at most that of combinations, since each is tried once."""
    size = combinations(space)
    if trials is not None and trials > size:
        logger.warning(
            "trials=%d: the values of the space have only %d combinations, and each is tried once.",
            trials,
            size,
        )
    return int(min(default if trials is None else trials, size))


class Grid(Algorithm):
    """All combinations of the values of a space, the last argument varying fastest."""

    def __init__(self, space: Mapping[str, Domain], trials: int | None) -> None:
        endless = [name for name, domain in space.items() if not isinstance(domain, Choice)]
        if endless:
            raise ParameterError(
                f'algorithm="grid" tries all combinations of values, and space["{endless[0]}"] is a '
                'range: give a list of values, or take algorithm="random".'
            )
        self._space = {n: d.labels for n, d in space.items() if isinstance(d, Choice)}
        self.trials = trials_that_differ(space, trials, int(combinations(space)))
        self._combinations = itertools.product(*self._space.values())

    def ask(self, number: int, known: Mapping[str, Any] | None) -> Mapping[str, Any]:
        return dict(zip(self._space, next(self._combinations), strict=True))


class Random(Algorithm):
    """Random values, the same ones only once. More trials begin with those of fewer."""

    def __init__(self, space: Mapping[str, Domain], trials: int | None, seed: int) -> None:
        self._space, self._seed = space, seed
        self.trials = trials_that_differ(space, trials, TRIALS)
        self._endless = math.isinf(combinations(space))
        self._asked: set[str] = set()

    def ask(self, number: int, known: Mapping[str, Any] | None) -> Mapping[str, Any]:
        generators = {name: random.Random(f"{self._seed}/{number}/{name}") for name in self._space}
        while True:
            drawn = {name: d.draw(generators[name]) for name, d in self._space.items()}
            if self._endless or repr(drawn) not in self._asked:
                self._asked.add(repr(drawn))
                return drawn


SEARCH, NUMBER, REASON = "sparkdl:search", "sparkdl:trial", "sparkdl:reason"
"""The user attributes of a trial in an Optuna storage."""


@dataclass(frozen=True, kw_only=True)
class Optuna:
    """The settings of a search with Optuna; ``algorithm="optuna"`` has all defaults.

    It needs the extra ``tune``, on the driver and, for trials side by side, on the executors.
    """

    sampler: Callable[..., Any] | None = None
    """A class of ``optuna.samplers`` or a ``partial`` of one, which is called with ``seed=`` for each
    trial. None is ``TPESampler``."""
    pruner: Any = None
    """A pruner of ``optuna.pruners``, which is asked after each validation. None is Optuna's default,
    ``MedianPruner()``; ``NopPruner()`` stops nothing."""
    storage: Any = None
    """A storage of Optuna, or the URL of its database, to which finished trials are added. The trials
    that are there count as known, except failed ones. None keeps none."""
    study_name: str | None = None
    """The name of the study in the storage; None is "sparkdl"."""


class OptunaSearch(Algorithm):
    """The algorithm that asks an Optuna sampler.

    A study in memory is made anew for each question, of the trials that are known by then. So the
    answer depends on nothing else, and a search that goes on after a break has the same trials.
    """

    learns = True

    def __init__(
        self,
        options: Optuna,
        spec: SearchSpec,
        trials: int | None,
        seed: int,
        search_id: str,  # by which a storage knows the trials of this search
    ) -> None:
        self._optuna = library()
        self._options, self._space, self._seed = options, spec.space, seed
        self._objective, self._id = spec.objective, search_id
        self.trials = TRIALS if trials is None else trials
        if self.trials > combinations(spec.space):
            logger.warning(
                "Optuna makes %d trials, and the values of the space have only %d combinations, so "
                'some are tried again: algorithm="grid" tries each once.',
                self.trials,
                combinations(spec.space),
            )
        self._sampler = options.sampler or self._optuna.samplers.TPESampler
        self._pruner = options.pruner or self._optuna.pruners.MedianPruner()
        if not callable(self._sampler):
            raise ParameterError(
                "Optuna(sampler=...) is already built; give the class or a partial of it, such as "
                "partial(optuna.samplers.TPESampler, n_startup_trials=5): each trial has one of its "
                "own, with a seed."
            )
        self._storage = self._opened()
        self._before, stored = self._in_storage()
        self._stored = stored
        self._own: list[Any] = []

    def ask(self, number: int, known: Mapping[str, Any] | None) -> Mapping[str, Any]:
        with quiet(self._optuna):
            study = study_of(
                [*self._before, *self._own],
                self._objective,
                self._name,
                self._sampler_of(number),
                self._pruner,
            )
            if known is not None:
                study.enqueue_trial(dict(known))
            trial = study.ask()
            found = {name: domain.suggest(trial, name) for name, domain in self._space.items()}
            self._own.append(copy.deepcopy(study.trials[-1]))
        return found

    def pruning(self) -> Callback | None:
        earlier = [*self._before, *self._own[:-1]]
        if isinstance(self._pruner, self._optuna.pruners.NopPruner):
            return None
        return Pruning(self._pruner, earlier, self._objective, self._name)

    def tell(self, record: TrialRecord) -> None:
        asked = self._own[record.number]
        states = self._optuna.trial.TrialState
        state = {FAILED: states.FAIL, PRUNED: states.PRUNED}.get(record.status, states.COMPLETE)
        if state == states.COMPLETE and math.isnan(record.value):
            state = states.FAIL
        told = self._optuna.trial.create_trial(
            state=state,
            value=None if state == states.FAIL else record.value,
            params=asked.params,
            distributions=asked.distributions,
            intermediate_values={score.iteration: score.value for score in record.scores},
            system_attrs={k: v for k, v in asked.system_attrs.items() if k != "fixed_params"},
            user_attrs={SEARCH: self._id, NUMBER: record.number, REASON: record.reason},
        )
        self._own[record.number] = told
        if self._storage is not None and record.number not in self._stored:
            try:
                with quiet(self._optuna):
                    self._storage.add_trial(told)
            except Exception as error:
                logger.warning("trial %s is not in Optuna's storage: %s", record.number, error)

    @property
    def _name(self) -> str:
        return self._options.study_name or "sparkdl"

    def _sampler_of(self, number: int) -> Any:
        digest = hashlib.blake2b(f"{self._seed}/{number}".encode(), digest_size=4).digest()
        return self._sampler(seed=int.from_bytes(digest, "little"))

    def _opened(self) -> Any:
        """Return the study in the storage, or None without a storage."""
        if self._options.storage is None:
            return None
        wanted = _direction(self._objective)
        try:
            with quiet(self._optuna):
                study = self._optuna.create_study(
                    storage=self._options.storage,
                    study_name=self._name,
                    direction=wanted,
                    load_if_exists=True,
                )
        except Exception as error:
            raise ParameterError(
                f"Optuna(storage=...): the study cannot be opened: {type(error).__name__}: {error}"
            ) from error
        if study.direction.name.lower() != wanted:
            raise ParameterError(
                f'the study "{self._name}" in the storage wants to {study.direction.name.lower()} its '
                f'value, and "{self._objective.metric}" is to be {wanted}d: give another study_name.'
            )
        return study

    def _in_storage(self) -> tuple[list[Any], set[int]]:
        """Return the trials of others in the storage, and the numbers of those of this search."""
        if self._storage is None:
            return [], set()
        states = self._optuna.trial.TrialState
        found = self._storage.get_trials(states=(states.COMPLETE, states.PRUNED, states.FAIL))
        own = {t.user_attrs[NUMBER] for t in found if t.user_attrs.get(SEARCH) == self._id}
        others = [
            trial
            for trial in found
            if trial.user_attrs.get(SEARCH) != self._id and trial.state != states.FAIL
        ]
        return others, own


class Pruning(Callback):
    """A callback that asks an Optuna pruner after each validation, and stops a trial it gives up.

    It compares with the trials that were known when this one was chosen, so its decision does not
    depend on how fast others are. It travels to the task of a trial.
    """

    def __init__(
        self, pruner: Any, earlier: Sequence[Any], objective: Objective, name: str
    ) -> None:
        self._pruner, self._earlier = pruner, list(earlier)
        self._objective, self._name = objective, name
        self._trial: Any = None
        self._reported = 0  # validations

    def on_fit_start(self, trainer: Any, state: TrainState) -> None:
        self._ask(state)  # of a trial that goes on from a checkpoint

    def on_validation_end(self, trainer: Any, state: TrainState) -> None:
        self._ask(state)

    def _ask(self, state: TrainState) -> None:
        """Report the validations that are new, and stop the trial if the pruner says so."""
        new = state.validations[self._reported :]
        self._reported += len(new)
        if not new:
            return
        optuna = library()
        with quiet(optuna):
            if self._trial is None:
                sampler = optuna.samplers.RandomSampler(seed=0)
                study = study_of(self._earlier, self._objective, self._name, sampler, self._pruner)
                self._trial = study.ask()
            for one in new:
                value = one.metrics.get(self._objective.metric, math.nan)
                if math.isnan(value):
                    continue
                self._trial.report(value, one.iteration)
                if self._trial.should_prune():
                    raise StopTraining(PRUNING)


def study_of(
    trials: Sequence[Any], objective: Objective, name: str, sampler: Any, pruner: Any
) -> Any:
    """Return a study in memory that holds ``trials``."""
    study = library().create_study(
        study_name=name, direction=_direction(objective), sampler=sampler, pruner=pruner
    )
    study.add_trials(trials)
    return study


def _direction(objective: Objective) -> str:
    return "maximize" if objective.higher else "minimize"


def library() -> Any:
    """Return the module ``optuna``, which trials side by side need on the executors too."""
    return optional_library("optuna", 'algorithm="optuna"', "tune")


@contextlib.contextmanager
def quiet(optuna: Any) -> Iterator[None]:
    """Keep Optuna from logging each study that is made inside the block."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, logging.WARNING))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
