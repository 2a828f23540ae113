"""The way in which a client of Spark Connect asks rank 0 while its gang runs.

[Note: how a client reaches rank 0] Nothing comes out of a task before it ends, and all slots may be
taken. But the server runs Python for its client without a slot: it calls the ``analyze`` of a table
function when it plans a query. That of :func:`asking_rank_0` connects to rank 0 and returns its answer
as the name of a column. The client does not know the node of rank 0; it has chosen port and key, and
names the nodes that it has seen. Where a part of this does not work (the server has no sparkdl, the
port is taken, no connection from there to executors is allowed), nobody answers, and the gang runs
without. Spark shows the text of a query, its plan and its arguments in its UI and its event log, but
not the pickled function: the key is in that.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import pickle
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql.types import StringType, StructType

from sparkdl.errors import SparkdlError
from sparkdl.gang.channel import Listener, connect

logger = logging.getLogger("sparkdl")
FIRST_PORT, PORTS = 20_000, 10_000
"""The ports from which a client chooses: below those that systems give to outgoing connections."""
HOST_SECONDS, ANSWER_SECONDS = 1.0, 5.0
"""The longest time that a node takes to accept a connection, and that rank 0 takes to answer."""
SERVER_SECONDS = 20.0
"""The time in which the server must have asked: a client that waits for it passes no interrupt on."""


@dataclass(frozen=True)
class ControlAddress:
    """The port on which rank 0 listens, and the key by which both sides know each other."""

    port: int
    key: bytes = field(repr=False)

    @staticmethod
    def new() -> ControlAddress:
        """Return an address that nobody else has, as far as is known."""
        return ControlAddress(FIRST_PORT + secrets.randbelow(PORTS), secrets.token_bytes(32))


class ControlServer:
    """The end in rank 0: a thread that answers questions in the block. ``answer`` must be quick."""

    def __init__(self, host: str, address: ControlAddress, answer: Callable[[Any], Any]) -> None:
        self._host, self._address, self._answer = host, address, answer
        self._over = threading.Event()

    def __enter__(self) -> ControlServer:
        try:
            listener = Listener(self._host, self._address.port, self._address.key)
        except OSError:  # the port is taken
            return self
        threading.Thread(
            target=self._serve, args=(listener,), name="sparkdl-control", daemon=True
        ).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()  # the thread ends by itself; rank 0 need not wait for it

    def _serve(self, listener: Listener) -> None:
        with contextlib.closing(listener):
            while not self._over.is_set():
                with contextlib.suppress(Exception):  # the next question may be answered
                    arrived = listener.accept(0.2)
                    if arrived is not None:
                        channel, question = arrived
                        with contextlib.closing(channel):
                            channel.send(self._answer(question))


def asking_rank_0(address: ControlAddress) -> type:
    """Return the table function whose ``analyze`` asks rank 0, on the server; see the note above."""

    class AskRankZero:
        """A class that pickles by value, and so with the address."""

        @staticmethod
        def analyze(text: Any) -> Any:
            """Return a schema with one column, whose name is the packed host and answer."""
            from pyspark.sql.udtf import AnalyzeResult

            answer = _answer(address, *_unpacked(text.value)[:2])
            return AnalyzeResult(StructType().add(_packed(answer), StringType()))

        def eval(self, text: str) -> Any:
            """Yield nothing: the function is never run."""
            yield from ()

    return AskRankZero


def _answer(address: ControlAddress, hosts: tuple[str, ...], question: Any) -> Any:
    """Return the host of rank 0 and its answer, or None if nobody answers."""
    until = time.monotonic() + ANSWER_SECONDS
    for host in hosts:
        left = until - time.monotonic()
        with contextlib.suppress(OSError, SparkdlError):
            seconds = max(0.1, min(HOST_SECONDS, left))
            channel = connect(host, address.port, address.key, question, seconds, ANSWER_SECONDS)
            with contextlib.closing(channel):
                return host, channel.receive(ANSWER_SECONDS)
    return None


class ControlClient:
    """The client's end; rank 0 may be on any of ``hosts``."""

    def __init__(self, session: Any, hosts: tuple[str, ...]) -> None:
        self.address = ControlAddress.new()
        self._session, self._hosts = session, hosts
        self._function = f"sparkdl_ask_rank_0_{secrets.token_hex(4)}"  # other fits have their own
        self._asked = 0
        self._works: bool | None = None
        self._answered = False

    def ask(self, question: Any) -> Any | None:
        """Return the answer of rank 0, or None if nobody answers."""
        if self._works is False:
            return None
        self._asked += 1  # the server keeps the plans of equal questions
        text = _packed((self._hosts, question, self._asked))
        answers: list[Any] = []
        asking = threading.Thread(
            target=self._ask, args=(text, answers), name="sparkdl-question", daemon=True
        )
        asking.start()
        asking.join(SERVER_SECONDS)
        if not answers or answers[0] is None:
            return None
        self._answered = True
        host, answer = answers[0]
        self._hosts = (host,)
        return answer

    def _ask(self, text: str, answers: list[Any]) -> None:
        """Add what the server says to ``answers``; called in a thread, which nobody waits for if Spark
        does not answer."""
        try:
            self._prepare()
            frame = self._session.sql(f"SELECT * FROM {self._function}(:text)", args={"text": text})
            (name,) = frame.schema.names
            answers.append(_unpacked(name))
        except Exception as error:
            logger.debug("rank 0 cannot be asked: %s", error)
            self._works = self._answered  # the server is busy, or has never been able to

    def _prepare(self) -> None:
        if self._works is None:
            from pyspark.sql.functions import udtf

            function = udtf(asking_rank_0(self.address), useArrow=False)
            self._session.udtf.register(self._function, function)
            self._works = True

    def close(self) -> None:
        """Remove the function from the session."""
        if self._works:
            with contextlib.suppress(PySparkException):
                self._session.sql(f"DROP TEMPORARY FUNCTION IF EXISTS {self._function}")


def _packed(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _unpacked(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))
