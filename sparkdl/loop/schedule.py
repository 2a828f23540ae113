"""Learning-rate schedules of torch, stepped on the driver on a mirror of the parameter groups.

The values are sent with the iteration, so that the slices, which have the parameters but no
scheduler, use them.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sparkdl.errors import ModelError, kind_of, nearest, text_for_number
from sparkdl.loop.state import TrainState
from sparkdl.slices.optimizer import OptimizerSpec

_log = logging.getLogger("sparkdl")


class Schedule:
    """The hyperparameters of each parameter group at the current iteration.

    ``make`` makes the scheduler of an optimizer; None: there is none. ``metric`` is for
    ReduceLROnPlateau; None is the loss, which must then be the only metric.
    """

    def __init__(
        self,
        plan: OptimizerSpec,
        make: Callable[[torch.optim.Optimizer], Any] | None,
        per: str = "iteration",
        metric: str | None = None,
    ) -> None:
        schedule_targets = plan.schedule_targets()
        self._first = [_hyperparameters(g) for m in schedule_targets for g in m.param_groups]
        self._groups = [group for mirror in schedule_targets for group in mirror.param_groups]
        self._schedulers = [_scheduler(make, mirror) for mirror in schedule_targets] if make else []
        self._per, self._metric = per, metric
        self._totals = [min(_total_steps(s), default=None) for s in self._schedulers]
        self._steps = [0] * len(self._schedulers)
        self._exhausted: set[int] = set()
        self.at = TrainState()
        """The state at which the schedule stands."""
        self._plateaus = [isinstance(s, ReduceLROnPlateau) for s in self._schedulers]

    @property
    def learning_rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for group in self._groups if "lr" in group)

    @property
    def follows_validations(self) -> bool:
        """Return whether the position of a schedule depends on all past validations."""
        return any(self._plateaus)

    def changes(self) -> tuple[Mapping[str, Any], ...] | None:
        """Return the values that differ from the optimizers' own, one mapping for each group.

        Return None if there is no schedule.
        """
        if not self._schedulers:
            return None
        return tuple(
            {k: v for k, v in _hyperparameters(group).items() if first.get(k) != v}
            for group, first in zip(self._groups, self._first, strict=True)
        )

    def after(self, previous: TrainState, current: TrainState) -> None:
        """Advance by the events between two states: iterations, epochs, or validations."""
        for validated in current.validations[len(previous.validations) :]:
            value = validated.metrics.get(self._metric or "loss")
            if value is not None:  # None: there was nothing to measure, or the metric is new
                self._step(self._plateaus, value)
        others = [not plateau for plateau in self._plateaus]
        for _ in range(getattr(current, self._per) - getattr(previous, self._per)):
            self._step(others)
        self.at = current

    def catch_up(self, state: TrainState) -> None:
        """Bring a fresh schedule to the position of a run's schedule after ``state``, bit for bit."""
        self.after(TrainState(), state)

    def check(
        self,
        limit: int | None,
        iterations_per_epoch: int = 1,
        metrics: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        """Check that the schedule fits the run.

        ``metrics`` says whether more of each is better; it is empty without validation.
        """
        if self.follows_validations:
            if not metrics:
                raise ModelError(
                    "schedule ReduceLROnPlateau follows a metric of the validation, but there is "
                    "no validation: pass validation=..., or use a schedule that follows the "
                    "iterations."
                )
            self._check_metric(list(metrics))
            self._tell_of_direction(metrics)
        if limit is None:
            return
        per_epoch = self._per == "epoch"
        steps = -(-limit // iterations_per_epoch) if per_epoch else limit
        for scheduler in self._schedulers:
            for total in _total_steps(scheduler):
                if total < steps:
                    raise ModelError(
                        f"schedule ends after total_steps={total}, and the run has {steps} "
                        f"{'epochs' if per_epoch else 'iterations'}: set total_steps={steps}."
                    )

    def _tell_of_direction(self, metrics: Mapping[str, bool]) -> None:
        """Warn if ReduceLROnPlateau takes what is better for what is worse."""
        metric = self._metric or "loss"
        mode = "max" if metrics[metric] else "min"
        for scheduler in self._schedulers:
            if isinstance(scheduler, ReduceLROnPlateau) and scheduler.mode != mode:
                _log.warning(
                    'schedule ReduceLROnPlateau has mode="%s", and a larger "%s" is %s: the learning '
                    'rate would fall while the metric improves. Give it mode="%s".',
                    *(scheduler.mode, metric, "better" if metrics[metric] else "worse", mode),
                )
                return

    def _step(self, which: Sequence[bool], value: float | None = None) -> None:
        for number, (scheduler, wanted) in enumerate(zip(self._schedulers, which, strict=True)):
            if not wanted or number in self._exhausted:
                continue
            self._steps[number] += 1
            total = self._totals[number]
            if total is not None and self._steps[number] >= total:
                # there are values for total_steps iterations only; torch would leave the curve
                if self._steps[number] > total:
                    self._give_up(number, f"total_steps={total}")
                continue
            groups = scheduler.optimizer.param_groups
            before = [_hyperparameters(group) for group in groups]
            arguments = () if value is None else (value,)
            with warnings.catch_warnings():
                # torch asks for optimizer.step() first; the mirror has nothing to step
                warnings.filterwarnings("ignore", message="Detected call of")
                try:
                    scheduler.step(*arguments)
                except Exception as error:  # at its end: no reason to abort a training
                    for group, values in zip(groups, before, strict=True):
                        group.update(values)
                    self._give_up(number, f"{type(error).__name__}: {error}")

    def _give_up(self, number: int, reason: str) -> None:
        """Keep the values of a scheduler from now on, and log a warning."""
        self._exhausted.add(number)
        scheduler = self._schedulers[number]
        rates = [f"{float(g['lr']):g}" for g in scheduler.optimizer.param_groups if "lr" in g]
        _log.warning(
            "schedule %s cannot make step %d (%s): the learning rate stays at %s",
            type(scheduler).__name__,
            self._steps[number],
            reason,
            ", ".join(rates),
        )

    def _check_metric(self, known: Sequence[str]) -> None:
        """Raise ModelError if it is ambiguous which metric ReduceLROnPlateau follows."""
        metric = self._metric
        if metric not in known and (metric is not None or list(known) != ["loss"]):
            named = (
                "" if metric is None else f' "{metric}" is not one of them.{nearest(metric, known)}'
            )
            raise ModelError(
                "schedule ReduceLROnPlateau follows one metric of the validation, which gives "
                f"{', '.join(known)}: name one of them with schedule_metric.{named}"
            )


def _scheduler(make: Callable[[torch.optim.Optimizer], Any], mirror: torch.optim.Optimizer) -> Any:
    if problem := text_for_number(make):  # some schedulers find out when they step
        raise ModelError(f"the schedule cannot be built: {problem}")
    try:
        scheduler = make(mirror)
    except Exception as error:
        raise ModelError(
            f"schedule cannot be built on the optimizer ({type(error).__name__}: {error}). "
            "Give a partial of a torch.optim.lr_scheduler class, such as "
            "partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100)."
        ) from error
    if not isinstance(scheduler, LRScheduler):
        raise ModelError(
            f"schedule gave {kind_of(scheduler)}, not a torch.optim.lr_scheduler.LRScheduler."
        )
    return scheduler


def _total_steps(scheduler: Any) -> Iterator[int]:
    """Yield the numbers of steps after which a scheduler ends: OneCycleLR, alone or chained."""
    if isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR):
        yield scheduler.total_steps
    if isinstance(scheduler, torch.optim.lr_scheduler.ChainedScheduler):
        for inner in scheduler._schedulers:
            yield from _total_steps(inner)
    if isinstance(scheduler, torch.optim.lr_scheduler.SequentialLR):
        *_, last = zip([0, *scheduler._milestones], scheduler._schedulers, strict=True)
        for total in _total_steps(last[1]):
            yield last[0] + total


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: copy.deepcopy(v) for k, v in group.items() if k != "params"}
