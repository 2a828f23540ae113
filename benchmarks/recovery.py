"""An executor is killed in the middle of training: sparkdl beside DDP under TorchDistributor.

    python benchmarks/recovery.py [--quick] [--only "DDP, from the start"] [--json FILE]

Two executors, ``local-cluster[2,1,2048]``; a perceptron 784-512-512-10 with dropout, Adam, global
batch 128, two replicas (or ranks). Each arm trains undisturbed, then again with one executor killed by
SIGKILL in the middle of it; an arm is a process, hence a JVM, of its own. "back" is from the kill until
training has got further than it was, in seconds; "done again" counts iterations; "equal" compares the
weights, to the bit, with those of the undisturbed run.

sparkdl recovers by itself. TorchDistributor raises, so that the user's program has to call it again:
here a loop does, from the start or from a checkpoint of each epoch, which holds what PyTorch's own
examples save, model, optimizer and epoch.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pyspark
import torch
import torch.distributed as dist
from pyspark.ml.torch.distributor import TorchDistributor
from torch import nn

import sparkdl

BATCH, SAMPLES, WIDTH, CLASSES = 128, 4096, 784, 10
PER_EPOCH = SAMPLES // BATCH
MARGIN = 3
"""Iterations beyond those done at the kill after which training is back: one may end all the same."""
RESULT = "RESULT "
SPARKDL = {
    "sparkdl, slabs shared by the executors": {},
    "sparkdl, slabs gone, snapshots every 30 s": {"spark.sparkdl.slab.dir": "slabs"},
    "sparkdl, slabs gone, snapshots every 5 s": {
        "spark.sparkdl.slab.dir": "slabs",
        "spark.sparkdl.snapshot.seconds": "5",
    },
}
GANG = {
    "gang, slabs gone, snapshots every 30 s": {"spark.sparkdl.slab.dir": "slabs"},
    "gang, slabs gone, snapshots every 5 s": {
        "spark.sparkdl.slab.dir": "slabs",
        "spark.sparkdl.snapshot.seconds": "5",
    },
}
DDP = {"DDP, from the start": False, "DDP, from a checkpoint each epoch": True}


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 512),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, CLASSES),
    )


def arrays() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(SAMPLES, WIDTH)).astype("float32")
    return x, generator.integers(CLASSES, size=SAMPLES)


def tell(path: str, iteration: int) -> None:
    """A line in a file: iterations done, and when."""
    with Path(path).open("a") as file:
        file.write(f"{iteration} {time.time()}\n")


def told(path: str) -> list[tuple[int, float]]:
    if not Path(path).exists():
        return []
    lines = Path(path).read_text().splitlines()
    return [(int(line.split()[0]), float(line.split()[1])) for line in lines]


def digest(module: nn.Module) -> str:
    md5 = hashlib.md5(usedforsecurity=False)
    for tensor in module.state_dict().values():
        md5.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return md5.hexdigest()


class Repeated(logging.Handler):
    """Counts the iterations that sparkdl repeats, by its log."""

    def __init__(self) -> None:
        super().__init__()
        self.iterations = 0

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"repeated (\d+) iteration", record.getMessage())
        self.iterations += int(found[1]) if found else 0


class Tell(sparkdl.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_iteration_end(self, trainer, state) -> None:
        tell(self.path, state.iteration)


def with_sparkdl(spark, iterations: int, progress: str, engine: str = "shuffle") -> tuple[str, int]:
    """The digest, and how often the user's program had to start again."""
    x, y = arrays()
    rows = [(a, b) for a, b in zip(x, y, strict=True)]
    trainer = sparkdl.Trainer(
        model=make_model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        batch_size=BATCH,
        replicas=harness.RANKS,
        engine=engine,
        stop=sparkdl.max_iteration(iterations),
        callbacks=[Tell(progress)],
    )
    trained = trainer.fit(spark.sparkContext.parallelize(rows, harness.RANKS))
    return digest(trained.module), 0


def rank(iterations: int, progress: str, out: str, checkpoint: str | None) -> str | None:
    """Body of a DDP rank; rank 0 tells, saves, and returns the digest."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    me, world = dist.get_rank(), dist.get_world_size()
    x, y = map(torch.from_numpy, arrays())
    torch.manual_seed(0)
    module = nn.parallel.DistributedDataParallel(make_model())
    optimizer, loss = torch.optim.Adam(module.parameters(), lr=1e-3), nn.CrossEntropyLoss()
    begin = 0
    if checkpoint and Path(checkpoint).exists():
        saved = torch.load(checkpoint)
        module.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["epoch"]
    for iteration in range(begin * PER_EPOCH, iterations):
        epoch, batch = divmod(iteration, PER_EPOCH)
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(SAMPLES, generator=generator)
        rows = order[batch * BATCH : (batch + 1) * BATCH][me::world]
        optimizer.zero_grad(set_to_none=True)
        loss(module(x[rows]), y[rows]).backward()
        optimizer.step()
        if me == 0:
            tell(progress, iteration + 1)
        if me == 0 and checkpoint and (iteration + 1) % PER_EPOCH == 0:
            state = {"model": module.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch + 1}, checkpoint + ".new")
            os.replace(checkpoint + ".new", checkpoint)
    dist.destroy_process_group()
    return digest(module.module) if me == 0 else None


def with_ddp(spark, iterations: int, progress: str, keep: bool) -> tuple[str, int]:
    os.environ["OMP_NUM_THREADS"] = "1"
    checkpoint = progress + ".checkpoint" if keep else None
    runner = TorchDistributor(num_processes=harness.RANKS, local_mode=False, use_gpu=False)
    for again in range(3):
        with contextlib.suppress(Exception):
            return runner.run(rank, iterations, progress, progress + ".out", checkpoint), again
    raise RuntimeError("DDP failed three times")


def executors(application: str) -> list[int]:
    """The JVMs of an application's executors, the youngest last."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes()
            if b"CoarseGrainedExecutorBackend" in line and application.encode() in line:
                found.append(int(entry.name))
    return sorted(found)


@contextlib.contextmanager
def killed(application: str, progress: str, at: int) -> Iterator[list[tuple[int, float]]]:
    """Kill an executor when iteration ``at`` is done; (iterations done, time) of the kill."""
    noted: list[tuple[int, float]] = []
    victim = executors(application)[-1]

    def watch() -> None:
        while not (lines := told(progress)) or lines[-1][0] < at:
            time.sleep(0.002)
        os.kill(victim, signal.SIGKILL)
        noted.append((told(progress)[-1][0], time.time()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield noted
    thread.join(10)


def arm(options: dict[str, Any]) -> dict[str, Any]:
    """One row, in this process."""
    name, iterations = options["name"], options["iterations"]
    settings = {
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        **(SPARKDL | GANG).get(name, {}),
    }
    fit: Callable[..., tuple[str, int]]
    if name in DDP:
        fit = partial(with_ddp, keep=DDP[name])
    else:
        fit = partial(with_sparkdl, engine="gang" if name in GANG else "shuffle")
    repeated = Repeated()
    logging.getLogger("sparkdl").addHandler(repeated)
    spark = harness.session(f"local-cluster[{harness.RANKS},1,2048]", **settings)
    try:
        context = spark.sparkContext
        context.parallelize(range(harness.RANKS), harness.RANKS).count()
        undisturbed, disturbed = (os.path.abspath(name) for name in ("undisturbed", "disturbed"))
        expected, _ = fit(spark, iterations, undisturbed)
        calm = told(undisturbed)
        with killed(context.applicationId, disturbed, iterations * 3 // 5) as noted:
            found, again = fit(spark, iterations, disturbed)
    finally:
        spark.stop()
    (done, when), lines = noted[0], told(disturbed)
    back = next(at for iteration, at in lines if iteration >= done + MARGIN and at > when)
    half = len(calm) // 2
    return {
        "arm": name,
        "ms": 1e3 * (calm[-1][1] - calm[half][1]) / (len(calm) - 1 - half),
        "killed after": done,
        "done again": repeated.iterations
        + sum(at > when and iteration <= done for iteration, at in lines),
        "back": back - when,
        "started again by the user": again,
        "equal": "yes" if found == expected else "no",
    }


def launch(**options: Any) -> dict[str, Any]:
    """:func:`arm` in a process of its own, whose working folder and Spark home can be written to."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home = Path(folder) / "spark"
        home.mkdir()
        for path in Path(pyspark.__file__).parent.iterdir():
            if path.name != "work":
                (home / path.name).symlink_to(path)
        paths = [str(Path(__file__).parent), str(Path(sparkdl.__file__).parents[1])]
        process = subprocess.Popen(
            [sys.executable, Path(__file__).resolve(), "--run", json.dumps(options)],
            cwd=folder,
            env={
                **os.environ,
                "SPARK_HOME": str(home),
                "SPARK_LOCAL_IP": "127.0.0.1",
                "SPARK_LOCAL_DIRS": f"{folder}/local",
                "PYSPARK_PYTHON": sys.executable,
                "PYTHONPATH": os.pathsep.join(paths),
            },
            stdout=subprocess.PIPE,
            stderr=(Path(folder) / "errors").open("w"),
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=300)
            if process.returncode:
                raise RuntimeError((Path(folder) / "errors").read_text()[-3000:])
        finally:
            end_session(process.pid)
    line = next(line for line in output.splitlines() if line.startswith(RESULT))
    return json.loads(line.removeprefix(RESULT))


def end_session(leader: int) -> None:
    """Kill what is left of a session of processes: a rank may outlive its executor."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == leader:
                os.kill(int(entry.name), signal.SIGKILL)


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--only", help="one arm, by its name")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        print(RESULT + json.dumps(arm(json.loads(given.run))), flush=True)
        return
    iterations = 6 * PER_EPOCH if given.quick else 8 * PER_EPOCH
    rows = [
        launch(name=name, iterations=iterations)
        for name in [*SPARKDL, *GANG, *DDP]
        if given.only in (None, name)
    ]
    print(harness.hardware(), "\n")
    print(harness.markdown(list(rows[0]), [list(row.values()) for row in rows]))
    harness.write_json(given.json, rows)


if __name__ == "__main__":
    main()
