"""A model of windows of long texts as one of whole texts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from sparkdl.errors import ModelError, ParameterError, shown
from sparkdl.model.recipe import described

POOLINGS = ("mean", "max")


class Windows(nn.Module):
    """A model whose scores of the windows of a long text are pooled to those of the text.

    It takes what a column ``sparkdl.Text(tokenizer, max_length=..., stride=...)`` becomes, and returns
    a tensor (rows, scores) of the "mean" or the "max" over the windows of each row, so the loss is that
    of whole texts. The model sees all windows of a batch at once, (windows, T).

    Args:
        model: A module that takes ``input_ids``, ``attention_mask`` and, if the column gives types,
            ``token_type_ids``, and returns scores, or an object with them as ``logits``; or a function
            that builds one.
        pooling: "mean" or "max".
    """

    def __init__(self, model: nn.Module | Callable[[], nn.Module], pooling: str = "mean") -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise ParameterError(f"pooling={shown(pooling)}: use one of {', '.join(POOLINGS)}.")
        self.model = model if isinstance(model, nn.Module) else model()
        self.pooling = pooling
        self.config = getattr(self.model, "config", None)

    main_input_name = "input_ids"

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the pooled scores, (rows, scores)."""
        if input_ids.ndim != 3:
            raise ModelError(
                f"sparkdl.Windows got numbers of tokens of shape {list(input_ids.shape)}, not (rows, "
                "windows, T): give the column of text a stride, sparkdl.Text(..., stride=...)."
            )
        there = attention_mask.any(2)
        places = attention_mask[there].any(0)  # where some window has a token
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        returned = self.model(**{name: x[there][:, places] for name, x in inputs.items()})
        scores = getattr(returned, "logits", returned)
        if not isinstance(scores, torch.Tensor) or len(scores) != int(there.sum()):
            raise ModelError(
                f"the model inside sparkdl.Windows returns {described(returned)}: it must return a "
                "tensor with a row of scores for each window, or an object with one as logits."
            )
        mean = self.pooling == "mean"
        whole = scores.new_full((*there.shape, *scores.shape[1:]), 0 if mean else -torch.inf)
        whole[there] = scores
        if not mean:
            return whole.amax(1)
        counts = there.sum(1).reshape(-1, *(1 for _ in scores.shape[1:]))
        return whole.sum(1) / counts
