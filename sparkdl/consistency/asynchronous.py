"""The asynchronous model: groups of replicas advance at their own pace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparkdl.consistency.base import MOST, Consistency, problems_of_delay
from sparkdl.consistency.turns import MOST_GROUPS, commits_of, quorum_of
from sparkdl.errors import ParameterError, counted, shown
from sparkdl.plain import make_plain
from sparkdl.replica.iteration import Decisions

SCALES = ("auto", "root", "share", None)


@dataclass(frozen=True, kw_only=True)
class Asynchronous(Consistency):
    """Groups of replicas compute gradients at their own pace; each is applied as it arrives.

    Inside a group replicas are synchronous. A group computes its gradient on the newest weights that
    there are when it begins. When the gradient arrives, it is applied to the weights that are the
    newest then, which may have made any number of steps in between. An iteration ends when as many
    gradients have been applied as there are groups, of whichever groups. The history has the order
    of the steps and the staleness of each gradient (:attr:`sparkdl.History.commits`), and
    ``fit(replay=history)`` repeats them with the same bits.

    Attributes:
        quorum: The number of gradients that are averaged to make a step, which divides ``groups``.
            With all of them the result has the bits of :class:`sparkdl.Synchronous`.
        staleness: The number of gradients by which a group may be ahead of the slowest when it begins
            another. None: any number, so that nobody waits.
        groups: The number of groups, which divides the number of replicas. None: each replica is one.
        scale: What multiplies the learning rate in a step with the share k of all groups: "share": k;
            "root": the root of k; None: nothing; "auto": the root for an optimizer whose first step
            is the same for twice the gradient, such as Adam, otherwise the share.
    """

    quorum: int = 1
    staleness: int | None = None
    groups: int | None = None
    scale: str | None = "auto"

    def __post_init__(self) -> None:
        make_plain(self)

    @property
    def keep(self) -> int:  # type: ignore[override]
        """Return the number of versions that may be read: versions stay as long as they are needed."""
        return MOST

    def groups_of(self, replicas: int) -> int:
        """Return the number of groups.

        Raises:
            ParameterError: ``replicas`` cannot be divided so.
        """
        problem = self._problem_of_groups(replicas)
        if problem:
            raise ParameterError(problem)
        return self.groups or replicas

    def _problem_of_groups(self, replicas: int) -> str:
        groups = self.groups or replicas
        if replicas % groups:
            return (
                f"consistency={shown(self)} with {counted(replicas, 'replica')}: groups have "
                "equally many replicas. Give groups= a divisor of the number of replicas, or set "
                "replicas=."
            )
        if groups % self.quorum:
            return (
                f"consistency={shown(self)}: the {groups} gradients of an iteration make no "
                "whole number of "
                f"steps with {self.quorum} each. Give quorum= a divisor of {groups}."
            )
        if self.staleness is not None and 1 < self.quorum < groups:
            return (
                f"consistency={shown(self)} with {groups} groups: the slowest group would wait "
                "for others "
                "that wait for it. Use quorum=1, or leave staleness out."
            )
        if groups >= MOST_GROUPS:
            return (
                f"consistency={shown(self)} with {groups} groups: give groups= below {MOST_GROUPS}."
            )
        return ""

    def check_recorded(self, number: int, decisions: Decisions, groups: int) -> None:
        """Check that what is recorded of an iteration can be repeated.

        Args:
            number: The number of the iteration, from 1.
            decisions: What is recorded of it.
            groups: The number of groups of the run that repeats it.

        Raises:
            ParameterError: The recorded run had other groups or another quorum.
        """
        found, quorum = len(commits_of(decisions)), quorum_of(decisions)
        there, here = f"{found} gradients", f"{groups} groups"
        if found == groups:
            there, here = f"steps of {quorum} gradients", f"quorum={self.quorum}"
        if found != groups or quorum != self.quorum:
            raise ParameterError(
                f"replay: iteration {number} of the history has {there}, and this run has {here}: "
                "train with the replicas= and consistency= of the recorded run."
            )

    def problems(self) -> Iterator[str]:
        """See :class:`sparkdl.consistency.base.Consistency`, also for the method below."""
        for name, least in (("quorum", 1), ("groups", 1), ("staleness", 0)):
            value = getattr(self, name)
            if value is None and name != "quorum":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                yield f"{name}={shown(value)}: give a whole number of at least {least}."
        if self.scale not in SCALES:
            yield f'scale={shown(self.scale)}: give "auto", "root", "share" or None.'

    def problems_with(self, trainer: Any) -> Iterator[str]:
        what = "consistency=Asynchronous"
        if trainer.engine == "gang":
            yield (
                f'{what} with engine="gang": its ranks sum gradients at every step, and wait for one '
                'another. Use engine="shuffle".'
            )
        yield from problems_of_delay(what, trainer)
        if trainer.precision == "fp16":
            yield (
                f'{what} with precision="fp16": the loss scale is one for all gradients of an '
                'iteration. Use precision="bf16".'
            )
        if trainer.ema is not None:
            yield (
                f"{what} with ema={shown(trainer.ema)}: its decay is one for steps with all gradients. "
                "Leave one of the two out."
            )
        if trainer.histograms is not None:
            yield (
                f"{what} with histograms: there is no gradient of an iteration. Leave one of the two "
                "out."
            )
        if trainer.clip_norm is not None and trainer.slices != 1:
            yield (
                f"{what} with clip_norm={shown(trainer.clip_norm)}: slices would wait for one another "
                "in each step. Use slices=1, or clip_value."
            )
        if isinstance(trainer.replicas, int):
            problem = self._problem_of_groups(trainer.replicas)
            if problem:
                yield problem
