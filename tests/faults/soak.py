"""Train while processes are killed and slabs deleted at random: same bits, and nothing is left.

    PYTHONPATH=tests python tests/faults/soak.py [--iterations 2000] [--every 6] [--seed 0]
                                                 [--strategy ddp]
    PYTHONPATH=tests python tests/faults/soak.py --fits 300 --results soak.jsonl [--seed 0]
                                                 [--only "gang.* on cluster: slabs"]

A script of its own for the long forms; tests/faults/test_soak.py runs short ones.

The first form is one long fit. Two executors with slab roots of their own, snapshots every second, a
checkpoint every 50 iterations: where both executors are killed within seconds, all snapshots are gone.
A thread of the driver strikes every few seconds and iterations, what and when is drawn from a seed: a
Python worker, an executor's JVM, or a node's slabs. With ``--strategy`` it is a gang that trains.

The second form is many short fits of many configurations, on ``local[...]`` and on three executors,
with two to five faults of a kind each; see ``soak_fits``. Each result is compared with that of the same
fit without faults. One line a fit goes into the file of results; a second call goes on where the first
one ended, and ends with the table.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import json
import logging
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gang_lost import DDP, FSDP, PIPELINE, TENSOR, ZERO1
from harness import processes
from harness.cluster import PATIENT
from harness.faulty import CLASSES, Adam, frame, outcome, trainer
from harness.slabs import slabs_apart
from harness.strikes import Strike, Strikes
from torch import nn

import sparkdl

GAP, LOOKS = 10, 20
STEADY = 0.1
"""Of the iterations: at either end, compared with each other."""
SETTINGS = {
    "spark.sparkdl.slab.dir": "slabs",
    "spark.sparkdl.snapshot.seconds": "1",
    "spark.executor.memory": "512m",
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": DDP,
    "zero1": ZERO1,
    "fsdp": FSDP,
    "tensor": TENSOR,
    "pipeline": PIPELINE,
}


def endless(every: float, seed: int) -> Iterator[Strike]:
    """Strikes that follow from the seed: ``GAP`` to twice as many iterations apart, on a slow machine
    as on a fast one, and at least some seconds, about ``every``."""
    draw = random.Random(seed)
    while True:
        kind = draw.choice(["worker", "worker", "executor", "slabs"])
        yield kind, draw.randint(GAP, 2 * GAP), draw.uniform(0.5, 1.5) * every


class Memory(sparkdl.Callback):
    """Of the driver: resident MB of its Python and seconds, after every iteration, and whether
    gradients went between nodes in it, or all replicas ran on one of them; the MB of its JVM's heap
    that are in use after a collection, ``LOOKS`` times."""

    def __init__(self, context: Any, iterations: int) -> None:
        self._jvm, self._every = context._jvm, max(1, iterations // LOOKS)
        self.python: list[float] = []
        self.heap: list[float] = []
        self.seconds: list[float] = []
        self.apart: list[bool] = []

    def on_iteration_end(self, trainer: Any, state: Any) -> None:
        self.python.append(resident(os.getpid()))
        self.seconds.append(state.timings["iteration"])
        self.apart.append(state.bytes_sent > 0)
        if state.iteration % self._every == 0:
            self._jvm.System.gc()
            runtime = self._jvm.java.lang.Runtime.getRuntime()
            self.heap.append((runtime.totalMemory() - runtime.freeMemory()) / (1 << 20))

    def of(self, apart: bool) -> list[float]:
        """Seconds of the iterations that ran so."""
        return [s for s, a in zip(self.seconds, self.apart, strict=True) if a == apart]


def started_here() -> list[int]:
    """Executors, and the daemons and Python workers below them: they work in folders of their own."""
    found = []
    for pid in processes.all_pids():
        with contextlib.suppress(OSError):
            if Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(Path.cwd() / "spark" / "work"):
                found.append(pid)
    return found


def resident(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def ends(values: list[float]) -> tuple[float, float]:
    """The medians of the first and of the last part, after what warms up."""
    warm = values[len(values) // 5 :]
    part = max(1, round(STEADY * len(values)))
    return statistics.median(warm[:part]), statistics.median(warm[-part:])


def by_fifth(values: list[float]) -> list[float]:
    """The median of each fifth."""
    cuts = [round(len(values) * n / 5) for n in range(6)]
    return [statistics.median(values[a:b]) for a, b in itertools.pairwise(cuts) if a < b]


def how(strategy: str) -> dict[str, Any]:
    """What a trainer is told; an empty ``strategy``: no gang."""
    return {"engine": "gang", **STRATEGIES[strategy]} if strategy else {}


def soak(
    master: str, iterations: int, every: float, seed: int, strategy: str = ""
) -> dict[str, Any]:
    """Train disturbed in the working directory; what came of it."""
    from launch import session

    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sparkdl").addHandler(handler)
    with session(master, **PATIENT, **SETTINGS) as spark:
        context = spark.sparkContext
        memory = Memory(context, iterations)
        strikes = Strikes(context, endless(every, seed), seed, lambda: len(memory.seconds))
        strikes.start()
        started = time.perf_counter()
        kept = sparkdl.Checkpoint(Path.cwd() / "checkpoints", every=sparkdl.every(50))
        given = {"iterations": iterations, "callbacks": [memory], "checkpoint": kept}
        run = trainer(2, **given, **how(strategy))
        trained = run.fit(frame(spark, 2))
        seconds = time.perf_counter() - started
        strikes.stop()
        left = {
            "slabs": list(map(str, slabs_apart())),
            "persisted": context._jsc.getPersistentRDDs().size(),
        }
    deadline = time.monotonic() + 30
    while started_here() and time.monotonic() < deadline:
        time.sleep(0.2)
    return {
        **outcome(trained),
        "iterations": iterations,
        "seconds": seconds,
        "strikes": dict(strikes.done),
        "recoveries": [line for line in logged if "Continued from" in line],
        "driver MB": [ends(memory.python), ends(memory.heap)],
        "iteration ms": {
            where: [1000 * value for value in by_fifth(some)]
            for where in ("on two nodes", "on one node")
            if (some := memory.of(where == "on two nodes"))
        },
        "heap MB": by_fifth(memory.heap),
        "left": left | {"processes": started_here()},
    }


def undisturbed(iterations: int, strategy: str) -> dict[str, Any]:
    """The same without any fault, in one process where it is no gang."""
    from launch import session

    same = {"engine": "local", **how(strategy)}
    with session("local[2]") as spark:
        return outcome(trainer(2, iterations=iterations, **same).fit(frame(spark, 2)))


def shown(values: list[float]) -> str:
    return " ".join(f"{value:.0f}" for value in values)


# Many fits


MASTERS = {"local": "local[2,8]", "cluster": "local-cluster[3,1,1024]"}
ANYWHERE = ("worker", "daemon", "slabs", "checkpoint", "driver")
KINDS = {"local": ANYWHERE, "cluster": (*ANYWHERE, "executor", "two executors", "all of these")}
BATCH = 20
"""Fits of one session."""
LIMIT_SECONDS = 600.0
"""Longer than the time limit of Spark's jobs: what takes so long hangs."""
KEPT = sparkdl.every(2)
WIDE = (4400, 4400)
"""Layers of a model of 20 million parameters."""
FITS_SETTINGS = {**SETTINGS, "spark.sparkdl.timeout.seconds": "300"}


class SlowAdam(Adam):
    """Ranks would be done with all iterations before a fault strikes."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.02)
        return super().step(closure)


class Bag(nn.Module):
    """Rows of varying length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embedding(tokens).sum(dim=1))


def configurations() -> dict[str, dict[str, Any]]:
    """What a trainer is told, by name; a wide model is drawn less often."""
    slow = {"optimizer": partial(SlowAdam, lr=1e-2)}
    shuffle = {"engine": "shuffle", "slices": 2, "iterations": 8, **slow}
    gang = {"engine": "gang", "iterations": 30, **slow}
    bags = {
        "model": Bag,
        "features": "tokens",
        "columns": {"tokens": sparkdl.Sequence()},
        "bucketing": 48,
    }
    power = {"compression": sparkdl.PowerSGD(1)}
    wide = {"sizes": WIDE, "iterations": 5, "optimizer": partial(Adam, lr=1e-4)}
    return {
        "shuffle": shuffle,
        "shuffle, clip_norm, accumulate": {**shuffle, "clip_norm": 0.5, "accumulate": 2},
        "shuffle, local_steps": {**shuffle, "local_steps": 2},
        "shuffle, PowerSGD": {**shuffle, **power},
        "shuffle, bucketing": {**shuffle, **bags},
        "shuffle, wide": {**shuffle, **wide},
        "gang, ddp": {**gang, **DDP},
        "gang, ddp, clip_norm, bucketing": {**gang, **DDP, **bags, "clip_norm": 0.5},
        "gang, zero1": {**gang, **ZERO1},
        "gang, zero1, PowerSGD": {**gang, **ZERO1, **power},
        "gang, zero1, wide": {**gang, **ZERO1, **wide},
        "gang, fsdp, accumulate": {**gang, **FSDP, "accumulate": 2},
        "gang, tensor": {**gang, **TENSOR},
        "gang, pipeline": {**gang, **PIPELINE},
    }


@dataclass(frozen=True)
class Fit:
    """A fit, and the faults that strike in it."""

    number: int
    configuration: str
    place: str
    kind: str

    def __str__(self) -> str:
        return f"{self.configuration} on {self.place}: {self.kind}"

    @property
    def wide(self) -> bool:
        return "wide" in self.configuration

    def plan(self, draw: random.Random, kind: str) -> list[Strike]:
        """Return two to five strikes, the first of them while samples are placed or soon after; half as
        many where each is dear."""
        few = self.wide or "executor" in kind
        kinds = ["worker", "daemon", "slabs", "executor", "two executors"]
        third = configurations()[self.configuration]["iterations"] // 3
        return [
            (
                draw.choice(kinds) if kind == "all of these" else kind,
                draw.randint(0, third) if number else 0,
                draw.uniform(0, 0.3) if number else draw.uniform(0, 1.5),
            )
            for number in range(draw.randint(2, 3 if few else 5))
        ]


def all_fits(count: int, seed: int, only: str) -> list[Fit]:
    """Return so many fits: a shuffled table of all that can be combined, over and over."""
    table = [
        (name, place, kind)
        for name in configurations()
        for place, kinds in KINDS.items()
        for kind in kinds
    ]
    random.Random(seed).shuffle(table)
    rounds = (row for n in itertools.count() for row in table if n % 4 == 0 or "wide" not in row[0])
    assert any(re.search(only, str(Fit(0, *row))) for row in table), f"no fit is like {only}"
    numbered = (Fit(number, *row) for number, row in enumerate(rounds))
    return list(itertools.islice((fit for fit in numbered if re.search(only, str(fit))), count))


class Count(sparkdl.Callback):
    """The iterations that are done, those of a resumed run included."""

    done = 0

    def on_iteration_end(self, trainer: Any, state: Any) -> None:
        self.done = state.iteration


class Session:
    """A session in which fits run one after another.

    Args:
        spark: The session.
        results: The file of results, which this continues.
        kept: The folder of the fits' checkpoints, which outlives the session.
        seed: All draws follow from it and the number of a fit.
    """

    def __init__(self, spark: Any, results: Path, kept: Path, seed: int) -> None:
        self._spark, self._results, self._kept, self._seed = spark, results, kept, seed
        self._logged: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self._logged.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("sparkdl").addHandler(handler)

    def _frame(self, name: str) -> Any:
        """More partitions than replicas: rows go elsewhere, as those of a table do."""
        df = frame(self._spark, 3).repartition(3)
        if "bucketing" in name:
            code = "1 + (abs(hash(features, i)) & 7)"
            return df.selectExpr(
                f"transform(sequence(1, 2 + (hash(features) & 7)), i -> {code}) AS tokens", "label"
            )
        return df

    def _trained(self, fit: Fit, resume: bool = False, **changes: Any) -> dict[str, Any]:
        df = self._frame(fit.configuration)
        validation = sparkdl.Validation(df, metrics=["accuracy"], every=sparkdl.every(4))
        values = {**configurations()[fit.configuration], "validation": validation, **changes}
        run = trainer(2, **values)
        return outcome(run.fit(df, **({"resume": "latest"} if resume else {})))

    def calm(self, fit: Fit) -> dict[str, Any]:
        """Return the outcome of the same fit without faults, which is known from the second time on."""
        for line in lines_of(self._results):
            if line.get("calm") == fit.configuration:
                return line["outcome"]
        result = self._trained(fit)
        append(self._results, {"calm": fit.configuration, "outcome": result})
        return result

    def disturbed(self, fit: Fit) -> None:
        """Run a fit while faults strike, and write down what came of it. One whose driver is killed
        goes on in the next session."""
        expected = self.calm(fit)
        before = [line for line in lines_of(self._results) if line.get("killed") == fit.number]
        draw = random.Random(f"{self._seed}-{fit.number}-{len(before)}")
        path, count, done = self._kept / str(fit.number), Count(), Counter[str]()
        changes: dict[str, Any] = {"callbacks": [count]}
        if fit.kind in ("checkpoint", "driver"):
            changes["checkpoint"] = sparkdl.Checkpoint(path, every=KEPT, keep=4)
        self._logged.clear()
        started, result = time.perf_counter(), {"outcome": "same", "reason": ""}
        kind = "worker" if fit.kind in ("checkpoint", "driver") else fit.kind
        plan = fit.plan(draw, kind)
        if fit.kind == "driver" and len(before) < 1 + fit.number % 2:
            plan = [*plan[:1], ("driver itself", 0, draw.uniform(0, 1))]
        strikes: Strikes | None = None
        try:
            if fit.kind == "checkpoint":
                half = configurations()[fit.configuration]["iterations"] // 2 + draw.randint(0, 2)
                self._trained(fit, stop=sparkdl.max_iteration(max(4, half)), **changes)
                done["checkpoint"] += damaged(path, draw)
                plan = plan[:2]

            def ready() -> bool:
                """A driver that is killed notes it before."""
                if not list(path.glob("*/manifest.json")):
                    return False
                append(
                    self._results, {"killed": fit.number, "faults": {**strikes.done, "driver": 1}}
                )
                return True

            context = self._spark.sparkContext
            strikes = Strikes(context, plan, draw.random(), lambda: count.done, ready)
            strikes.start()
            found = self._trained(fit, resume="checkpoint" in changes, **changes)
            if found != expected:
                result = {"outcome": "wrong", "reason": ", ".join(differing(found, expected))}
        except Exception as error:
            first = str(error).partition("\n")[0]
            result = {"outcome": "error", "reason": f"{type(error).__name__}: {first}"}
        finally:
            if strikes is not None:
                strikes.stop()
                done += strikes.done
        for line in before:
            done += Counter(line["faults"])
        log = [line for line in self._logged if "Continued from" in line or "cannot be" in line]
        seconds = round(time.perf_counter() - started, 1)
        append(
            self._results,
            {**asdict(fit), **result, "faults": dict(done), "seconds": seconds, "log": log},
        )
        shutil.rmtree(path, ignore_errors=True)


def damaged(path: Path, draw: random.Random) -> int:
    """Cut a file of each of the newest one or two checkpoints, but not of all, or flip a bit of it."""
    newest = sorted(path.glob("iteration-*"), key=lambda folder: folder.name.split("-")[2])
    chosen = newest[1:][-draw.randint(1, 2) :]
    for folder in chosen:
        file = draw.choice(sorted(folder.iterdir()))
        data = bytearray(file.read_bytes())
        place = draw.randrange(len(data))
        if draw.random() < 0.5:
            del data[place:]
        else:
            data[place] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
    return len(chosen)


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [name for name in expected if found[name] != expected[name]]


def lines_of(results: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )


def append(results: Path, line: dict[str, Any]) -> None:
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")


def run_fits(fits: list[list[Any]], results: str, kept: str, seed: int) -> dict[str, Any]:
    """In a process of its own: run fits of one place. A fit that hangs ends it."""
    from launch import session, wait_for_executors

    chosen = [Fit(*values) for values in fits]
    master, stacks = MASTERS[chosen[0].place], Path(results).with_suffix(".stacks")
    with session(master, **PATIENT, **FITS_SETTINGS) as spark, stacks.open("a") as file:
        found = Session(spark, Path(results), Path(kept), seed)
        for fit in chosen:
            if chosen[0].place == "cluster":
                wait_for_executors(spark.sparkContext, 3)
            file.write(f"{fit.number}, {fit}\n")
            file.flush()
            faulthandler.dump_traceback_later(LIMIT_SECONDS * (1 + fit.wide), exit=True, file=file)
            found.disturbed(fit)
            faulthandler.cancel_dump_traceback_later()
    return {}


def soak_fits(count: int, seed: int, only: str, results: Path) -> list[dict[str, Any]]:
    """Run the fits that ``results`` does not have yet; return the results of all.

    Fits of one place share a session, until a driver is killed. A fit whose process ends otherwise is
    written down as one that hangs, or as one that crashed.
    """
    from launch import launch

    fits, script = all_fits(count, seed, only), Path(__file__).resolve()
    folder = results.absolute().with_suffix(".folder")
    while True:
        lines = lines_of(results)
        known = {line["number"] for line in lines if "number" in line}
        left = [fit for fit in fits if fit.number not in known]
        if not left:
            break
        batch = [fit for fit in left if fit.place == left[0].place][:BATCH]
        given = {
            "fits": [list(asdict(fit).values()) for fit in batch],
            "results": str(results.absolute()),
            "kept": str(folder / "checkpoints"),
            "seed": seed,
        }
        began = time.monotonic()
        try:
            launch(script, folder / "session", seconds=2 * BATCH * LIMIT_SECONDS, **given)
        except AssertionError as error:
            added = lines_of(results)[len(lines) :]
            if not added or "killed" not in added[-1]:
                done = {line["number"] for line in added if "number" in line}
                fit = next(fit for fit in batch if fit.number not in done)
                hangs = time.monotonic() - began >= LIMIT_SECONDS and "Timeout" in str(error)
                what = {"outcome": "hang" if hangs else "crash", "reason": str(error)[-2000:]}
                append(results, {**asdict(fit), **what, "faults": {}, "seconds": 0, "log": []})
        shutil.rmtree(folder / "session", ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    numbers = {fit.number for fit in fits}
    return [line for line in lines_of(results) if line.get("number") in numbers]


def table(found: list[dict[str, Any]]) -> str:
    """Return the table of what came of fits: for each configuration and kind of fault how many fits and
    faults there were, and how many did not end with the same bits; then the reasons."""
    kinds = list(dict.fromkeys(kind for some in KINDS.values() for kind in some))

    def cell(some: list[dict[str, Any]]) -> str:
        others = Counter(line["outcome"] for line in some if line["outcome"] != "same")
        told = [f"{number} {outcome}" for outcome, number in others.items()]
        faults = sum(sum(line["faults"].values()) for line in some)
        return "; ".join([f"{len(some)}, {faults}", *told]) if some else ""

    lines = ["fits, faults", *kinds, "all"], ["---"] * (len(kinds) + 2)
    rows = [list(row) for row in lines]
    for name in [*configurations(), "all"]:
        mine = [line for line in found if name in ("all", line["configuration"])]
        by_kind = [cell([line for line in mine if line["kind"] == kind]) for kind in kinds]
        if mine:
            rows.append([name, *by_kind, cell(mine)])
    told = [
        f"{line['number']}, {line['configuration']} on {line['place']}, {line['kind']}: "
        f"{line['outcome']}. {line['reason']}"
        for line in found
        if line["outcome"] != "same"
    ]
    return "\n".join([*[f"| {' | '.join(row)} |" for row in rows], *told])


def main() -> None:
    from launch import answer, launch, spec

    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        given = spec()
        if "fits" in given:
            answer(run_fits(**given))
            return
        alone = given.pop("alone")
        answer(undisturbed(given["iterations"], given["strategy"]) if alone else soak(**given))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--every", type=float, default=6.0, help="seconds between faults, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", choices=STRATEGIES, default="", help="of a gang")
    parser.add_argument("--fits", type=int, default=0, help="many short fits, not a long one")
    parser.add_argument("--only", default="", help='of "CONFIGURATION on PLACE: KIND", a regex')
    parser.add_argument("--results", type=Path, default=Path("soak.jsonl"), help="of many fits")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and with it what it has started
    if options.fits:
        found = soak_fits(options.fits, options.seed, options.only, options.results)
        print(table(found))
        sys.exit(any(line["outcome"] in ("wrong", "hang", "crash") for line in found))
    with tempfile.TemporaryDirectory() as folder:
        common = {
            "seconds": 4 * 3600,
            "iterations": options.iterations,
            "strategy": options.strategy,
        }
        script, path = Path(__file__).resolve(), Path(folder)
        expected = launch(script, path / "alone", alone=True, **common)
        found = launch(
            script,
            path / "soak",
            alone=False,
            master="local-cluster[2,1,1024]",
            every=options.every,
            seed=options.seed,
            **common,
        )
    same = all(found[name] == expected[name] for name in expected)
    print(
        f"{found['iterations']} iterations in {found['seconds']:.0f} s, faults: {found['strikes']}"
    )
    print(f"recoveries from lost state: {len(found['recoveries'])}; equal to the bit: {same}")
    python, heap = found["driver MB"]
    print(
        f"driver's Python, MB: {python[0]:.0f} -> {python[1]:.0f}; live in its JVM's heap: "
        f"{heap[0]:.0f} -> {heap[1]:.0f}, by fifth of the run: {shown(found['heap MB'])}"
    )
    for where, fifths in found["iteration ms"].items():
        print(f"median iteration {where}, ms, by fifth of these: {shown(fifths)}")
    print(f"left: {found['left']}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
