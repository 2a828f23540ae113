"""The models that ``predict.py`` scores with, and what ``predict_batch_udf`` is given of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from models import lenet, mlp
from torch import nn

LONGEST = 256
WORDS = [f"w{number}" for number in range(2000)]


def net(name: str) -> nn.Module:
    torch.manual_seed(0)
    return mlp(100, 256, 256, 10) if name == "mlp" else lenet()


def encoder() -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS) + 4,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=LONGEST,
    )
    return BertModel(config, add_pooling_layer=False).eval()


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {
        word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])
    }
    found = Tokenizer(models.WordLevel(names, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="[PAD]", unk_token="[UNK]", model_max_length=LONGEST
    )


def embedded(model: Any, tokens: Any, some: list[str]) -> torch.Tensor:
    inputs = tokens(some, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
    hidden = model(inputs.input_ids, inputs.attention_mask).last_hidden_state
    mask = inputs.attention_mask[..., None]
    return (hidden * mask).sum(1) / mask.sum(1)


def make_net(name: str, state: dict[str, torch.Tensor]) -> Callable[[np.ndarray], np.ndarray]:
    """The function that ``predict_batch_udf`` asks for, as its documentation has it."""
    module = net(name).eval()
    module.load_state_dict(state)

    def predict(features: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return module(torch.from_numpy(features)).numpy()

    return predict


def make_encoder(model: Any, tokens: Any) -> Callable[[np.ndarray], np.ndarray]:
    def predict(some: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return embedded(model, tokens, list(some)).numpy()

    return predict
