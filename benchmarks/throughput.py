"""Training speed of each model, beside its baselines.

    python benchmarks/throughput.py [--works mlp:256,lenet,ncf] [--iterations 700] [--large 8] [--quick]

For each model and global batch, in fresh processes one after another: plain PyTorch in one process
with all cores; DDP over Gloo with 2 ranks of one thread; then sparkdl's shuffle engine at M = N = 2 in
``local[2]``, and in the same session an empty two-stage PySpark job. Beside them BigDL's figures,
which depend on how warm the JVM is: "early" is iterations 80 to 250 of a fresh JVM, "warm" is 450 and
later (``--iterations`` in all; BigDL's are of up to 1,500). Large models run ``--large`` iterations,
the first quarter left out.

An iteration is from its end to the end of the one before, all of the driver's work included.
"compute" is forward and backward of the slower replica, "beyond" the iteration less that. With local
steps (the MLP, 8 batches of each replica between two averages) all figures are for a batch.
"""

from __future__ import annotations

from typing import Any

import bigdl
import ddp
from baselines import bigdl_table, one_process_ms
from empty_jobs import jobs_ms, two_stage_job
from harness import (
    Lap,
    hardware,
    in_fresh_process,
    laps,
    markdown,
    medians,
    options,
    session,
    trainer,
    write_json,
)
from models import WORKS

import sparkdl

LOCAL_STEPS = 8
EMPTY_JOBS = 60
PARTS = ("schedule", "data", "fetch", "forward", "backward", "publish", "reduce", "update")


def shuffle(name: str, batch: int, iterations: int, local: int, stages: str) -> dict[str, Any]:
    """The laps of a run in a fresh session, those of one with local steps (``local`` iterations of
    it; 0: none), and milliseconds of an empty two-stage job of the session."""
    work = WORKS[name]
    spark = session(**{"spark.sparkdl.stages": stages})
    try:
        data = work.rdd(spark, partitions=2).persist()
        found: dict[str, Any] = {
            "laps": laps(trainer(work, batch, sparkdl.max_iteration(iterations)).fit(data).history)
        }
        found["empty"] = jobs_ms(spark, two_stage_job, EMPTY_JOBS)
        if local:
            several = trainer(work, batch, sparkdl.max_iteration(local), local_steps=LOCAL_STEPS)
            found["local"] = laps(several.fit(data).history)
    finally:
        spark.stop()
    return found


def windows(some: list[Lap], large: bool) -> dict[str, list[Lap]]:
    """The iterations that count, by how warm they are."""
    if large or len(some) <= bigdl.EARLY[0]:
        return {"": some[len(some) // 4 :]}
    parts = {"early": some[slice(*bigdl.EARLY)], "warm": some[bigdl.WARM[0] :]}
    return {name: part for name, part in parts.items() if part}


def measure(
    name: str, batch: int, iterations: int, local: int, stages: str
) -> list[dict[str, Any]]:
    """One row for each window, and one with local steps; milliseconds."""
    work = WORKS[name]
    steps = iterations if work.large else min(iterations, 300)
    single = one_process_ms(name, batch, steps, 1 + steps // 4)
    distributed = ddp.step_ms(name, batch, steps, 1 + steps // 4)
    ours = in_fresh_process(shuffle, name, batch, iterations, local, stages)
    common = {
        "work": name,
        "batch": batch,
        "one process": single,
        "DDP": distributed,
        "empty": ours["empty"],
    }
    theirs = bigdl.MEASURED.get((name, batch))
    rows = []
    for window, some in windows(ours["laps"], work.large).items():
        known = getattr(theirs, window, None) if window else None
        rows.append({**common, "window": window, **medians(some), "BigDL": known})
    if local:
        some = ours["local"][local // 4 :]
        each = {part: value / LOCAL_STEPS for part, value in medians(some).items()}
        known = theirs.warm if theirs and rows[-1]["window"] == "warm" else None
        rows.append({**common, "window": f"local_steps={LOCAL_STEPS}", **each, "BigDL": known})
    return rows


def ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None


def speed_table(rows: list[dict[str, Any]]) -> str:
    head = (
        "model, batch,, sparkdl ms, samples/s, compute, beyond, (a) empty job, (b) one process, "
        "(c) DDP x 2, (f) BigDL, beyond / (a), sparkdl / (b), sparkdl / (c), sparkdl / (f)"
    )
    return markdown(
        [title.strip() for title in head.split(",")],
        (
            (
                WORKS[row["work"]].name,
                row["batch"],
                row["window"],
                row["whole"],
                row["batch"] / row["whole"] * 1e3,
                row["compute"],
                row["beyond"],
                *(row[key] for key in ("empty", "one process", "DDP", "BigDL")),
                ratio(row["beyond"], row["empty"]),
                *(ratio(row["whole"], row[key]) for key in ("one process", "DDP", "BigDL")),
            )
            for row in rows
        ),
    )


def parts_table(rows: list[dict[str, Any]]) -> str:
    return markdown(
        ["model", "batch", "", "ms", *PARTS],
        (
            (
                WORKS[row["work"]].name,
                *(row[key] for key in ("batch", "window", "whole")),
                *(row.get(part) for part in PARTS),
            )
            for row in rows
        ),
    )


def chosen(text: str | None, quick: bool) -> list[tuple[str, int]]:
    """Pairs of work and batch: "mlp:256" is one, "mlp" all of its batches."""
    if text is None:
        pairs = {name: work.batches for name, work in WORKS.items()} | {"lenet": (256,)}
        return [
            (name, batch) for name, some in pairs.items() for batch in some[: 1 if quick else 3]
        ]
    split = [item.partition(":") for item in text.split(",")]
    return [
        (name, size)
        for name, _, batch in split
        for size in ([int(batch)] if batch else WORKS[name].batches)
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--works", help="such as mlp:256,lenet; default: all, LeNet at 256 only")
    parser.add_argument("--iterations", type=int, default=700, help="of a small model")
    parser.add_argument("--large", type=int, default=8, help="iterations of a large model")
    parser.add_argument("--stages", choices=("auto", "one", "two"), default="auto")
    given = parser.parse_args()
    small, large, local = (120, 3, 20) if given.quick else (given.iterations, given.large, 60)
    print(hardware(), "M = N = 2, milliseconds.\n", flush=True)
    rows = []
    for name, batch in chosen(given.works, given.quick):
        iterations = large if WORKS[name].large else small
        rows += measure(name, batch, iterations, local if name == "mlp" else 0, given.stages)
        print(f"{name}:{batch} done, {rows[-1]['whole']:.1f} ms", flush=True)
    print("\n" + speed_table(rows))
    print("\nWhere the time of an iteration went (each activity: the slowest task's):\n")
    print(parts_table(rows))
    print("\n" + bigdl_table())
    write_json(given.json, rows)


if __name__ == "__main__":
    main()
