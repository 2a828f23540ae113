"""A client of Spark Connect asks rank 0 by a function that the server runs. No Spark."""

from __future__ import annotations

import base64
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle

from sparkdl.connect import news
from sparkdl.connect.news import ControlClient, answering
from sparkdl.gang import connect

pytestmark = pytest.mark.gang


class Session:
    """A session whose server plans each query by the function's ``analyze``.

    Attributes:
        shown: The texts and arguments of the queries, which Spark shows in its UI and event log.
    """

    def __init__(self) -> None:
        self.udtf, self.shown = self, list[str]()

    def register(self, name: str, function: Any) -> None:
        self._function = cloudpickle.loads(cloudpickle.dumps(function.func))

    def sql(self, text: str, args: dict[str, str] | None = None) -> Any:
        self.shown.append(text)
        if args is None:
            return None
        self.shown += args.values()
        return self._function.analyze(SimpleNamespace(value=args["text"]))


def test_rank_0_answers_and_the_key_is_not_shown() -> None:
    session = Session()
    client = ControlClient(session, ("127.0.0.1",))
    assert client.ask("nobody there") is None
    with answering("127.0.0.1", client.address, lambda question: [question, "heard"]):
        assert client.ask("how far") == ["how far", "heard"]
    client.close()
    shown = [text.encode() for text in session.shown]
    shown += [base64.b64decode(text) for text in session.shown if " " not in text]
    assert len(shown) > len(session.shown)
    assert not any(client.address.key in text for text in shown)


def test_a_question_that_fails_is_the_only_one() -> None:
    """An interrupt must reach rank 0 in the next one."""
    session, failures = Session(), [ArithmeticError()]

    def answer(question: str) -> str:
        if failures:
            raise failures.pop()
        return question

    client = ControlClient(session, ("127.0.0.1",))
    with answering("127.0.0.1", client.address, answer):
        assert client.ask("fails") is None
        assert client.ask("end") == "end"


@pytest.mark.parametrize(("failures", "heard"), [(4, "how far"), (5, None)])
def test_a_server_that_fails_at_first_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, failures: int, heard: str | None
) -> None:
    session = Session()
    works, left = session.sql, [OSError()] * failures

    def sql(*args: Any, **others: Any) -> Any:
        if left:
            raise left.pop()
        return works(*args, **others)

    monkeypatch.setattr(session, "sql", sql)
    client = ControlClient(session, ("127.0.0.1",))
    with answering("127.0.0.1", client.address, lambda question: question):
        assert [client.ask("how far") for _ in range(failures)] == [None] * failures
        assert client.ask("how far") == heard


def test_nobody_waits_for_a_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news, "SERVER_SECONDS", 0.1)
    session, over = Session(), threading.Event()
    monkeypatch.setattr(session, "sql", lambda *_, **__: over.wait(60))
    client = ControlClient(session, ())
    began = time.monotonic()
    assert client.ask("how far") is None
    over.set()
    assert time.monotonic() < began + 30


class Gang:
    """A session, a DataFrame and a follower of a gang whose query ends when ``times`` calls were made:
    those that ask rank 0, of which the first fails, or those that interrupt the query."""

    session_id, known = "gang", 0

    def __init__(self, times: int) -> None:
        self.sparkSession, self._left = self, threading.Semaphore(0)
        self._times, self._called = times, False
        self.begun, self.threads = threading.Event(), list[threading.Thread]()

    def mapInArrow(self, *_: Any, **__: Any) -> Gang:
        return self

    def toArrow(self) -> pa.Table:
        self.begun.set()
        for _ in range(self._times):
            assert self._left.acquire(timeout=30)
        self.begun.clear()
        return pa.table({})

    def ask(self) -> bool:
        self._left.release()
        if not self._called:
            self._called = True
            raise ArithmeticError
        return True

    def interruptTag(self, tag: str) -> None:
        self.nothing()
        self._left.release()

    def getTags(self) -> set[str]:
        return set()

    def nothing(self, *_: Any) -> None:
        self.threads.append(threading.current_thread())

    addTag = removeTag = registerProgressHandler = removeProgressHandler = nothing


@pytest.mark.parametrize("seconds", [60.0, -1.0])
def test_a_gang_is_followed_until_it_ends(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark may miss an interrupt of a query that it has not begun with."""
    monkeypatch.setattr(connect, "ASK_SECONDS", 0.0)
    monkeypatch.setattr(connect, "SILENT_SECONDS", seconds)
    monkeypatch.setattr(connect, "accompanied", lambda task: task)
    gang = Gang(times=2)
    assert connect.run_led(gang, None, 2, None, gang) == {}


def test_an_interrupt_finds_no_call_of_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC would keep a lock for good. The query ends, also if its first interrupt is missed."""
    monkeypatch.setattr(connect, "accompanied", lambda task: task)
    gang = Gang(times=2)

    def interrupt() -> None:
        assert gang.begun.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # which tests may have changed
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            connect.run_led(gang, None, 2, None)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not gang.begun.is_set()
    assert threading.main_thread() not in gang.threads
