"""Two hosts with their own network, /dev/shm and folders: the bytes, and a cable that is out, for a
while or for good."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import train_on_two_hosts as script
from harness.cluster import PATIENT, Standalone
from harness.hosts import NotAllowed, TwoHosts
from harness.processes import wait_until
from launch import digest, launch

from sparkdl.sync.nodes import least_bytes

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]
CUT_SECONDS, CUT_AT = 10.0, 8


@dataclass(frozen=True)
class Run:
    """What a run told: iterations, the time of each, the bytes sent; and what came of it.

    ``wire``: bytes that the hosts had sent just before iteration :data:`script.SEND_FROM` ended, and
    when the last had.
    """

    result: dict
    lines: list[tuple[int, float, int]]
    wire: list[tuple[int, int]]


@contextlib.contextmanager
def training(folder: Path, ways: dict[str, dict]) -> Iterator[tuple[TwoHosts, Future]]:
    """Two hosts, on which the script trains in these ways, the driver on the first; its result."""
    cluster = folder / "cluster"
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(TwoHosts((cluster / "worker-0", cluster / "worker-1")))
        except NotAllowed as error:
            pytest.skip(str(error))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        places = [(hosts.inside(k), hosts.addresses[k]) for k in range(2)]
        spark = stack.enter_context(Standalone(2, 1, cluster, hosts=places))
        address = hosts.addresses[0]
        yield (
            hosts,
            pool.submit(
                launch,
                Path(script.__file__),
                folder / "driver",
                host=places[0],
                master=spark.url,
                runs=ways,
                settings={
                    **PATIENT,
                    "spark.driver.host": address,
                    "spark.driver.bindAddress": address,
                    "spark.cores.max": "2",
                },
            ),
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Run, Run, tuple[float, float], dict]:
    """One run left alone, one whose cable was cut; when it was cut and put back; what gangs came to."""
    folder = tmp_path_factory.mktemp("hosts")
    tell = [folder / "calm", folder / "cut"]
    ways: dict[str, dict] = {str(path): {"tell": str(path)} for path in tell}
    for strategy in (*script.STRATEGIES, *script.ROUNDING):
        ways[strategy] = {"engine": "gang", "strategy": strategy}
    with training(folder, ways) as (hosts, running):

        def sent() -> tuple[int, int]:
            return hosts.bytes_sent(0), hosts.bytes_sent(1)

        wire = [sent()]

        def has_begun() -> bool:
            """Else what is read now was sent before that iteration ended."""
            now = sent()
            if len(_lines(tell[0])) >= script.SEND_FROM:
                return True
            wire[:] = [now]
            return False

        _until(running, has_begun)
        _until(running, lambda: len(_lines(tell[0])) >= script.ITERATIONS)
        wire.append(sent())
        _until(running, lambda: len(_lines(tell[1])) >= CUT_AT)
        with hosts.cut():
            cut = time.time()
            time.sleep(CUT_SECONDS)
        back = time.time()
        result = running.result()
    calm, disturbed = (Run(result[str(path)], _lines(path), wire) for path in tell)
    return (
        calm,
        disturbed,
        (cut, back),
        {how: result[how] for how in (*script.STRATEGIES, *script.ROUNDING)},
    )


def _until(running: Future, happens: Callable[[], bool]) -> None:
    wait_until(lambda: happens() or running.done(), 300, "an iteration")
    if running.done():
        running.result()


def _lines(path: Path) -> list[tuple[int, float, int]]:
    if not path.exists():
        return []
    found = [line.split() for line in path.read_text().splitlines()]
    return [(int(n), float(at), int(sent)) for n, at, sent in found]


@pytest.fixture(scope="module")
def undisturbed(spark) -> dict:
    trained = script.trainer(engine="local").fit(script.frame(spark))
    return {"digest": digest(trained.module), "losses": trained.history.losses}


def test_training_works_and_gives_the_bits_of_one_process(runs, undisturbed):
    calm, *_ = runs
    assert calm.result == undisturbed


def test_bytes_are_what_theory_says(runs):
    """By sparkdl's own count to the byte; on the cable the headers and Spark's talk come on top."""
    calm, *_ = runs
    parameters = 4 * sum(parameter.numel() for parameter in script.model().parameters())
    least = least_bytes(parameters, nodes=2)
    assert [sent for _, _, sent in calm.lines] == [least] * script.ITERATIONS
    iterations = script.ITERATIONS - script.SEND_FROM
    for before, after in zip(*calm.wire, strict=True):
        assert least <= (after - before) / iterations <= 1.25 * least


def test_a_cable_that_is_out_for_ten_seconds_changes_no_bit(runs, undisturbed):
    _, disturbed, (cut, back), _ = runs
    assert disturbed.result == undisturbed
    ends = [at for _, at, _ in disturbed.lines]
    waiting = [(a, b) for a, b in itertools.pairwise(ends) if a < back and b > back]
    ((last, first),) = waiting  # it did wait: no iteration without the cable
    assert last < cut + 1.0
    assert first > back


@pytest.mark.gang
@pytest.mark.parametrize("strategy", script.STRATEGIES)
def test_so_does_a_gang(runs, undisturbed, strategy):
    """Its ranks see no file of each other: they meet at a socket, and share no node's memory."""
    *_, gangs = runs
    assert gangs[strategy] == undisturbed


@pytest.mark.gang
@pytest.mark.parametrize("strategy", script.ROUNDING)
def test_so_does_one_that_rounds_otherwise(runs, undisturbed, strategy):
    """Sums of micro-batches, or of parts of a layer."""
    *_, gangs = runs
    assert gangs[strategy]["losses"] == pytest.approx(undisturbed["losses"], rel=1e-5, abs=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("how", [{}, {"engine": "gang", "min_ranks": 1}], ids=["shuffle", "gang"])
def test_a_host_that_goes_dark_for_good_changes_no_bit(undisturbed, tmp_path, how):
    """Nobody says goodbye: connections stay open until somebody takes the host for lost. The other one
    does the work of both."""
    tell = tmp_path / "told"
    with training(tmp_path, {"dark": {"tell": str(tell), **how}}) as (hosts, running):
        _until(running, lambda: len(_lines(tell)) >= CUT_AT)
        with hosts.cut():
            result = running.result()
    assert result["dark"] == undisturbed
    ends = [at for _, at, _ in _lines(tell)]
    longest = max(b - a for a, b in itertools.pairwise(ends))
    print(f"went on after {longest:.0f} s")
    assert longest > CUT_SECONDS  # it did notice
