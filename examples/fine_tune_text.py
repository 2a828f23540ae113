"""Text to a scored table: an encoder of transformers, of which only an adapter of LoRA is trained.

The encoder comes from a configuration, so that nothing is downloaded. In a real job it is
``AutoModelForSequenceClassification.from_pretrained(folder)``, with ``AutoTokenizer.from_pretrained``.
"""

from __future__ import annotations

import random
import tempfile
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from pyspark.sql import SparkSession
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import sparkdl

NOUNS = "film book meal room song trip phone story match hotel".split()
FILLING = "the this that it we they was really quite never always a and with of our".split()
MARKS = ["awful dull broken poor sad".split(), "lovely fine superb warm bright".split()]


def write_reviews(spark: SparkSession, folder: str, count: int = 800) -> None:
    """text string, of any length; label int, 1 for praise."""
    draw, rows = random.Random(0), []
    for i in range(count):
        words = draw.choices(FILLING + NOUNS, k=draw.randrange(3, 14))
        words.insert(draw.randrange(len(words)), draw.choice(MARKS[i % 2]))
        rows.append((" ".join(words), i % 2))
    spark.createDataFrame(rows, "text string, label int").write.parquet(folder)


def word_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]"]
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=special))
    return tokenizer


def adapted_encoder(words: int) -> nn.Module:
    shape = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=words, num_hidden_layers=1, hidden_dropout_prob=0, **shape)
    adapter = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=32, target_modules="all-linear")
    return get_peft_model(BertForSequenceClassification(config), adapter)


def main(spark: SparkSession, epochs: int = 8) -> dict[str, float]:
    folder = tempfile.mkdtemp()
    write_reviews(spark, f"{folder}/reviews")
    train, test = spark.read.parquet(f"{folder}/reviews").randomSplit([0.8, 0.2], seed=1)
    tokenizer = word_tokenizer([row.text for row in train.select("text").collect()])

    trainer = sparkdl.Trainer(
        model=partial(adapted_encoder, tokenizer.get_vocab_size()),
        loss=sparkdl.ModelLoss(),  # the model computes it from its labels
        output="logits",
        optimizer=partial(torch.optim.AdamW, lr=5e-3),
        features={"input_ids": "text"},
        columns={"text": sparkdl.Text(tokenizer, max_length=32)},
        bucketing=256,
        batch_size=32,
        engine="gang",  # its iterations are short
        stop=sparkdl.max_epoch(epochs),
    )
    trained = trainer.fit(train)
    trained.module.save_pretrained(f"{folder}/adapter")  # by peft: the adapter alone
    trained.transform(test, postprocess=lambda logits: logits.argmax(1)).show(5, truncate=False)

    result = trained.evaluate(test, metrics=["accuracy"])
    saved = Path(folder, "adapter/adapter_model.safetensors").stat().st_size
    print(f"{test.count()} held-out reviews: accuracy {result['accuracy']:.3f} ({saved:,} bytes)")
    return result


if __name__ == "__main__":
    session = sparkdl.session("local[2]")
    try:
        main(session)
    finally:
        session.stop()
