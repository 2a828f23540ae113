"""A tokenizer and tiny models of transformers, made on the spot."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

WORDS = "a good bad film it was very nice day today the weather in town is fine and long"


@functools.cache
def tokenizer() -> Any:
    """A tokenizer of the words of :data:`WORDS` and of their letters, with the same numbers in every
    process: training one breaks ties as it likes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = sorted({*WORDS.split()})
    letters = sorted({*"".join(words)})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokens = dict.fromkeys([*special, *letters, *(f"##{letter}" for letter in letters), *words])
    numbers = {token: number for number, token in enumerate(tokens)}
    found = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=found, **names)


@functools.cache
def classifier() -> Any:
    """A BERT of two layers of width 16 with three classes."""
    from transformers import BertConfig, BertForSequenceClassification

    labels = ("bad", "good", "so so")
    config = BertConfig(
        vocab_size=200,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
    )
    torch.manual_seed(3)
    model = BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # texts that differ get classes that differ
            parameter.mul_(6)
    return model


@functools.cache
def language_model() -> Any:
    """A model of two layers that writes texts of different lengths."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        max_position_embeddings=64,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


def saved(folder: Path) -> Path:
    """The folder with :func:`classifier` and :func:`tokenizer`."""
    classifier().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
