"""Frames between the driver and a rank: only a member of the gang can make one. No Spark."""

from __future__ import annotations

import contextlib
import functools
import io
import socket
import struct
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparkdl.gang.channel
from sparkdl.errors import StalledError
from sparkdl.gang.channel import NONCE_BYTES, OUTPUT, Channel, ChannelError, Listener, connect
from sparkdl.gang.rank_group import ConnectedRanks
from sparkdl.gang.rank_task import Introduction

pytestmark = pytest.mark.gang


@pytest.fixture
def listener() -> Any:
    made = Listener("127.0.0.1")
    yield made
    made.close()


def both(listener: Listener, hello: Any = "hello") -> tuple[Channel, Channel]:
    """The driver's end and the rank's."""
    found: list[Channel] = []
    key, port = listener.key, listener.port
    rank = threading.Thread(target=lambda: found.append(connect("127.0.0.1", port, key, hello)))
    rank.start()
    arrived = listener.accept(10)
    rank.join()
    assert arrived[1] == hello
    return arrived[0], found[0]


def team_of_one(listener: Listener, timeout: float) -> tuple[ConnectedRanks, Channel]:
    """Return the driver's team and the end of its only rank."""
    hello = Introduction(0, 0, 0, 1, "here")
    driver, rank = both(listener, hello)
    arrivals: Any = SimpleNamespace(come={0: (driver, hello)})
    return ConnectedRanks(arrivals, timeout), rank


def raw(driver: bool = True) -> tuple[Channel, socket.socket]:
    """One end of a channel, the driver's or the rank's; the other is a bare socket."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = socket.create_connection(listening.getsockname())
        here, _ = listening.accept()
    return Channel(here, b"k" * 32, b"n" * NONCE_BYTES, driver=driver), there


def frames_of_a_rank(*messages: Any) -> list[bytes]:
    """Return a message as a rank with the key of :func:`raw` would send it."""
    channel, there = raw(driver=False)
    frames = []
    for message in messages:
        channel.send(message)
        frames.append(there.recv(1 << 16))
    channel.close()
    there.close()
    return frames


def test_messages_go_both_ways_in_order(listener):
    driver, rank = both(listener)
    large = np.arange(3_000_000)
    sender = threading.Thread(target=lambda: [driver.send(m) for m in ("a", large, None)])
    sender.start()
    assert rank.receive() == "a"
    assert (rank.receive() == large).all()
    assert rank.receive() is None
    sender.join()
    for i in range(5):
        rank.send(i)
    assert [driver.receive() for _ in range(5)] == list(range(5))


def test_the_end_of_a_connection_is_told(listener):
    driver, rank = both(listener)
    rank.close()
    with pytest.raises(ChannelError, match="closed"):
        driver.receive()
    with pytest.raises(ChannelError):
        driver.send(b"x" * 10_000_000)


def test_strangers_are_not_let_in(listener, monkeypatch):
    monkeypatch.setattr(sparkdl.gang.channel, "TRIES", 2)
    errors: list[Exception] = []

    def come() -> None:
        try:
            connect("127.0.0.1", listener.port, b"w" * 32, "hello")
        except Exception as error:
            errors.append(error)

    wrong = threading.Thread(target=come)
    wrong.start()
    while wrong.is_alive():
        assert listener.accept(0.1) is None
    assert "has ended 2 connections before it took the first message" in str(errors)
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b" " * 100)
        assert listener.accept(0.2) is None
    driver, rank = both(listener)  # and others still are
    rank.send(1)
    assert driver.receive() == 1


def test_who_is_silent_keeps_nobody_waiting(listener, monkeypatch):
    monkeypatch.setattr(sparkdl.gang.channel, "MOST_SILENT", 3)
    address = "127.0.0.1", listener.port
    mute = [socket.create_connection(address) for _ in range(5)]
    begun = time.monotonic()
    both(listener)
    assert time.monotonic() - begun < 2
    assert listener.accept(0.1) is None
    assert listener.silent == 2  # the third was that of the rank
    for each in mute:
        each.close()


def test_a_listener_that_says_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(sparkdl.gang.channel, "NONCE_SECONDS", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        pytest.raises(ChannelError, match=r"has taken a connection and said nothing for 0\.2 s"),
    ):
        connect("127.0.0.1", mute.getsockname()[1], b"k" * 32, "hello")


def test_a_rank_that_pauses_for_long_comes_again(listener, monkeypatch):
    """Between connecting and its first message, as one that is stopped; the driver has dropped it."""
    monkeypatch.setattr(sparkdl.gang.channel, "HELLO_SECONDS", 0.2)
    pauses, read = [1.0], sparkdl.gang.channel._ended

    def late(steps: Any) -> Any:
        content = read(steps)
        time.sleep(pauses.pop() if pauses else 0.0)
        return content

    monkeypatch.setattr(sparkdl.gang.channel, "_ended", late)
    both(listener)
    assert not pauses


def test_a_stranger_that_trickles_is_not_listened_to_for_long(listener, monkeypatch):
    """Byte after byte, each in time."""
    monkeypatch.setattr(sparkdl.gang.channel, "HELLO_SECONDS", 0.2)
    stranger = socket.create_connection(("127.0.0.1", listener.port))
    stop = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not stop.wait(0.02):
                stranger.sendall(b"x")

    trickling = threading.Thread(target=trickle)
    trickling.start()
    assert listener.accept(0.7) is None
    assert listener.silent == 0
    stop.set()
    trickling.join()
    stranger.close()


@pytest.mark.parametrize("before", [0, 1])
def test_a_frame_of_a_stranger_cannot_fill_the_memory(before):
    driver, there = raw()
    for frame in frames_of_a_rank(*range(before)):
        there.sendall(frame)
    assert [driver.receive() for _ in range(before)] == list(range(before))
    there.sendall(struct.pack("<Q64s", 1 << 40, b"\0" * 64))  # and no content
    with pytest.raises(ChannelError, match="not by a member"):
        driver.receive(1.0)


@settings(deadline=None, max_examples=60)
@given(place=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_changed_byte_is_noticed(place, flip):
    driver, there = raw()
    (frame,) = frames_of_a_rank({"a": list(range(20))})
    changed = bytearray(frame)
    changed[place % len(changed)] ^= flip
    there.sendall(changed)
    there.shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelError):
        driver.receive()
    there.close()


@pytest.mark.parametrize(
    "order", [(0, 0), (1,), (0, 2)], ids=["repeated", "out of order", "left out"]
)
def test_frames_are_taken_once_and_in_order(order):
    driver, there = raw()
    frames = frames_of_a_rank("first", "second", "third")
    for number in order:
        there.sendall(frames[number])
    for _ in order[1:]:
        assert driver.receive() == "first"
    with pytest.raises(ChannelError, match="not by a member"):
        driver.receive()


def test_a_frame_of_the_driver_cannot_be_sent_back():
    driver, there = raw()
    driver.send("echo")
    there.sendall(there.recv(1 << 16))
    with pytest.raises(ChannelError, match="not by a member"):
        driver.receive()


def test_a_message_that_does_not_end_is_not_waited_for() -> None:
    """The host of a rank may go dark while it sends."""
    channel, there = raw()
    (frame,) = frames_of_a_rank("a result")
    there.sendall(frame[:-1])
    with pytest.raises(ChannelError, match="timed out"):
        channel.receive(0.05)


def test_a_rank_that_prints_without_a_pause_is_late_all_the_same(listener: Listener) -> None:
    team, rank = team_of_one(listener, 0.3)

    def shout() -> None:
        with contextlib.suppress(ChannelError):
            while True:
                rank.send((OUTPUT, "still here"))

    shouting = threading.Thread(target=shout)
    shouting.start()
    with (
        pytest.raises(StalledError, match="rank 0 on here"),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        team.call(len, "waiting")
    shouting.join(10)
    assert not shouting.is_alive()


def test_a_rank_that_takes_nothing_is_not_waited_for(listener):
    """As one that is stopped, whose host still answers for it."""
    team, rank = team_of_one(listener, 0.2)
    with pytest.raises(StalledError, match=r"waited 0\.2 s for rank 0"):
        team.call(functools.partial(len, b"x" * 50_000_000), "a command")
    rank.close()


def test_what_a_driver_said_on_another_connection_is_not_taken(listener):
    """By somebody who stands between a rank and its driver."""
    said, found = bytearray(), list[Channel | Exception]()
    between = socket.create_server(("127.0.0.1", 0))
    port, key = between.getsockname()[1], listener.key

    def come() -> None:
        try:
            found.append(connect("127.0.0.1", port, key, "hello"))
        except ChannelError as error:
            found.append(error)

    first, second = (threading.Thread(target=come) for _ in range(2))
    first.start()
    rank, driver = between.accept()[0], socket.create_connection(("127.0.0.1", listener.port))

    def carry(source: socket.socket, to: socket.socket, noted: bytearray) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                noted.extend(content)
                to.sendall(content)

    carried = (driver, rank, said), (rank, driver, bytearray())
    carrying = [threading.Thread(target=carry, args=args, daemon=True) for args in carried]
    for thread in carrying:
        thread.start()
    channel, _ = listener.accept(10)
    first.join()
    channel.send("delete everything")
    assert found[0].receive() == "delete everything"
    second.start()
    again, _ = between.accept()
    again.sendall(said)
    second.join()
    assert "not by a member" in str(found[1])
    for end in (found[0], channel, rank, driver, again, between):
        end.close()
