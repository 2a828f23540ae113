"""News of a fit over Spark Connect: rank 0 tells them while it runs, and the client shows them.

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
import math
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql.types import StringType, StructType

from sparkdl.errors import SparkdlError
from sparkdl.gang.channel import Listener, connect
from sparkdl.gang.connect import tell_line
from sparkdl.loop.interrupt import Interrupt, interrupts_held
from sparkdl.loop.progress import Progress, log_line, shows_bar
from sparkdl.loop.state import TrainState
from sparkdl.settings import Settings
from sparkdl.train.spec import TrainerSpec

logger = logging.getLogger("sparkdl")
HIDDEN = "false"
"""The value of ``spark.sparkdl.progress`` with which nothing is shown."""


@dataclass(frozen=True)
class Question:
    """A question to rank 0."""

    known: int  # lines of its log that the client has
    end: bool  # after the current iteration


@dataclass(frozen=True)
class News:
    """The answer of rank 0."""

    facts: str  # "" before training
    state: TrainState | None  # without histograms; None before training
    log: Sequence[tuple[int, str]]  # level and text of further lines
    doing: str = ""  # before training


class ReportedProgress(Progress):
    """The progress of a run in rank 0, which answers the client's questions."""

    patience: float | None = None  # seconds without a question, once there was one; None: no bound

    def __init__(self, log: Sequence[tuple[int, str]]) -> None:
        """Take the lines that rank 0 logs, a list that grows."""
        self.interrupt = Interrupt()
        self._log, self._facts, self._doing = log, "", ""
        self._state: TrainState | None = None
        self._heard: float | None = None

    def doing(self, what: str, detail: Callable[[], str] | None = None) -> None:
        self._doing = what

    def describe(self, facts: str) -> None:
        self._facts = facts

    def answer(self, question: Question) -> News:
        """Answer a question; called in another thread."""
        self._heard = time.monotonic()
        if question.end:
            self.interrupt.asked = True
        state, log = self._state, list(self._log[question.known :])
        known = None if state is None else replace(state, histograms=None)
        return News(self._facts, known, log, self._doing)

    def on_fit_start(self, trainer: Any, state: TrainState) -> None:
        self._state = state

    on_validation_end = on_checkpoint = on_fit_start

    def on_iteration_end(self, trainer: Any, state: TrainState) -> None:
        self._state = state
        if self.patience is None or self._heard is None or self.interrupt.asked:
            return
        silent = time.monotonic() - self._heard
        if silent > self.patience:
            logger.warning(
                "Nothing was heard from the client for %.0f s: the fit ends after iteration %d, as "
                'spark.sparkdl.client.seconds says. resume="latest" continues it.',
                silent,
                state.iteration,
            )
            self.interrupt.asked = True


@dataclass
class FollowedFit:
    """A follower of a fit on the client: it shows the progress, and passes an interrupt on."""

    control: ControlClient
    trainer: TrainerSpec
    ranks: int
    settings: Settings
    progress: Progress
    interrupt: Interrupt
    training: threading.Event  # is set once rank 0 is known to train
    known: int = 0  # lines of the log
    doing: str = ""

    def ask(self) -> bool | None:
        trains, awaited = self.training.is_set(), self.settings.client_seconds is not None
        shown = self.settings.progress != HIDDEN
        if not (shown or awaited or self.interrupt.asked) and trains:
            return None
        news: News | None = self.control.ask(Question(self.known, self.interrupt.asked))
        if news is None:
            return False
        for level, text in news.log:
            tell_line(level, text)
        self.known += len(news.log)
        if news.state is not None:
            self.training.set()
            self.progress.describe(news.facts)
            self.progress.follow(self.trainer, news.state)
        elif news.doing not in ("", self.doing):
            self.doing = news.doing
            self.progress.doing(news.doing)
        return True

    def waiting(self, seconds: float, begun: bool) -> None:
        if self.settings.progress != HIDDEN:
            what = "training with {} ranks" if begun else "waiting for {} task slots"
            log_line(f"{what.format(self.ranks)}, for {seconds:.0f} s so far")

    def ended(self, state: TrainState) -> None:
        """Show the end of the run."""
        if self.training.is_set() or shows_bar(self.settings.progress):
            self.progress.follow(self.trainer, state)
            self.progress.on_fit_end(self.trainer, state)


FIRST_PORT, PORTS = 20_000, 10_000
"""The ports from which a client chooses: below those that systems give to outgoing connections."""
HOST_SECONDS, ANSWER_SECONDS = 1.0, 5.0
"""The longest time that a node takes to accept a connection, and that rank 0 takes to answer."""
SERVER_SECONDS = 20.0
"""The time in which the server must have asked: a client that waits for it passes no interrupt on."""

MOST_FAILURES = 5
"""The failures before the first answer after which a server counts as one that cannot ask."""


@dataclass(frozen=True)
class ControlAddress:
    """The port on which rank 0 listens, and the key by which both sides know each other."""

    port: int = field(default_factory=lambda: FIRST_PORT + secrets.randbelow(PORTS))
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)


@contextlib.contextmanager
def answering(host: str, address: ControlAddress, answer: Callable[[Any], Any]) -> Iterator[None]:
    """Answer questions in the block, in a thread of rank 0; ``answer`` must be quick."""
    over = threading.Event()

    def serve(listener: Listener) -> None:
        with contextlib.closing(listener):
            while not over.is_set():
                with contextlib.suppress(Exception):  # the next question may be answered
                    arrived = listener.accept(0.2)
                    if arrived is not None:
                        channel, question = arrived
                        with contextlib.closing(channel):
                            channel.send(answer(question))

    with contextlib.suppress(OSError):  # the port is taken
        listener = Listener(host, address.port, address.key)
        name = "sparkdl-control"
        threading.Thread(target=serve, args=(listener,), name=name, daemon=True).start()
    try:
        yield
    finally:
        over.set()  # the thread ends by itself; rank 0 need not wait for it


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
        self.address = ControlAddress()
        self._session, self._hosts = session, hosts
        self._function = f"sparkdl_ask_rank_0_{secrets.token_hex(4)}"  # other fits have their own
        self._asked, self._registered = 0, False
        self._patience: float = MOST_FAILURES  # 0: the server cannot ask

    def ask(self, question: Any) -> Any | None:
        """Return the answer of rank 0, or None if nobody answers."""
        if self._patience <= 0:
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
        host, answer = answers[0]
        self._hosts, self._patience = (host,), math.inf
        return answer

    def _ask(self, text: str, answers: list[Any]) -> None:
        """Add what the server says to ``answers``; called in a thread, which nobody waits for if Spark
        does not answer."""
        from pyspark.sql.functions import udtf

        try:
            if not self._registered:
                function = udtf(asking_rank_0(self.address), useArrow=False)
                self._session.udtf.register(self._function, function)
                self._registered = True
            frame = self._session.sql(f"SELECT * FROM {self._function}(:text)", args={"text": text})
            (name,) = frame.schema.names
            answers.append(_unpacked(name))
        except Exception as error:
            logger.debug("rank 0 cannot be asked: %s", error)
            self._patience -= 1

    def close(self) -> None:
        """Remove the function from the session."""
        if self._registered and self._patience > 0:
            with interrupts_held(), contextlib.suppress(PySparkException):
                self._session.sql(f"DROP TEMPORARY FUNCTION IF EXISTS {self._function}")


def _packed(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _unpacked(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))
