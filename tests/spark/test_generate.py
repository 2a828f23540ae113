"""Text for a column of prompts: the same in any partition and batch, resumed, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import small_text
import torch
from lazily import Lazily

import sparkdl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]
transformers = Lazily("transformers")
WORDS = small_text.WORDS.split()
PROMPTS = [" ".join(WORDS[i * k % len(WORDS)] for k in range(1, 2 + i % 7)) for i in range(14)]
SHORT: dict[str, Any] = {"max_new_tokens": 6}


@pytest.fixture(scope="module")
def prompts(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(list(enumerate(PROMPTS)), "number int, prompt string")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    small_text.language_model().save_pretrained(path)
    small_text.tokenizer().save_pretrained(path)
    return path


def texts(written: DataFrame) -> list[Any]:
    rows = sorted(written.collect(), key=lambda row: row.number)
    return [row.generated_text for row in rows]


def alone(prompt: str, **how: Any) -> list[int]:
    ids = small_text.tokenizer()(prompt, return_tensors="pt", **how)["input_ids"]
    whole = small_text.language_model().generate(ids, do_sample=False, **SHORT)
    return whole[0, ids.shape[1] :].tolist()


def test_the_most_likely_text(prompts: DataFrame, folder: Path, tmp_path: Path) -> None:
    """As of one prompt at a time; a part that is missing is written again."""
    how = {**SHORT, "tokens_col": "tokens", "batch_size": 5, "path": tmp_path, "partitions": 2}
    written = sparkdl.generate(prompts, folder, **how)
    for row in written.collect():
        assert row.tokens == alone(row.prompt)
        assert row.finish_reason == ("stop" if 3 in row.tokens else "length")
    before = texts(written)
    kept = next(tmp_path.glob("part-00000*")).stat().st_mtime_ns
    next(tmp_path.glob("part-00001*")).unlink()
    assert texts(sparkdl.generate(prompts, folder, **how)) == before
    assert next(tmp_path.glob("part-00000*")).stat().st_mtime_ns == kept
    with pytest.raises(sparkdl.ParameterError, match="holds other predictions"):
        sparkdl.generate(prompts, folder, **how, seed=1)


def test_a_row_gets_the_same_draws_anywhere(prompts: DataFrame) -> None:
    model, tokenizer = small_text.language_model(), small_text.tokenizer()
    how = {**SHORT, "temperature": 1.2, "num_return_sequences": 2, "tokenizer": tokenizer}
    found = texts(sparkdl.generate(prompts.coalesce(1), model, batch_size=14, **how))
    assert texts(sparkdl.generate(prompts.repartition(3), model, batch_size=2, **how)) == found
    assert texts(sparkdl.generate(prompts, model, **how, seed=1)) != found
    assert any(one != other for one, other in found)


def with_template() -> Any:
    tokenizer = copy.deepcopy(small_text.tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}it was{% endif %}"
    )
    return tokenizer


def test_chats_become_prompts_by_the_template(prompts: DataFrame, tmp_path: Path) -> None:
    chats = prompts.selectExpr(
        "number", "array(named_struct('role', 'user', 'content', prompt)) AS chat"
    )
    how = {**SHORT, "tokenizer": with_template(), "tokens_col": "tokens", "path": tmp_path}
    for _ in range(2):  # the second call finds all there
        written = sparkdl.generate(chats, small_text.language_model(), "chat", **how)
        for row in written.collect():
            prompt = f"{row.chat[0].content} it was"
            assert row.tokens == alone(prompt, add_special_tokens=False)


def test_a_prompt_that_leaves_no_room_is_a_bad_row(prompts: DataFrame, folder: Path) -> None:
    written = sparkdl.generate(prompts, folder, max_new_tokens=58, handle_invalid="keep")
    for row in written.collect():
        length = len(small_text.tokenizer()(row.prompt)["input_ids"])
        told = f'column "prompt" has {length} tokens, and the model takes 6 before the 58'
        assert (row.generated_text is None) == (length > 6)
        assert length <= 6 or row.error.startswith(told)
    cut = sparkdl.generate(prompts, folder, max_new_tokens=58, max_length=6)
    assert cut.count() == len(PROMPTS)


MISTAKES: dict[str, tuple[Callable[[DataFrame, Path], Any], str]] = {
    "no room": (
        lambda df, path: sparkdl.generate(df, path),
        "max_new_tokens=128: the model has room for 64 tokens, with those of the prompt.",
    ),
    "no template": (
        lambda df, path: sparkdl.generate(
            df.selectExpr("array(named_struct('role', 'user', 'content', prompt)) AS prompt"),
            path,
            **SHORT,
        ),
        'column "prompt" holds chats, and the tokenizer has no chat template: set',
    ),
    "no language model": (
        lambda df, path: sparkdl.generate(df, small_text.classifier(), **SHORT),
        "BertForSequenceClassification, which writes no text: give one of transformers that does",
    ),
    "no tokenizer": (
        lambda df, path: sparkdl.generate(df, small_text.language_model(), **SHORT),
        'column "prompt" is text: give the tokenizer of the model',
    ),
    "no text": (
        lambda df, path: sparkdl.generate(df, path, "number", **SHORT),
        'feature column "number" is of type int, which is no text',
    ),
    "no such argument": (
        lambda df, path: sparkdl.generate(df, path, temprature=1, **SHORT),
        "generate has no argument 'temprature', nor has transformers. Did you mean \"temperature\"?",
    ),
    "equal texts": (
        lambda df, path: sparkdl.generate(df, path, num_return_sequences=2, **SHORT),
        "num_return_sequences=2 texts would be the same: give do_sample=True, or as many num_beams.",
    ),
    "an empty stop": (
        lambda df, path: sparkdl.generate(df, path, stop_strings=["end", ""], **SHORT),
        "stop_strings=['end', '']: give texts that are not empty.",
    ),
    "chats to cut": (
        lambda df, path: sparkdl.generate(
            df.selectExpr("array(named_struct('role', 'user', 'content', prompt)) AS prompt"),
            small_text.language_model(),
            tokenizer=with_template(),
            max_length=3,
            **SHORT,
        ),
        'max_length=3: column "prompt" holds chats, which it would cut inside the template.',
    ),
    "one name": (
        lambda df, path: sparkdl.generate(df, path, tokens_col="finish_reason", **SHORT),
        'new columns would have one name, "finish_reason" and "finish_reason"',
    ),
    "no such engine": (
        lambda df, path: sparkdl.generate(df, path, engine="vlm", **SHORT),
        "engine='vlm': use one of transformers, vllm, or a sparkdl.GenerationEngine.",
    ),
    "no dtype": (
        lambda df, path: sparkdl.generate(df, path, dtype="int8", **SHORT),
        "dtype='int8': give a dtype of torch, such as \"bfloat16\".",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_before_any_job(prompts: DataFrame, folder: Path, mistake: str) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises(sparkdl.UserError) as raised:
        call(prompts, folder)
    assert message in str(raised.value)


def pairs_model(scores: int) -> Any:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=200,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=24,
            num_labels=scores,
        )
    ).eval()


def test_pairs_are_scored(prompts: DataFrame) -> None:
    """By their own columns, whole and in windows, and as a function of SQL."""
    tokenizer, model = small_text.tokenizer(), pairs_model(1)
    pairs = prompts.selectExpr("number", "prompt AS query", "reverse(prompt) AS text").repartition(
        2
    )
    first, second = PROMPTS, [prompt[::-1] for prompt in PROMPTS]
    inputs = tokenizer(first, second, padding=True, truncation=True, max_length=24,
                       return_tensors="pt", return_token_type_ids=True)  # fmt: skip
    with torch.no_grad():
        expected = model(**inputs).logits[:, 0]
    found = sparkdl.rerank(pairs, model, tokenizer=tokenizer)
    scores = [row.score for row in sorted(found.collect(), key=lambda row: row.number)]
    torch.testing.assert_close(torch.tensor(scores), expected.sigmoid())
    column = sparkdl.Text(tokenizer, text_pair="text", max_length=24)
    found = sparkdl.predict(pairs, model, {"input_ids": "query"}, columns={"query": column})
    scores = [row.prediction for row in sorted(found.collect(), key=lambda row: row.number)]
    torch.testing.assert_close(torch.tensor(scores)[:, 0], expected)
    given = {"tokenizer": tokenizer, "max_length": 16, "stride": 2}
    classes = sparkdl.classify(pairs, pairs_model(3), ("query", "text"), **given)
    sparkdl.register_function(
        "kind", pairs_model(3), pairs, ("query", "text"), use=sparkdl.classify, **given
    )
    same = classes.selectExpr("prediction = kind(query, text).prediction AS same").collect()
    assert [row.same for row in same] == [True] * len(PROMPTS)
    with pytest.raises(sparkdl.ModelError, match="scores 3 classes, and rerank takes one score"):
        sparkdl.rerank(pairs, pairs_model(3), tokenizer=tokenizer)
    with pytest.raises(
        sparkdl.DataError, match=r'"texts", which columns\["query"\] names, is missing'
    ):
        sparkdl.rerank(pairs, model, text="texts", tokenizer=tokenizer)
