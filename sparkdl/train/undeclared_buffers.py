"""A warning of buffers that replicas change from rows of their own, and that no rule names.

A buffer that changes in the same way whatever the rows are, such as a count of passes or the vectors of
spectral norm, needs no rule. The model passes over all rows of a trial and over its halves, each from
the buffers as built. A rule that makes of the halves what all rows give is named in the warning.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from sparkdl.data.batches import Batch
from sparkdl.model.buffers import (
    ATTRIBUTE,
    MAX,
    MEAN,
    MIN,
    SUM,
    owner_of,
    problem_of_rule,
    rules_of,
)
from sparkdl.model.flat import form_of
from sparkdl.model.recipe import Recipe, bytes_of
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import buffers_kept, to_tensors
from sparkdl.slices.reduce import merge_values
from sparkdl.train.row_losses import ROUNDING_OF_16_BITS

Values = dict[str, torch.Tensor]
MOST_NAMES = 5


class UndeclaredBuffers:
    """The buffers of a model that no rule names, as they are before any pass."""

    def __init__(self, module: nn.Module, recipe: Recipe) -> None:
        self._module, self._recipe = module, recipe
        named = rules_of(module, recipe.options.buffers)
        self._before = {
            name: buffer.detach().clone()
            for name, buffer in module.named_buffers()
            if name not in named
        }

    def tell(self, batch: Batch) -> None:
        """Warn of those that passes have changed since this object was made, and that rows decide."""
        now = {name: self._buffer(name) for name in self._before}
        changed = [name for name, before in self._before.items() if _differ(before, now[name])]
        if not changed:
            return
        rows = len(batch.inputs[0])
        cuts = (0, rows), (0, rows // 2), (rows // 2, rows)
        with buffers_kept(self._module):
            results = [self._after(changed, batch, low, high) for low, high in cuts]
        if all(results):
            whole, *halves = results
            changed = [n for n in changed if any(_differ(whole[n], half[n]) for half in halves)]
            fitting = {n: self._fitting(n, whole, halves, rows) for n in changed}
        else:
            fitting = dict.fromkeys(changed, "")
        if not changed:
            return
        # a rule for a part of what belongs together, such as a queue and its place, would part it
        alone = {n.rpartition(".")[0] for n, rule in fitting.items() if not rule}
        fitting = {n: rule for n, rule in fitting.items() if n.rpartition(".")[0] not in alone}
        logging.getLogger("sparkdl").warning(
            "each replica changes %s %s by rows of its own, and %s, unless you say how "
            'replicas agree: buffers={"%s": "first"} of the trainer, or %s = {"%s": "first"} in the '
            'module\'s class. Other rules are "mean", "min", "max", "sum", and a function of the '
            "stacked values.%s",
            "the buffers" if len(changed) > 1 else "the buffer",
            _listed(changed),
            "the result has those of replica 0"
            if self._recipe.options.topology is not None
            else "after each iteration all have what the first has, as with torch's DDP",
            changed[0],
            ATTRIBUTE,
            changed[0].rpartition(".")[2],
            _hint(fitting),
        )

    def _buffer(self, name: str) -> torch.Tensor | None:
        owner, attribute = owner_of(self._module, name)
        return owner._buffers.get(attribute)

    def _after(self, names: list[str], batch: Batch, low: int, high: int) -> Values:
        """Return buffers after a pass over some rows; none if it fails, or changes their form."""
        for name, content in self._before.items():
            owner, attribute = owner_of(self._module, name)
            owner._buffers[attribute] = content.clone()
        inputs, targets = (
            [tensor[low:high] for tensor in to_tensors(arrays)]
            for arrays in (batch.inputs, batch.targets)
        )
        recipe, found = self._recipe, {}
        try:
            with seeded(recipe.seed):  # a forward may compute gradients
                recipe.signature.call_for_loss(recipe.loss, self._module, inputs, targets)
        except Exception:  # too few rows, for example
            return {}
        for name in names:
            buffer = self._buffer(name)
            if buffer is None or form_of(buffer) != form_of(self._before[name]):
                return {}
            found[name] = buffer.detach().clone()
        return found

    def _fitting(self, name: str, whole: Values, halves: list[Values], rows: int) -> str:
        """Return the rule that makes of two halves what all rows give, or an empty string."""
        before, weights = self._before[name], [rows // 2, rows - rows // 2]
        for rule in (MAX, MIN, SUM, MEAN):
            if problem_of_rule(before, rule):
                continue
            values = [half[name] - before if rule == SUM else half[name] for half in halves]
            merged = before.clone()
            merge_values(rule, values, weights, merged)
            if not _differ(merged, whole[name], ROUNDING_OF_16_BITS):
                return rule
        return ""


def _differ(one: torch.Tensor, other: torch.Tensor | None, rounding: float = 0.0) -> bool:
    """Return whether two buffers differ, if the second has the form of the first."""
    if other is None or form_of(one) != form_of(other):
        return False
    if rounding and one.is_floating_point():
        return not torch.allclose(one, other, rtol=rounding, atol=0.0, equal_nan=True)
    return bytes_of(one) != bytes_of(other)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(f'"{name}"' for name in names[:MOST_NAMES]) + more


def _hint(fitting: dict[str, str]) -> str:
    few = dict(list(fitting.items())[:MOST_NAMES])
    told = ", ".join(f'"{name}": "{rule}"' for name, rule in few.items())
    return f" On the first rows, one process has the same as with {{{told}}}." if few else ""
