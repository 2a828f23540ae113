"""The Spark job of an iteration, in its forms.

[Note: what an iteration pays for] An empty job takes Spark 5 ms to be built and submitted, 8 ms a
stage to be launched and run, and 5 ms to bring its results to Python. So

* the RDDs of the next iteration are built while this one runs, and its shuffle files are deleted
  while the next one runs: nothing in the RDDs says what to do, the job is told, see
  :mod:`sparkdl.message`;
* results come through the JVM's future, see :class:`sparkdl.frames.RunningJob`;
* a small model's iteration is one stage, see :class:`sparkdl.step.job.AtOnce`, whose RDD is the same
  for all iterations.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from pyspark.core.rdd import RDD

from sparkdl.frames import RunningJob, map_frames, shuffle_frames, stage_name, zip_frames
from sparkdl.message import post
from sparkdl.step.job import AtOnce, ForwardBackward
from sparkdl.sync.job import Reduce, Synchronize, Update
from sparkdl.sync.records import SeatReport, SliceHandle, SliceReport, Step
from sparkdl.train.places import Places
from sparkdl.train.resources import Resources

AT_ONCE = "forward-backward and synchronization"
SYNCHRONIZATION = "parameter synchronization"


class IterationJobs:
    """Submits iterations. ``slices``: N."""

    def __init__(self, places: Places, slices: int, resources: Resources) -> None:
        self._places, self._slices, self._resources = places, slices, resources
        self._context = resources.context
        self._at_once: RDD | None = None
        self._next: RDD | None = None
        self._next_for: object = None

    def at_once(self, step: Step) -> list[SeatReport] | None:
        """One stage; a report a replica. None: nothing was run, the step is too much to be told."""
        if not post(self._context, step):
            return None
        if self._at_once is None:
            task = AtOnce()
            samples, states = self._places.samples, step.states
            self._at_once = self._places.at_seats(task, samples, states, told=True)
        replicas = len(self._places.tokens)
        return self._run(self._at_once, replicas, AT_ONCE, lambda: self._resources.shuffled(None))

    def in_stages(self, step: Step) -> list[SliceReport]:
        """Forward-backward, then synchronization; a report a slice."""
        if not post(self._context, step):
            told = self._build(step.states, step)
            return self._run(
                told, self._slices, SYNCHRONIZATION, lambda: self._resources.shuffled(told)
            )
        ready = self._next if self._next_for == self._nodes(step.states) else None
        rdd = ready or self._build(step.states)
        self._next = None
        return self._run(
            rdd, self._slices, SYNCHRONIZATION, lambda: self._prepare(rdd, step.states)
        )

    def _prepare(self, running: RDD, states: tuple[SliceHandle, ...]) -> None:
        """While ``running`` runs: delete the shuffle before it, build what probably comes after."""
        self._resources.shuffled(running)
        self._next, self._next_for = self._build(states), self._nodes(states)

    def _nodes(self, states: tuple[SliceHandle, ...]) -> object:
        """What the RDDs depend on."""
        return self._places.samples, self._places.tokens, tuple(s.token for s in states)

    def _run(self, rdd: RDD, count: int, name: str, meanwhile: Callable[[], None]) -> list[Any]:
        """The ``count`` reports of a job; ``meanwhile`` is done while it runs."""
        with stage_name(self._context, name):
            job = RunningJob(rdd, count)
            meanwhile()
        return [pickle.loads(frame) for frame in job.frames()]

    def _build(self, states: tuple[SliceHandle, ...], step: Step | None = None) -> RDD:
        """The RDDs of an iteration; with ``step`` in the task bodies, where it cannot be told."""
        places, told = self._places, step is None
        with stage_name(self._context, "forward-backward"):
            body = ForwardBackward(step)
            gradients = places.at_seats(body, places.samples, states, told=told)
            received = shuffle_frames(gradients, self._slices)
        if places.two_stages:
            return map_frames(zip_frames(received, places.owners), Synchronize(step))
        with stage_name(self._context, "reduce"):
            reduced = map_frames(zip_frames(received, places.owners), Reduce(step))
            received = shuffle_frames(reduced, self._slices)
        return map_frames(zip_frames(received, places.updaters), Update(step))
