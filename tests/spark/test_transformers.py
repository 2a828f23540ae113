"""Models of transformers and adapters of peft are trained as they are, and come out as they went in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from launch import soak_but
from lazily import Lazily
from pyspark import cloudpickle
from torch import nn

import sparkdl
from sparkdl.model.flat import layout_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

tokenizers = pytest.importorskip("tokenizers")
transformers = Lazily("transformers")
peft = Lazily("peft")

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

WORDS = "good bad film plot a the very not is was".split()
TEXTS = [
    " ".join(WORDS[(i * k + i // 3) % len(WORDS)] for k in range(1, 3 + i * 7 % 9))
    for i in range(24)
]
LABELS = [int("good" in text.split()) for text in TEXTS]
VOCABULARY = {word: n for n, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}


def tokenizer() -> Any:
    """A tokenizer of words between [CLS] and [SEP]."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, **{f"{name}_token": token for name, token in names.items()}
    )


def encoder() -> nn.Module:
    """Build a classifier of one small layer, without dropout, always with the same weights."""
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    return transformers.BertForSequenceClassification(config)


def causal() -> nn.Module:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def with_adapter() -> nn.Module:
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    return peft.get_peft_model(encoder(), config)


@pytest.fixture(scope="module")
def reviews(spark: SparkSession) -> Iterator[DataFrame]:
    rows = [(text, text, label) for text, label in zip(TEXTS, LABELS, strict=True)]
    found = (
        spark.createDataFrame(rows, "text string, next string, label int").repartition(2).cache()
    )
    yield found
    found.unpersist()


TRAINER = sparkdl.Trainer(
    model=with_adapter,
    loss=sparkdl.ModelLoss(),
    optimizer=partial(torch.optim.AdamW, lr=0.05),
    features={"input_ids": "text"},
    output="logits",
    columns={"text": sparkdl.Text(tokenizer(), max_length=8)},
    batch_size=len(TEXTS),  # all of them, in any order
    replicas=2,
    engine="local",
    stop=sparkdl.max_iteration(3),
)
NEXT = sparkdl.Text(tokenizer(), max_length=8, padding=-100)
CAUSAL = replace(TRAINER, model=causal, label="next", columns={**TRAINER.columns, "next": NEXT})
STARTS = [" ".join(text.split()[-2:]) for text in TEXTS]
LONG = {"max_length": 7, "stride": 2, "text_pair": "next"}
PAIRS = replace(
    TRAINER,
    model=partial(sparkdl.Windows, encoder),
    loss=nn.CrossEntropyLoss(),
    output=None,
    columns={"text": sparkdl.Text(tokenizer(), **LONG)},
)
"""Pairs of texts, the second of which is divided into windows where it is long."""


def pooled(module: nn.Module) -> torch.Tensor:
    """The scores of pairs as a user of transformers makes them: window by window, their mean."""
    rows = []
    for first, second in zip(STARTS, TEXTS, strict=True):
        batch = tokenizer()(
            [first],
            [second],
            truncation="only_second",
            max_length=LONG["max_length"],
            stride=LONG["stride"],
            return_overflowing_tokens=True,
            return_token_type_ids=True,
            padding=True,
            return_tensors="pt",
        )
        batch.pop("overflow_to_sample_mapping")
        rows.append(module(**batch).logits.mean(0))
    return torch.stack(rows)


@pytest.mark.gang
@pytest.mark.parametrize(
    "engine",
    soak_but([{"engine": "shuffle"}], [{"engine": name} for name in ("local", "shuffle", "gang")]),
    ids=lambda given: given["engine"],
)
def test_pairs_in_windows_train_as_in_a_plain_loop(
    spark: SparkSession, engine: dict[str, str], tmp_path: Path
) -> None:
    """Also saved, loaded without trust, and applied to the same columns."""
    rows = list(zip(STARTS, TEXTS, LABELS, range(len(TEXTS)), strict=True))
    pairs = spark.createDataFrame(rows, "text string, next string, label bigint, number int")
    module, losses = encoder().train(), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(pooled(module), torch.tensor(LABELS))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    trained = replace(PAIRS, **engine).fit(pairs)
    assert trained.history.losses == pytest.approx(losses, rel=1e-4)
    trained.save(tmp_path / "model")
    loaded = sparkdl.load(tmp_path / "model", model=partial(sparkdl.Windows, encoder))
    with torch.no_grad():
        expected = pooled(module.eval())
    for row in loaded.transform(pairs).collect():
        assert row.prediction == pytest.approx(expected[row.number].tolist(), abs=2e-3)


def plain_loop(module: nn.Module, labels: torch.Tensor | None = None) -> list[float]:
    """Train as a user of transformers would, and return the losses."""
    batch = tokenizer()(TEXTS, truncation=True, max_length=8, padding=True, return_tensors="pt").to(
        "cpu"
    )
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100) if labels is None else labels
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.05)
    losses, _ = [], module.train()
    for _ in range(3):
        optimizer.zero_grad()
        loss = module(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    module.eval()
    return losses


@pytest.fixture(scope="module")
def adapted(reviews: DataFrame) -> sparkdl.TrainedModel:
    return TRAINER.fit(reviews)


ENGINES = [
    {"engine": "local"},
    {"engine": "shuffle"},
    {"engine": "gang"},
    {"engine": "gang", "strategy": "fsdp"},
]
IN_CI = [
    ("adapter", ENGINES[1]),
    ("adapter", ENGINES[3]),
    ("causal", ENGINES[0]),
    ("causal", ENGINES[2]),
]


@pytest.mark.gang
@pytest.mark.parametrize(
    ("task", "engine"),
    soak_but(IN_CI, [(task, engine) for task in ("adapter", "causal") for engine in ENGINES]),
    ids=lambda given: "-".join(given.values()) if isinstance(given, dict) else given,
)
def test_the_same_as_a_plain_loop(reviews: DataFrame, task: str, engine: dict[str, str]) -> None:
    """Replicas have unequal numbers of tokens, by which a causal model's losses are weighted."""
    if task == "adapter":
        module, found = with_adapter(), replace(TRAINER, **engine).fit(reviews)
        losses = plain_loop(module, torch.tensor(LABELS))
    else:
        module, found = causal(), replace(CAUSAL, **engine).fit(reviews)
        losses = plain_loop(module)
    assert found.history.losses == pytest.approx(losses, rel=1e-4)
    assert losses[-1] < losses[0]
    state = found.module.state_dict()
    for name, tensor in module.state_dict().items():
        assert torch.allclose(state[name], tensor, atol=2e-3), name


def logits_of(module: nn.Module) -> torch.Tensor:
    batch = tokenizer()(TEXTS, truncation=True, max_length=8, padding=True, return_tensors="pt")
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        return module.eval()(**batch).logits


def test_the_adapter_as_peft_writes_it(adapted: sparkdl.TrainedModel, tmp_path: Path) -> None:
    module = adapted.module
    assert isinstance(module, peft.PeftModel)
    module.save_pretrained(tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        file.name for file in tmp_path.iterdir()
    }
    again = peft.PeftModel.from_pretrained(encoder(), tmp_path)
    assert torch.equal(logits_of(again), logits_of(module))
    assert not torch.allclose(logits_of(again), logits_of(with_adapter()), atol=1e-3)


def test_predictions_of_text(
    reviews: DataFrame, adapted: sparkdl.TrainedModel, tmp_path: Path
) -> None:
    """Also by a model that was saved: with it goes the tokenizer."""
    expected = dict(zip(TEXTS, logits_of(adapted.module).tolist(), strict=True))
    adapted.save(tmp_path / "saved")
    saved = sparkdl.load(tmp_path / "saved", model=with_adapter)
    for one in (adapted, saved):
        for row in one.transform(reviews.select("text")).collect():
            assert row["prediction"] == pytest.approx(expected[row["text"]], abs=1e-5)
    result = adapted.evaluate(reviews, metrics=["accuracy"])
    assert result["loss"] < 0.7


def test_the_model_as_transformers_writes_it(reviews: DataFrame, tmp_path: Path) -> None:
    """Of lower precision, with activation checkpointing, texts of like length together."""
    trainer = replace(
        TRAINER,
        model=encoder,
        precision="bf16",
        activation_checkpointing=["bert.encoder.layer.*"],
        batch_size=8,
        bucketing=24,
        validation=sparkdl.Validation(reviews, metrics=["accuracy"]),
    )
    trained = trainer.fit(reviews)
    assert trained.history.validations[-1]["metrics"]["accuracy"] > 0.5
    trained.module.save_pretrained(tmp_path)
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(logits_of(again), logits_of(trained.module))


def bytes_of(folder: Path) -> int:
    """The bytes of all tensors in the slices of a checkpoint."""
    slices = [safetensors.torch.load_file(file) for file in folder.rglob("slice-*.safetensors")]
    return sum(tensor.nbytes for tensors in slices for tensor in tensors.values())


@pytest.mark.soak
def test_only_the_adapter_travels(reviews: DataFrame, tmp_path: Path) -> None:
    """Weights and both moments of Adam take three times its bytes; the base is in no checkpoint."""
    module, checkpoints = with_adapter(), {}
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in module.parameters())
    assert trainable < whole / 8
    lengths = [s.length for s in layout_of(module).segments if s.kind == "parameter"]
    assert sum(lengths) == trainable, "what travels and has optimizer state"
    runs = {"adapter": {}, "shuffle": {"engine": "shuffle"}, "all": {"model": encoder}}
    for name, changes in runs.items():
        place = sparkdl.Checkpoint(tmp_path / name, every=sparkdl.every(3))
        replace(TRAINER, checkpoint=place, **changes).fit(reviews)
        checkpoints[name] = bytes_of(tmp_path / name)
    assert checkpoints["shuffle"] == checkpoints["adapter"]
    fixed = 1_000  # buffers, gaps between parameters, and Adam's counters of steps
    assert 3 * 4 * trainable <= checkpoints["adapter"] < 3 * 4 * trainable + fixed
    assert checkpoints["all"] > 3 * 4 * (whole - trainable)
    resumed = replace(TRAINER, stop=sparkdl.max_iteration(4), engine="local")
    resumed = replace(resumed, checkpoint=sparkdl.Checkpoint(tmp_path / "adapter"))
    assert len(resumed.fit(reviews, resume="latest").history) == 4


class Embedder(nn.Module):
    """Embed a text as the mean of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder().bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids, attention_mask).last_hidden_state
        mask = attention_mask[..., None]
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def contrast(module: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tell each text's pair from those of the other rows."""
    query = module(batch["query"], batch["query_mask"])
    found = module(batch["answer"], batch["answer_mask"])
    answers, first = sparkdl.all_rows(found)
    scores = query @ answers.T / 0.1
    right = first + torch.arange(len(scores), device=scores.device)
    hits = (scores.argmax(1) == right).float().mean()
    return {"loss": nn.functional.cross_entropy(scores, right), "hits": hits}


def test_sentence_embeddings(reviews: DataFrame) -> None:
    trainer = sparkdl.Trainer(
        model=partial(_without_pooler, Embedder),
        step=sparkdl.PerReplica(contrast),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        features={"query": "text", "answer": "next"},
        label=None,
        columns={name: sparkdl.Text(tokenizer(), max_length=8) for name in ("text", "next")},
        batch_size=12,
        replicas=2,
        engine="local",
        stop=sparkdl.max_epoch(4),
    )
    history = trainer.fit(reviews.dropDuplicates(["text"])).history
    assert history.losses[-1] < history.losses[0]
    assert history.named_losses["hits"][-1] > 0.5


def _without_pooler(build: Any) -> nn.Module:
    module = build()
    module.encoder.pooler = None
    return module
