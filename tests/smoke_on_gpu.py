"""Script, the first to run on a machine with a GPU: does anything work, and what memory does it leave?

    python tests/smoke_on_gpu.py

A session in ``local[2]`` and one of a cluster of one executor, to which Spark assigns the GPUs that
``conf/discover_gpus.sh`` finds; in each, rounds of a fit of every engine, predictions and a gang of a
function. Beside each step is the memory in use on the GPU when it has ended. CUDA's and NCCL's own
memory, 0.5 to 1 GB and 0.1 GB, stays for as long as Spark keeps a worker, and any of its workers may
be next: there must be a round that leaves no more than those before.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pyspark import cloudpickle
from torch import nn

import sparkdl

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROOT = Path(__file__).resolve().parents[1]
SAME_BYTES = 64 << 20
"""So much may differ from round to round."""
MOST_ROUNDS = 6
QUIET = {"spark.ui.enabled": "false", "spark.sparkdl.progress": "false"}
CLUSTER = {
    "spark.worker.resource.gpu.amount": "1",
    "spark.worker.resource.gpu.discoveryScript": str(ROOT / "conf" / "discover_gpus.sh"),
    "spark.executor.resource.gpu.amount": "1",
    "spark.task.resource.gpu.amount": "1",
}
WIDE = 2048


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2))


def where() -> str:
    return str(torch.ones(1).to(torch.accelerator.current_accelerator() or "cpu").device)


def used() -> int:
    """Bytes in use on the GPU, by whomever."""
    free, whole = torch.cuda.mem_get_info()
    return whole - free


def steps(spark: Any) -> dict[str, Any]:
    """Name to what is to be called."""
    rows = [([float((i * k) % 7) for k in range(8)], i % 2) for i in range(256)]
    df = spark.createDataFrame(rows, "features array<double>, label long").persist()
    trainer = partial(
        sparkdl.Trainer,
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        batch_size=64,
        stop=sparkdl.max_epoch(2),
    )
    trained = trainer(engine="local").fit(df)
    return {
        "shuffle": lambda: trainer(engine="shuffle").fit(df).history.losses[-1],
        "gang": lambda: trainer(engine="gang").fit(df).history.losses[-1],
        "transform": lambda: trained.transform(df).count(),
        "evaluate": lambda: trained.evaluate(df, metrics=["accuracy"]),
        "gang.run": lambda: sparkdl.gang.run(where),
    }


def rounds(spark: Any) -> bool:
    """Run every step in rounds until one leaves no more memory in use than before; whether one did."""
    before, calls = 0, steps(spark)
    for _ in range(MOST_ROUNDS):
        after = 0
        for name, call in calls.items():
            began = time.monotonic()
            result = call()
            here, seconds = used(), time.monotonic() - began
            after = max(after, here)
            print(f"{name}: {result}, {seconds:.1f} s, {here >> 20} MiB", flush=True)
        if before and after <= before + SAME_BYTES:
            return True
        before = after
    return False


def main(masters: dict[str, dict[str, str]]) -> None:
    """A session of each master, with these settings."""
    for master, settings in masters.items():
        print(f"{master}: {used() >> 20} MiB before", flush=True)
        spark = sparkdl.session(master, **QUIET, **settings)
        try:
            settled = rounds(spark)
        finally:
            spark.stop()
        if not settled:
            sys.exit(f"{master}: each of {MOST_ROUNDS} rounds left more memory in use.")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here.")
    main({"local[2]": {}, "local-cluster[1,4,2048]": CLUSTER})
