"""Text by a language model of eight layers of width 256, beside a plain loop of transformers.

    python benchmarks/generate.py [--rounds 3] [--quick] [--json FILE]

Each way writes 32 tokens after each of the same prompts, whose lengths are skewed (log-normal), the
most likely ones, in batches of 16, in a process of its own: sparkdl in ``local[2]``, with prompts in a
cached table and texts to Spark's "noop" sink; the plain loop with two threads, over prompts in memory,
in their order and padded on the left, with texts in a list. The ways take turns; the figure is the
median of the rounds, each the second pass in its process. Processor time is that of all processes.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from harness import RANKS, hardware, in_fresh_process, markdown, options, session, write_json
from scored import LONGEST, WORDS, tokenizer
from usage import cpu_seconds

import sparkdl

WAYS = ("sparkdl", "plain loop")
ROWS, BATCH, WRITTEN = 256, 16, 32


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS) + 4,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=2 * LONGEST,
        pad_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def prompts(rows: int) -> list[str]:
    """Prompts of 4 to 254 words, 26 in the median, 42 in the mean."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(3.25, 0.95, rows), 4, LONGEST - 2).astype(int)
    return [" ".join(draw.choice(WORDS, length)) for length in lengths]


def on_spark(rows: int) -> tuple[float, float]:
    spark = session(f"local[{RANKS}]")
    given = [(prompt,) for prompt in prompts(rows)]
    data = spark.createDataFrame(given, "prompt string").repartition(RANKS).cache()
    data.count()
    written = sparkdl.generate(
        data, model(), tokenizer=tokenizer(), max_new_tokens=WRITTEN, batch_size=BATCH
    )
    for _ in range(2):
        started, before = time.perf_counter(), cpu_seconds()
        written.write.format("noop").mode("overwrite").save()
        found = time.perf_counter() - started, cpu_seconds() - before
    spark.stop()
    return found


def plain_loop(rows: int) -> tuple[float, float]:
    torch.set_num_threads(RANKS)
    language_model, tokens, given = model(), tokenizer(), prompts(rows)
    tokens.padding_side = "left"
    for _ in range(2):
        started, before = time.perf_counter(), cpu_seconds()
        texts: list[str] = []
        for start in range(0, rows, BATCH):
            batch = tokens(given[start : start + BATCH], padding=True, return_tensors="pt")
            batch.pop("token_type_ids", None)
            ids = language_model.generate(**batch, max_new_tokens=WRITTEN, do_sample=False)
            new = ids[:, batch["input_ids"].shape[1] :]
            texts += tokens.batch_decode(new, skip_special_tokens=True)
        found = time.perf_counter() - started, cpu_seconds() - before
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    rows = ROWS // (8 if given.quick else 1)
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(1 if given.quick else given.rounds):
        for way, call in zip(WAYS, (on_spark, plain_loop), strict=True):
            taken[way].append(in_fresh_process(call, rows))
    medians = {way: tuple(map(statistics.median, zip(*taken[way], strict=True))) for way in WAYS}
    figures = [
        [way, rows * WRITTEN / seconds, medians[WAYS[1]][0] / seconds, processor]
        for way, (seconds, processor) in medians.items()
    ]
    print(hardware() + "\n")
    print(markdown(["way", "tokens/s", "of the plain loop", "processor s"], figures))
    write_json(given.json, figures)


if __name__ == "__main__":
    main()
