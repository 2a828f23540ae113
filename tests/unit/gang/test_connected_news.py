"""What rank 0 of a fit over Spark Connect tells its client, and what it does without one."""

from __future__ import annotations

import logging
import pickle
import time
from typing import Any

import pytest

from sparkdl.connect.news import Question, ReportedProgress
from sparkdl.errors import ParameterError, TrainingError
from sparkdl.gang.led import _packed_error
from sparkdl.loop.state import TrainState


def iterations(progress: ReportedProgress, count: int, seconds: float = 0.0) -> int:
    """Run iterations until the progress asks for the end; return how many."""
    for number in range(1, count + 1):
        time.sleep(seconds)
        progress.on_iteration_end(None, TrainState(iteration=number))
        if progress.interrupt.asked:
            return number
    return count


def test_a_run_ends_some_time_after_its_client(caplog: pytest.LogCaptureFixture) -> None:
    progress = ReportedProgress([])
    progress.patience = 0.1
    assert iterations(progress, 3, 0.05) == 3  # no question yet: nobody can ask
    progress.answer(Question(0, False))
    assert iterations(progress, 2) == 2
    with caplog.at_level(logging.WARNING):
        assert 2 <= iterations(progress, 50, 0.03) < 50
    assert "spark.sparkdl.client.seconds" in caplog.text


def test_a_run_goes_on_while_its_client_asks_or_if_that_is_nothing_to_it() -> None:
    progress = ReportedProgress([])
    progress.answer(Question(0, False))
    time.sleep(0.1)
    assert iterations(progress, 3) == 3
    progress.patience = 0.2
    for _ in range(4):
        progress.answer(Question(0, False))
        assert iterations(progress, 1, 0.1) == 1
    assert not progress.interrupt.asked


def test_the_client_hears_what_comes_before_the_first_iteration() -> None:
    progress = ReportedProgress([])
    assert progress.answer(Question(0, False)).doing == ""
    progress.doing("trying the model")
    progress.describe("Net")
    news = progress.answer(Question(0, False))
    assert (news.doing, news.facts, news.state) == ("trying the model", "Net", None)


class SeveralArguments(Exception):
    """An exception with an ``__init__`` of its own."""

    def __init__(self, code: int, *, place: str) -> None:
        super().__init__(f"{code} at {place}")
        self.code, self.held = code, (one for one in place)


class OtherText(Exception):
    """An exception that words its argument: made of its own text, it would have another one."""

    def __init__(self, code: Any) -> None:
        super().__init__(f"code {code}")


class NoText(SeveralArguments):
    """An exception that nobody can make without its attributes."""

    def __str__(self) -> str:
        return f"its place is {self.held.gi_code.co_name}"


@pytest.mark.parametrize(
    "error",
    [
        SeveralArguments(7, place="here"),
        OtherText(7),
        ParameterError("no"),
        OSError(2, "no", "file"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_of_a_callback_arrives_as_it_was_raised(error: Exception) -> None:
    found = pickle.loads(_packed_error(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert getattr(found, "code", None) == getattr(error, "code", None)


def test_an_exception_that_cannot_travel_is_told() -> None:
    found = pickle.loads(_packed_error(NoText(7, place="abc")))
    assert type(found) is TrainingError
    assert "NoText" in str(found)
