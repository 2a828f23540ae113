"""A client of Spark Connect asks rank 0 by a function that the server runs. No Spark."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import cloudpickle

from sparkdl.connect.news import ControlClient, ControlServer

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
    with ControlServer("127.0.0.1", client.address, lambda question: [question, "heard"]):
        assert client.ask("how far") == ["how far", "heard"]
    client.close()
    shown = [text.encode() for text in session.shown]
    shown += [base64.b64decode(text) for text in session.shown if " " not in text]
    assert len(shown) > len(session.shown)
    assert not any(client.address.key in text for text in shown)
