"""Scoring with a model that was not trained here, beside ``predict_batch_udf`` and a plain loop.

    python benchmarks/predict.py [--only mlp,conv,encoder] [--rounds 3] [--quick] [--json FILE]

Each way scores the same Parquet file in ``local[2]``, in a process and a JVM of its own, with the same
batch size, and writes its predictions to Spark's "noop" sink. The ways take turns within a round, and
the figure is the median of the rounds, each the second pass over the file in its process.

* mlp: a perceptron 100-256-256-10 on ``array<float>``;
* conv: LeNet-5 on ``array<float>`` of 784;
* encoder: six layers of width 256 on texts whose lengths are skewed (log-normal); mean of the last
  hidden states.

"plain loop" is torch alone: the rows are in memory as arrays (texts as a list), two threads, in their
order. Memory is the largest resident memory of any Python process below the driver (a worker), of its
own pages; for the plain loop, that of the process.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from harness import RANKS, hardware, in_fresh_process, markdown, options, session, write_json
from scored import LONGEST, WORDS, embedded, encoder, make_encoder, make_net, net, tokenizer
from usage import KINDS, Sampler, resident

import sparkdl

WAYS = ("sparkdl", "predict_batch_udf", "plain loop")
ROWS = {"mlp": 200_000, "conv": 20_000, "encoder": 1_200}
BATCH = {"mlp": 1024, "conv": 256, "encoder": 32}
WIDTH = {"mlp": 100, "conv": 784}


def vectors(name: str, rows: int) -> pa.Table:
    draw = np.random.default_rng(0)
    values = pa.array(draw.random(rows * WIDTH[name], dtype=np.float32))
    ends = pa.array(np.arange(rows + 1, dtype=np.int32) * WIDTH[name])
    return pa.table({"features": pa.ListArray.from_arrays(ends, values)})


def texts(rows: int) -> pa.Table:
    """Texts of 4 to 254 words, 26 in the median, 42 in the mean."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(3.25, 0.95, rows), 4, LONGEST - 2).astype(int)
    return pa.table({"text": [" ".join(draw.choice(WORDS, length)) for length in lengths]})


def scored(way: str, name: str, data: Any) -> Any:
    """The data with predictions, lazily."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import ArrayType, FloatType

    if way == "sparkdl":
        if name == "encoder":
            return sparkdl.embed(
                data, encoder(), tokenizer=tokenizer(), normalize=False, batch_size=BATCH[name]
            )
        return sparkdl.predict(data, net(name), batch_size=BATCH[name])
    if name == "encoder":
        make: Any = partial(make_encoder, encoder(), tokenizer())
        udf = predict_batch_udf(make, return_type=ArrayType(FloatType()), batch_size=BATCH[name])
        return data.withColumn("embedding", udf("text"))
    udf = predict_batch_udf(
        partial(make_net, name, net(name).state_dict()),
        return_type=ArrayType(FloatType()),
        batch_size=BATCH[name],
        input_tensor_shapes=[[WIDTH[name]]],
    )
    return data.withColumn("prediction", udf("features"))


def on_spark(way: str, name: str, path: str) -> tuple[float, float]:
    """Seconds of the second pass, and MB."""
    spark = session(f"local[{RANKS}]")
    data = spark.read.parquet(path).repartition(2 * RANKS).cache()
    data.count()
    result = scored(way, name, data)
    sampler = Sampler(0.05)
    sampler.start()
    for _ in range(2):
        started = time.perf_counter()
        result.write.format("noop").mode("overwrite").save()
        seconds = time.perf_counter() - started
    sampler.end()
    spark.stop()
    return seconds, sampler.peak(KINDS[2]) / 1e6


def batches_of(name: str, path: str) -> Iterator[Any]:
    table = pq.read_table(path)
    if name == "encoder":
        rows: Any = table["text"].to_pylist()
    else:
        flat = table["features"].combine_chunks().flatten().to_numpy()
        rows = flat.reshape(-1, WIDTH[name])
    for start in range(0, len(rows), BATCH[name]):
        yield rows[start : start + BATCH[name]]


@torch.no_grad()
def plain_loop(name: str, path: str) -> tuple[float, float]:
    torch.set_num_threads(RANKS)
    model = encoder() if name == "encoder" else net(name).eval()
    tokens = tokenizer() if name == "encoder" else None
    batches = list(batches_of(name, path))
    started = time.perf_counter()
    for batch in batches:
        if name == "encoder":
            embedded(model, tokens, batch).numpy()
        else:
            model(torch.from_numpy(batch)).numpy()
    seconds = time.perf_counter() - started
    found = resident(os.getpid())
    assert found is not None
    return seconds, found["RssAnon"] / 1e6


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", help="names, with commas between")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(ROWS)
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            rows = ROWS[name] // (10 if given.quick else 1)
            path = str(Path(folder, f"{name}.parquet"))
            pq.write_table(texts(rows) if name == "encoder" else vectors(name, rows), path)
            taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
            for _ in range(1 if given.quick else given.rounds):
                for way in WAYS:
                    call = (plain_loop,) if way == WAYS[2] else (on_spark, way)
                    taken[way].append(in_fresh_process(*call, name, path))
            speeds = {way: rows / statistics.median(s for s, _ in taken[way]) for way in WAYS}
            for way in WAYS:
                memory = statistics.median(mb for _, mb in taken[way])
                ratio = speeds[way] / speeds["predict_batch_udf"]
                figures.append([name, way, speeds[way], ratio, memory])
            print(
                f"{name}: " + ", ".join(f"{way} {speeds[way]:,.0f}/s" for way in WAYS), flush=True
            )
    print(hardware() + "\n")
    print(markdown(["model", "way", "rows/s", "of predict_batch_udf", "MB"], figures))
    write_json(given.json, figures)


if __name__ == "__main__":
    main()
