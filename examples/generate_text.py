"""A small language model learns answers from sentences, and writes them after questions in a table.

The model comes from a configuration, so that nothing is downloaded. In a real job it is the folder of a
model: ``sparkdl.generate(questions, folder, "prompt")``.
"""

from __future__ import annotations

from functools import partial

import torch
from pyspark.sql import SparkSession
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import sparkdl

COLORS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black", "fire": "red"}
FORMS = ["what color is the {} ? {}", "the color of the {} is {}", "the {} is {}"]
WORDS = "[PAD] [UNK] [END] what color is the of ?".split()


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = [*WORDS, *COLORS, *COLORS.values()]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[END]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def language_model(words: int) -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def main(spark: SparkSession, epochs: int = 12) -> dict[str, float]:
    sentences = [
        (f"{form.format(thing, color)} [END]",)
        for form in FORMS
        for thing, color in COLORS.items()
        for _ in range(8)
    ]
    table = spark.createDataFrame(sentences, "text string").selectExpr("text", "text AS next")
    tokenizer = word_tokenizer()
    trained = sparkdl.Trainer(
        model=partial(language_model, len(tokenizer)),
        loss=sparkdl.ModelLoss(),
        output="logits",
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        features={"input_ids": "text"},
        label="next",
        columns={"text": sparkdl.Text(tokenizer), "next": sparkdl.Text(tokenizer, padding=-100)},
        batch_size=24,
        replicas=2,
        stop=sparkdl.max_epoch(epochs),
    ).fit(table)

    questions = spark.createDataFrame(
        [(f"what color is the {thing} ?", color) for thing, color in COLORS.items()],
        "prompt string, color string",
    )
    written = sparkdl.generate(questions, trained.module, tokenizer=tokenizer, max_new_tokens=4)
    written.show(truncate=False)
    right = written.where("generated_text = color AND finish_reason = 'stop'").count()
    accuracy = right / len(COLORS)
    print(f"right answers: {accuracy:.3f}")
    return {"accuracy": accuracy}


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()
