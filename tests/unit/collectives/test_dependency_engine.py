"""The dependency engine: the results of one operation after another, with as many at once as may be."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.collectives.engine import Engine
from sparkdl.errors import ParameterError

PATIENCE = 10.0
TAGS = range(4)
LANE = "lane"


class Task(NamedTuple):
    read: frozenset[int]
    mutate: frozenset[int]
    ordered: bool
    fails: bool
    priority: int
    pause: float


TASKS = st.lists(
    st.builds(
        Task,
        st.frozensets(st.sampled_from(TAGS), max_size=2),
        st.frozensets(st.sampled_from(TAGS), max_size=2),
        st.booleans(),
        st.sampled_from([False] * 6 + [True]),
        st.integers(-1, 1),
        st.sampled_from([0.0, 0.0, 0.0005]),
    ),
    max_size=14,
)


class Trouble(Exception):
    """The number of the task that raised it."""


class World:
    """Values by tag, and checks that nobody reads or changes one while another changes it."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = dict.fromkeys(TAGS, 0)
        self.lock, self.reading, self.changing = threading.Lock(), [0] * len(TAGS), set()
        self.lane: list[int] = []

    def run(self, number: int, task: Task) -> Any:
        reads = task.read - task.mutate
        with self.lock:
            assert not self.changing & (task.read | task.mutate)
            assert not any(self.reading[tag] for tag in task.mutate)
            self.changing |= task.mutate
            for tag in reads:
                self.reading[tag] += 1
            if task.ordered:
                self.lane.append(number)
        seen = tuple(self.values[tag] for tag in sorted(task.read | task.mutate))
        time.sleep(task.pause)
        with self.lock:
            self.changing -= task.mutate
            for tag in reads:
                self.reading[tag] -= 1
        if task.fails:
            raise Trouble(number)
        for tag in task.mutate:
            self.values[tag] = hash((number, seen))
        return seen


def one_after_another(tasks: list[Task]) -> tuple[list[Any], World]:
    """The results, or the number of the task whose failure reaches it."""
    world, found, spoilt = World(), [], {}
    for number, task in enumerate(tasks):
        own = {*task.mutate, *([LANE] if task.ordered else [])}
        reached = {spoilt[tag] for tag in own | task.read if tag in spoilt}
        result: Any = frozenset(reached)
        if not reached:
            try:
                result = world.run(number, task)
            except Trouble:
                result = frozenset([number])
        if isinstance(result, frozenset):
            for tag in own:
                spoilt[tag] = min(result)
        found.append(result)
    return found, world


@settings(deadline=None, max_examples=50)
@given(TASKS, st.integers(1, 4))
def test_results_are_those_of_one_task_after_another(tasks, threads):
    expected, alone = one_after_another(tasks)
    world, futures = World(), []
    engine = Engine(threads)
    for number, task in enumerate(tasks):
        futures.append(
            engine.push(
                partial(world.run, number, task),
                read=task.read,
                mutate=task.mutate,
                ordered=task.ordered,
                priority=task.priority,
            )
        )
    engine.close()
    for result, future in zip(expected, futures, strict=True):
        error = future.exception(PATIENCE)
        if isinstance(result, frozenset):
            assert isinstance(error, Trouble), error
        else:
            assert error is None
            assert future.result() == result
    assert world.values == alone.values
    assert world.lane == sorted(world.lane) == alone.lane
    assert all(tag.writer is None or tag.writer.error for tag in engine._tags.values())
    assert not any(tag.readers for tag in engine._tags.values())


def test_readers_run_together_and_the_writer_waits():
    value, together = torch.zeros(1), threading.Barrier(3, timeout=PATIENCE)
    with Engine(threads=3) as engine:
        for _ in range(3):
            engine.push(together.wait, read=[value])  # each returns once all three are there
        engine.push(lambda: value.add_(1), mutate=[value])
        seen = engine.push(lambda: float(value), read=[value])
    assert seen.result() == 1.0


def test_a_tensor_stands_for_itself():
    """Equal tensors are two tags, and equal strings are one."""
    first, met = threading.Event(), []
    with Engine(threads=2) as engine:
        engine.push(partial(first.wait, PATIENCE), mutate=[torch.zeros(2)])
        engine.push(first.set, mutate=[torch.zeros(2)])
        for number in range(20):
            engine.push(partial(met.append, number), mutate=["".join(["na", "me"])])
    assert met == [*range(20)]


def test_the_highest_priority_runs_first():
    begin, order = threading.Event(), []
    with Engine(threads=1) as engine:
        engine.push(partial(begin.wait, PATIENCE))
        for priority in (0, 2, 1, 2):
            engine.push(partial(order.append, priority), priority=priority)
        begin.set()
    assert order == [2, 2, 1, 0]


def test_an_exception_reaches_those_that_depend_on_it():
    def fail() -> None:
        raise Trouble("of one")

    engine = Engine(threads=2)
    failed = engine.push(fail, mutate=["a"])
    futures = {
        "reader": engine.push(int, read=["a"], mutate=["b"]),
        "its reader": engine.push(int, read=["b"]),
        "writer": engine.push(int, mutate=["a"]),
    }
    other = engine.push(int, read=["c"])
    with pytest.raises(Trouble, match="of one"):
        engine.wait()
    late = engine.push(int, read=["b"])
    engine.close()
    assert all(future.exception() is failed.exception() for future in futures.values())
    assert late.exception() is failed.exception()
    assert other.result() == 0


def test_an_operation_can_be_cancelled_with_those_that_need_it():
    begin = threading.Event()
    engine = Engine(threads=1)
    engine.push(partial(begin.wait, PATIENCE))
    cancelled = engine.push(int, mutate=["a"])
    assert cancelled.cancel()
    follower = engine.push(int, read=["a"])
    begin.set()
    engine.close()
    assert isinstance(follower.exception(), CancelledError)


def test_mistakes_are_told():
    for wrong in (0, True):
        with pytest.raises(ParameterError, match=f"threads = {wrong}"):
            Engine(wrong)
    with Engine() as engine:
        with pytest.raises(ParameterError, match="fn is an int"):
            engine.push(3)
        with pytest.raises(ParameterError, match="A tag is no tensor and not hashable"):
            engine.push(int, read=[[1]])
        with pytest.raises(ParameterError, match="The tags are a Tensor: give a list"):
            engine.push(int, mutate=torch.ones(2))
        with pytest.raises(ParameterError, match="The tags are a str: give a list"):
            engine.push(int, read="state")
        for wrong in ("high", None, float("nan")):
            with pytest.raises(ParameterError, match=r"priority=.*: give a number"):
                engine.push(int, priority=wrong)
    with pytest.raises(ParameterError, match="closed"):
        engine.push(int)
    with pytest.raises(ZeroDivisionError), Engine() as engine:
        engine.push(lambda: 1 / 0)
