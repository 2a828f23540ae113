"""Engines that write texts: the tokens of each row alone, the draws of its seed, and where it ends."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import small_text
import torch

from sparkdl.errors import ModelError, ParameterError
from sparkdl.infer.generate import Generator
from sparkdl.infer.generation_engines import Sampling, TransformersEngine, VllmEngine

PROMPTS = ["a good film", "it", "bad day it was very nice day today", "today"]


def engine() -> TransformersEngine:
    made = TransformersEngine().load(small_text.language_model(), None)
    made.tokenizer = small_text.tokenizer()
    return made


def numbers(prompts: list[str]) -> list[list[int]]:
    return [small_text.tokenizer()(prompt)["input_ids"] for prompt in prompts]


def test_prompts_of_any_length_are_written_as_alone() -> None:
    found = engine().generate(numbers(PROMPTS), [0] * 4, Sampling(8))
    for prompt, (one,) in zip(numbers(PROMPTS), found, strict=True):
        ids = torch.tensor([prompt])
        told = small_text.language_model().generate(ids, max_new_tokens=8, do_sample=False)
        assert [*prompt, *one.token_ids] == told[0].tolist()
        assert one.finish_reason == ("stop" if 3 in one.token_ids else "length")


def test_draws_follow_from_the_seed_of_the_row() -> None:
    how = Sampling(8, 2, do_sample=True, warpers={"temperature": 1.5, "top_p": 0.95})
    together = engine().generate(numbers(PROMPTS), [1, 2, 3, 4], how)
    alone = [
        engine().generate([prompt], [seed], how)[0]
        for seed, prompt in enumerate(numbers(PROMPTS), start=1)
    ]
    assert together == alone
    assert len({tuple(one.token_ids) for row in together for one in row}) == 8
    for name in ("top_h", "eta_cutoff"):
        narrow = replace(how, warpers={"temperature": 1.5, name: 0.2})
        assert engine().generate(numbers(PROMPTS), [1, 2, 3, 4], narrow) != together, name
    others = engine().generate(numbers(PROMPTS), [5, 6, 7, 8], how)
    assert all(one != other for one, other in zip(together, others, strict=True))


def test_draws_have_the_probabilities_of_the_model() -> None:
    (prompt,), count = numbers(PROMPTS[1:2]), 2000
    how = Sampling(1, do_sample=True, warpers={"temperature": 2.0, "top_k": 4})
    rows = engine().generate([prompt] * count, list(range(count)), how)
    drawn = Counter(row[0].token_ids[0] for row in rows)
    with torch.no_grad():
        logits = small_text.language_model()(torch.tensor([prompt])).logits[0, -1]
    values, tokens = (logits / 2).topk(4)
    assert set(drawn) == set(tokens.tolist())
    for token, probability in zip(tokens.tolist(), values.softmax(0).tolist(), strict=True):
        assert abs(drawn[token] / count - probability) < 0.03


def written(sampling: Sampling, made: Any = None) -> dict[str, list[Any]]:
    module = Generator(made or engine(), small_text.tokenizer(), sampling).eval()
    batch = small_text.tokenizer()(PROMPTS, padding=True, return_tensors="pt", padding_side="left")
    return module(batch["input_ids"], batch["attention_mask"])


def test_a_stop_string_ends_a_text() -> None:
    whole, cut = written(Sampling(12)), written(Sampling(12, stop_strings=("bad", "zz")))
    for text, tokens, short, fewer, reason in zip(
        *(whole["text"], whole["token_ids"], cut["text"], cut["token_ids"], cut["finish_reason"]),
        strict=True,
    ):
        assert short == text.partition("bad")[0]
        assert tokens[: len(fewer)] == fewer
        if "bad" in text:
            assert (len(fewer) < len(tokens), reason) == (True, "stop")
    assert any("bad" in text for text in whole["text"])


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ({"others": {"num_beam": 2}}, ParameterError, 'Did you mean "num_beams"?'),
        (
            {"others": {"num_beams": 2}, "do_sample": True},
            ParameterError,
            "num_beams= goes with neither sampling nor stop_strings=.",
        ),
        ({"others": {"cache_implementation": "none"}}, ModelError, "on a prompt of two tokens"),
    ],
)
def test_a_mistake_is_told_by_one_token(how: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind) as raised:
        engine().check(Sampling(8, **how))
    assert message in str(raised.value)


@dataclass
class SamplingParams:
    """The fields of vLLM's class of this name that are used."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] | None = None
    max_tokens: int | None = 16


@dataclass
class Output:
    """What vLLM returns for a request, and for each of its texts."""

    outputs: tuple[Any, ...] = ()
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None


class LLM:
    """vLLM's class of this name, which repeats the prompt backward and notes what it was given."""

    def __init__(self, model: str, dtype: str = "auto", tensor_parallel_size: int = 1) -> None:
        self.made = {"model": model, "dtype": dtype, "tensor_parallel_size": tensor_parallel_size}

    def generate(
        self, prompts: list[Any], sampling_params: list[SamplingParams], *, use_tqdm: bool = True
    ) -> list[Output]:
        self.given, found = sampling_params, []
        for prompt, how in zip(prompts, sampling_params, strict=True):
            ids = tuple(prompt["prompt_token_ids"][::-1])
            reason = "stop" if len(ids) <= how.max_tokens else "length"
            found.append(Output((Output((), ids[: how.max_tokens], reason),) * how.n))
        return found


def test_vllm_is_given_what_it_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in: Any = ModuleType("vllm")
    stand_in.LLM, stand_in.SamplingParams = LLM, SamplingParams
    small_text.language_model().save_pretrained(tmp_path)
    made = VllmEngine(tensor_parallel_size=2).load(tmp_path, torch.bfloat16)
    assert made.config.max_position_embeddings == 64
    how = Sampling(6, 2, ("day",), True, {"top_p": 0.9}, {"repetition_penalty": 1.1})
    with pytest.raises(ParameterError, match=r'pip install vllm \(the extra "vllm"\)'):
        written(how, made)
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    found = written(how, made)
    assert found["token_ids"] == [[row[::-1][:6]] * 2 for row in numbers(PROMPTS)]
    assert [row[0] for row in found["finish_reason"]] == ["stop", "stop", "length", "stop"]
    assert found["text"][0] == ["film good a"] * 2
    opened = made._open
    assert opened.made == {"model": str(tmp_path), "dtype": "bfloat16", "tensor_parallel_size": 2}
    first, *others = opened.given
    assert replace(first, seed=0) == SamplingParams(2, 1.0, 0.9, 0, 1.1, 0, ["day"], 6)
    assert len({one.seed for one in opened.given}) == 1 + len(others)
    written(Sampling(6), made)
    assert made._open is opened
    assert opened.given[0].temperature == 0.0
    with pytest.raises(ModelError, match="give the path of a folder"):
        VllmEngine().load(small_text.language_model(), None)
