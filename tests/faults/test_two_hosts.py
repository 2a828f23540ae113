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
from typing import NamedTuple

import pytest
import train_on_two_hosts as script
from harness.cluster import PATIENT, Standalone
from harness.hosts import NotAllowed, TwoHosts
from harness.processes import wait_until
from launch import digest, launch

from sparkdl.engines.shuffle.messages import least_bytes

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.soak, pytest.mark.timeout(600)]
CUT_SECONDS = 10.0


class Told(NamedTuple):
    """Of an iteration: its number, when it ended, the bytes that it sent, and all those that the first
    host had sent and received by then."""

    iteration: int
    at: float
    sent: int
    out: int
    into: int


@dataclass(frozen=True)
class Run:
    """What a run told, and what came of it."""

    result: dict
    lines: list[Told]


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
def runs(tmp_path_factory) -> tuple[Run, Run, float, dict]:
    """One run left alone, one whose cable was cut; when that still was out; what gangs came to."""
    folder = tmp_path_factory.mktemp("hosts")
    calm, disturbed = folder / "calm", folder / "cut"
    ways: dict[str, dict] = {
        "calm": {"tell": {"path": str(calm)}},
        "cut": {"tell": {"path": str(disturbed), "held": True}},
    }
    for strategy in (*script.STRATEGIES, *script.ROUNDING):
        ways[strategy] = {"engine": "gang", "strategy": strategy}
    with training(folder, ways) as (hosts, running):
        with _cut(hosts, running, disturbed):
            time.sleep(CUT_SECONDS)
            out = time.time()
        result = running.result()
    return (
        Run(result["calm"], _lines(calm)),
        Run(result["cut"], _lines(disturbed)),
        out,
        {how: result[how] for how in (*script.STRATEGIES, *script.ROUNDING)},
    )


@contextlib.contextmanager
def _cut(hosts: TwoHosts, running: Future, tell: Path) -> Iterator[None]:
    """The cable is out, inside the block, from the midst of a run that is held for it."""
    _until(running, lambda: len(_lines(tell)) >= script.HOLD_AT)
    Path(f"{tell}.go").touch()
    with hosts.cut():
        Path(f"{tell}.cut").touch()
        yield


def _until(running: Future, happens: Callable[[], bool]) -> None:
    wait_until(lambda: happens() or running.done(), 300, "an iteration")
    if running.done():
        running.result()


def _lines(path: Path) -> list[Told]:
    """Whole ones: another may be on its way."""
    if not path.exists():
        return []
    whole = [line.split() for line in path.read_text().splitlines(True) if line.endswith("\n")]
    return [Told(int(n), float(at), *map(int, rest)) for n, at, *rest in whole]


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
    assert [told.sent for told in calm.lines] == [least] * script.ITERATIONS
    first, last = calm.lines[script.SEND_FROM - 1], calm.lines[-1]
    iterations = last.iteration - first.iteration
    for carried in (last.out - first.out, last.into - first.into):
        assert least <= carried / iterations <= 1.25 * least


def test_a_cable_that_is_out_for_ten_seconds_changes_no_bit(runs, undisturbed):
    _, disturbed, out, _ = runs
    assert disturbed.result == undisturbed
    ended = [told.iteration for told in disturbed.lines if told.at < out]
    # It did wait: no iteration without the cable, but for one whose data had come.
    assert len(ended) in (script.HOLD_AT, script.HOLD_AT + 1)
    assert len(disturbed.lines) == script.ITERATIONS


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
    ways = {"dark": {"tell": {"path": str(tell), "held": True}, **how}}
    with training(tmp_path, ways) as (hosts, running), _cut(hosts, running, tell):
        result = running.result()
    assert result["dark"] == undisturbed
    ends = [told.at for told in _lines(tell)]
    longest = max(b - a for a, b in itertools.pairwise(ends))
    print(f"went on after {longest:.0f} s")
    assert longest > CUT_SECONDS  # it did notice
