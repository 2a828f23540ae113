"""Text out of language models, for a column of prompts or chats: :func:`generate`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import torch
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.data.columns.text import ChatTemplate, Prompts
from sparkdl.data.epoch import derive_seed
from sparkdl.errors import ParameterError, kind_of, shown, wrong_data
from sparkdl.infer.generation_engines import (
    WARPERS,
    Completion,
    GenerationEngine,
    Sampling,
    TransformersEngine,
    VllmEngine,
)
from sparkdl.infer.outputs import OutputColumn
from sparkdl.infer.predict import FUNCTIONS, computed
from sparkdl.infer.score import Inputs, ModelSource, Options, prepare
from sparkdl.infer.source import library, longest, tokenizer_of
from sparkdl.model.recipe import Signature
from sparkdl.plain import is_whole, plain

TOP_K = 50
"""The ``top_k`` of transformers where neither the model nor the user says one."""


class Generator(nn.Module):
    """A module that writes texts: prompts in, and lists of texts, tokens and reasons out."""

    def __init__(self, engine: GenerationEngine, tokenizer: Any, sampling: Sampling) -> None:
        super().__init__()
        self.engine, self.tokenizer, self.sampling = engine, tokenizer, sampling
        self.on_cpu = engine.on_cpu

    def extra_repr(self) -> str:
        """Return the options, and the engine if it is no module."""
        engine = "" if isinstance(self.engine, nn.Module) else repr(self.engine)
        return f"{self.sampling}, {engine}"

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> dict[str, list[Any]]:
        """Return the texts, their tokens and the reasons why they end, each a list of one a row."""
        pairs = zip(input_ids, attention_mask.bool(), strict=True)
        prompts = [row[there].tolist() for row, there in pairs]
        seeds = [derive_seed(self.sampling.seed, "generate", *prompt) for prompt in prompts]
        written = self.engine.generate(prompts, seeds, self.sampling)
        rows = [[Completion(*one) for one in row] for row in written]
        alone = self.sampling.num_return_sequences == 1
        found: dict[str, list[list[Any]]] = {
            "text": [[self._text(one) for one in row] for row in rows],
            "token_ids": [[list(one.token_ids) for one in row] for row in rows],
            "finish_reason": [[one.finish_reason for one in row] for row in rows],
        }
        return {k: [row[0] for row in v] if alone else v for k, v in found.items()}

    def _text(self, one: Completion) -> str:
        """Return the text without special tokens, up to the first stop string."""
        text = self.tokenizer.decode(one.token_ids, skip_special_tokens=True)
        places = [place for stop in self.sampling.stop_strings if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text


def generate(
    data: DataFrame,
    model: Any,
    prompt: str = "prompt",
    *,
    max_new_tokens: int = 128,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    num_return_sequences: int = 1,
    stop_strings: str | Sequence[str] = (),
    seed: int = 0,
    tokenizer: Any = None,
    max_length: int | None = None,
    dtype: str | torch.dtype | None = None,
    engine: str | GenerationEngine = "transformers",
    output_col: str = "generated_text",
    finish_col: str | None = "finish_reason",
    tokens_col: str | None = None,
    batch_size: int | None = None,
    handle_invalid: str = "error",
    error_col: str = "error",
    path: str | os.PathLike[str] | None = None,
    partitions: int = 32,
    overwrite: bool = False,
    **options: Any,
) -> DataFrame:
    """Return ``data`` with the text that a language model writes after each prompt.

    Prompts of similar length share a batch. Draws follow from ``seed`` and the prompt, so a row gets
    the same text on any cluster, in any batch and partition; equal prompts get equal texts.

    Args:
        data: A DataFrame with a column of prompts, or of chats: arrays of messages, structs of ``role``
            and ``content``, of which the tokenizer's template makes prompts.
        model: The folder of the model and its tokenizer, or the model.
        prompt: The column of prompts or chats.
        max_new_tokens: The most tokens of a text.
        do_sample: Draw tokens by their probabilities; False takes the most likely. None is True if
            ``temperature``, ``top_k`` or ``top_p`` is given, else what the model's folder says.
        temperature: Divides the logits before a draw; 0 takes the most likely token. None, here and
            for the next two, is what the model's folder says.
        top_k: Draw among the ``top_k`` most likely tokens.
        top_p: Draw among the most likely tokens that have this probability together.
        num_return_sequences: The number of texts for each prompt; more than one makes arrays.
        stop_strings: A text, or several, that end what is written, and are cut off.
        seed: The seed of all draws.
        tokenizer: The tokenizer, or its folder; None is that in the model's folder.
        max_length: Cut longer prompts to so many tokens. None: a prompt that leaves no room for
            ``max_new_tokens`` in the model is a bad row.
        dtype: The dtype of the weights, such as "bfloat16"; None: as they are.
        engine: "transformers", "vllm", or an engine.
        output_col: The name of the new column of texts.
        finish_col: The name of the column with "stop" or "length", or None for none.
        tokens_col: The name of a column with the numbers of the tokens, or None for none.
        batch_size: The number of prompts of a batch; None: 32, or 512 with vLLM.
        handle_invalid: See :func:`sparkdl.predict`, also for the arguments that follow.
        options: Further arguments of ``transformers.GenerationConfig`` (``repetition_penalty``,
            ``num_beams``, ...), or of ``vllm.SamplingParams``.

    Raises:
        UserError: The data, an argument or the model does not fit.
    """
    if not isinstance(data, DataFrame):
        raise wrong_data("generate", data, "a DataFrame")
    if not isinstance(prompt, str):
        raise ParameterError(f"prompt={shown(prompt)}: give the name of a column.")
    for name, value in {
        "max_new_tokens": max_new_tokens,
        "num_return_sequences": num_return_sequences,
    }.items():
        if not is_whole(plain(value), 1):
            raise ParameterError(f"{name}={shown(value)}: give a whole number of at least 1.")
    stops = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings or ())
    if not all(isinstance(one, str) and one for one in stops):
        raise ParameterError(f"stop_strings={shown(stop_strings)}: give texts that are not empty.")
    engine = _engine(engine)
    size = engine.batch_size if batch_size is None else batch_size
    how = Options(size, handle_invalid=handle_invalid, error_col=error_col)
    loaded = engine.load(model, _dtype(dtype))
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, **options}
    sampling = replace(
        _sampling(loaded.generation_config, do_sample, given),
        max_new_tokens=plain(max_new_tokens),
        num_return_sequences=plain(num_return_sequences),
        stop_strings=stops,
        seed=plain(seed),
    )
    beams = max(sampling.others.get("num_beams") or 1, int(sampling.do_sample) << 30)
    if beams < sampling.num_return_sequences:
        raise ParameterError(
            f"num_return_sequences={sampling.num_return_sequences} texts would be the same: give "
            "do_sample=True, or as many num_beams."
        )
    words = _decoder(tokenizer_of(tokenizer, loaded.folder, prompt))
    if isinstance(loaded, TransformersEngine):
        loaded.tokenizer = words
    loaded.check(sampling)
    generator = Generator(loaded, words, sampling)
    inner = loaded.model if isinstance(loaded, TransformersEngine) else None
    source = ModelSource(generator, generator, inner=inner)
    spec = _prompts(data, prompt, loaded, words, max_length, sampling)
    signature = Signature(("input_ids", "attention_mask"))
    inputs = Inputs((prompt,), {prompt: spec}, signature, "float32", (), ("input_ids",))
    names = output_col, finish_col, tokens_col
    columns = []
    for column, part in zip(names, ("text", "finish_reason", "token_ids"), strict=True):
        if column is not None:
            kind = _KINDS[part] if sampling.num_return_sequences == 1 else pa.list_(_KINDS[part])
            columns.append(OutputColumn(column, part, None, kind_of_rows=kind))
    ready = prepare(data, source, inputs, None, output_col, how, columns=columns)
    return computed(ready, data, path, partitions, overwrite)


_KINDS = {"text": pa.string(), "finish_reason": pa.string(), "token_ids": pa.list_(pa.int32())}
_ENGINES: dict[str, type[GenerationEngine]] = {
    "transformers": TransformersEngine,
    "vllm": VllmEngine,
}


def _engine(engine: Any) -> GenerationEngine:
    if isinstance(engine, GenerationEngine):
        return engine
    if engine not in _ENGINES:
        raise ParameterError(
            f"engine={shown(engine)}: use one of {', '.join(_ENGINES)}, or a sparkdl.GenerationEngine."
        )
    return _ENGINES[engine]()


def _dtype(dtype: Any) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ParameterError(f'dtype={shown(dtype)}: give a dtype of torch, such as "bfloat16".')
    return found


def _sampling(config: Any, do_sample: bool | None, given: Mapping[str, Any]) -> Sampling:
    """Return the draws that the user asks for, or else the model's configuration."""
    given = {name: plain(value) for name, value in given.items() if value is not None}
    said = do_sample if do_sample is not None else bool(WARPERS.keys() & given.keys())
    sample = said or (do_sample is None and bool(getattr(config, "do_sample", False)))
    if given.get("temperature") == 0:
        sample = False
    warpers = {}
    for name, (_, neutral) in WARPERS.items():
        value = given.pop(name, getattr(config, name, None))
        if value is None and name == "top_k":
            value = TOP_K
        if sample and value is not None and value != neutral:
            warpers[name] = value
    penalty = getattr(config, "repetition_penalty", None)
    if penalty not in (None, 1.0):
        given.setdefault("repetition_penalty", penalty)
    return Sampling(1, do_sample=sample, warpers=warpers, others=given)


def _decoder(tokenizer: Any) -> Any:
    """Return a tokenizer of transformers."""
    if hasattr(tokenizer, "encode_batch"):
        return library().PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    if not hasattr(tokenizer, "decode"):
        raise ParameterError(
            f"tokenizer is {kind_of(tokenizer)}, which makes no text of tokens: give one of "
            "transformers or tokenizers."
        )
    return tokenizer


def _prompts(
    data: DataFrame,
    prompt: str,
    engine: GenerationEngine,
    tokenizer: Any,
    max_length: int | None,
    sampling: Sampling,
) -> Prompts:
    """Return the specification of the column of prompts or chats."""
    kinds = {one.name: one.dataType.typeName() for one in data.schema}
    encoder = tokenizer
    if kinds.get(prompt) == "array":
        if not getattr(tokenizer, "chat_template", None):
            raise ParameterError(
                f'column "{prompt}" holds chats, and the tokenizer has no chat template: set '
                "tokenizer.chat_template, or make a text of each."
            )
        if max_length is not None:
            raise ParameterError(
                f'max_length={max_length}: column "{prompt}" holds chats, which it would cut inside '
                "the template. Leave out messages instead, such as the oldest."
            )
        encoder = ChatTemplate(tokenizer)
    whole = longest(engine, tokenizer)
    limit = None
    if whole is not None:
        decodes = getattr(engine.config, "is_encoder_decoder", False)
        limit = whole if decodes else whole - sampling.max_new_tokens
        if limit < 1:
            raise ParameterError(
                f"max_new_tokens={sampling.max_new_tokens}: the model has room for {whole} tokens, "
                "with those of the prompt."
            )
    most, padding = sampling.max_new_tokens, getattr(tokenizer, "pad_token_id", None) or 0
    return Prompts(encoder, max_length, padding, padding_side="left", limit=limit, most=most)


FUNCTIONS.append(generate)
