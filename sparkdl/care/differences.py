"""The differences that a dry run may find, each with its cause and its remedy.

A difference refuses a fit only if no right model can have it; of others there is a warning, once.

Checks that were not made, and why:

* Two steps of a whole engine on the first rows. It would build the model a second time, and an
  optimizer such as Adam makes a whole step of the rounding of a gradient that is 0, as before batch
  norm: a right model would be told. Gradients are compared instead, and how optimizers may be cut is
  in ``slices/optimizer_probe.py``.
* ``accumulate`` beside replicas. Both add up parts of a batch, and one division into parts shows what
  depends on it.
* Losses and gradients in training mode where the model draws random numbers or normalizes by its rows:
  parts then differ by design. What is compared are outputs in evaluation mode, and losses of parts of
  one output.
* The output for a row where a model chooses, as among experts: fewer than half of the rows may differ.
* What depends on how far rows of varying length are padded: each part is padded to its own longest row,
  as on replicas, and a model that masks the padding has the same output.
* Buffers and gradients of a model whose forward writes to trained parameters: that is told first.
* Models with weights of 16 bits, whose rounding is as large as a small mistake.
* Hidden state of a model that gives in two parts what it gives for the whole: it has no effect.
* What a model does only after many passes, or only on rows that are not among the first ones, the
  extreme ones and some others.
* Local steps, gossip, compression, stale or rounded gradients: they differ from one process as they
  say.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sparkdl.errors import ModelError
from sparkdl.model.loss import ALONE
from sparkdl.usercode.content import NO_STATE

logger = logging.getLogger("sparkdl")

_PAIR = "return both, (sum, count), such as ((losses * mask).sum(), mask.sum())"
_APART = (
    "train with replicas=1 and accumulate=1, or let each replica compute the loss of its own rows, "
    "as torch's DDP does: {word}=sparkdl.PerReplica({word})."
)
_COMBINED = (
    "the loss of the first {rows} rows is {whole:.5g}, and {together:.5g} when two parts of them are "
    "combined as replicas and accumulate do, each part weighted by its {weight}: "
)
_DEPENDS = "it makes rows depend on each other, as with negatives from the batch, or is no mean. "
_CHANGES = (
    'forward changes "{name}" in each pass, but it is neither a parameter nor a buffer that has a '
    "tensor from the start: each worker would have its own value, and the trained model would have "
    "none. "
)


@dataclass(frozen=True)
class Difference:
    """A kind of difference: a sentence that says what is wrong and what to do."""

    sentence: str
    refuses: bool = True


DIFFERENCES: dict[str, Difference] = {
    # the loss of all rows is not that of two parts
    "no count": Difference(
        "the loss returned two values, which stand for (sum, count), but the second one is not a "
        "count: it does not grow with the rows. Return the loss alone (metrics belong in Validation), "
        f"or {_PAIR}."
    ),
    "a sum": Difference(f"{_COMBINED}it is a sum. Return its mean over the rows, or {_PAIR}."),
    "another mean": Difference(
        f"{_COMBINED}it is not a mean over the rows. If it is a mean over tokens, pairs or labels that "
        f"are not padding, {_PAIR}. If it makes rows depend on each other, {_APART}"
    ),
    "a sum that depends": Difference(f"{_COMBINED}{_DEPENDS}{_APART[0].upper()}{_APART[1:]}"),
    "depends": Difference(
        f"{_COMBINED}{_DEPENDS}If it is a mean over something other than rows, {_PAIR}. Otherwise "
        f"{_APART}"
    ),
    "a model's own loss": Difference(
        f"{_COMBINED}say how many values its mean is over, as in sparkdl.ModelLoss(count=lambda "
        "labels: (labels != -1).sum()), or (labels[:, 1:] != -1) where it shifts them. If it makes "
        f"rows depend on each other, {_APART}"
    ),
    # the gradient or the output is not that of two parts
    "gradient": Difference(
        'the gradient of "{name}" over the first rows is not the mean of those of two parts of them, '
        "though their losses are the same: something in backward looks at a whole mini-batch, such as "
        "a hook that clips or divides a gradient. Each replica has rows of its own, so the result is "
        "not that of one process: clip_norm= and clip_value= of the trainer clip the gradient of all "
        "rows.",
        refuses=False,
    ),
    "mixed rows": Difference(
        "the model's output for a row depends on the other rows of its mini-batch. Each replica, and "
        "with accumulate each micro-batch, has rows of its own, so the result is not that of one "
        "process: replicas=1 and accumulate=1 give that. If this is not intended, look for an "
        "operation over the first dimension in forward, such as .mean(0) or softmax(dim=0).",
        refuses=False,
    ),
    "counts in a batch": Difference(
        '"{name}" has scale_grad_by_freq=True: torch then divides by how often a row occurs in a '
        "mini-batch, and each replica or micro-batch would count its own. Leave it out, or train with "
        "replicas=1 and accumulate=1."
    ),
    "one row": Difference(
        "the {what} needs mini-batches of more than one row ({reason}), and in iteration {iteration} "
        "of each epoch {who} gets one: {sizes}. Choose another batch_size or fewer replicas{cut}."
    ),
    # the same rows do not give the same again
    "hidden state": Difference(
        "the model gives another output when the same rows pass again with the same weights, buffers "
        "and seeds: it depends on something else, such as a count of calls in a class or a global "
        "variable, or a generator that is not seeded. Each process has its own, so engines and runs "
        "will differ. Keep counts in buffers (register_buffer), and draw from the global generators of "
        "torch, numpy or random.",
        refuses=False,
    ),
    "draws of augment": Difference(
        "augment returns something else for the same sample in the same epoch: it keeps something "
        "between calls, or draws from a generator of its own. Engines and runs will differ. Draw from "
        "the rng that it is called with, or from the global generators of torch, numpy or random, "
        "which are seeded for each sample.",
        refuses=False,
    ),
    # an attribute, a buffer or a parameter is another one after a pass
    "an attribute": Difference(
        f"{_CHANGES}If the model needs it, make it a buffer: call register_buffer with a tensor in "
        "__init__, and change that in forward. If it does not, as with a measured time, remove it, or "
        f'list it in the module\'s class: {NO_STATE} = ("{{last}}",).'
    ),
    "a generator": Difference(
        f"{_CHANGES}Use the global generators of torch, numpy or random, which are seeded."
    ),
    "made of the first rows": Difference(
        'forward makes "{name}" from the rows of its first call: each worker would make its own, from '
        "the rows that it sees first. Compute it beforehand, and pass it to the model's __init__."
    ),
    "an attribute of the loss": Difference(
        'the loss changes its "{name}" in each call, and each worker has its own copy. If the value of '
        "the loss depends on it, keep it in a buffer of the model and let the model return it.",
        refuses=False,
    ),
    "a buffer of the loss": Difference(
        'the loss changes its buffer "{name}", which each worker would do with a copy of its own. Make '
        "the loss a part of the model, whose buffers replicas agree on (see buffers= of the trainer): "
        "assign it in __init__, as self.criterion, and give step=, a function of module and batch that "
        "calls module.criterion, instead of loss=."
    ),
    "buffers": Difference(
        "each replica changes {names} by rows of its own, and {result}, unless you say how replicas "
        'agree: buffers={{"{first}": "first"}} of the trainer, or {attribute} = {{"{last}": "first"}} '
        'in the module\'s class. Other rules are "mean", "min", "max", "sum", and a function of the '
        "stacked values.{hint}",
        refuses=False,
    ),
    "a trained parameter": Difference(
        'forward writes to "{name}", a trained parameter: each replica writes to a copy, and updates '
        "are made to the weights as they were. Let forward compute what it needs from it "
        "(torch.nn.utils.parametrize), or let the step of your own optimizer class write.",
        refuses=False,
    ),
    "a frozen parameter": Difference(
        'forward writes to "{name}", a parameter with requires_grad=False: such parameters are treated '
        "as constants, and each worker would change its own copy. Make it a buffer (register_buffer): "
        "replicas agree on buffers, which are saved with the model."
    ),
    "normed in place": Difference(
        '"{name}" has max_norm={norm:g}: torch then changes the weights of the rows that are looked '
        "up, and each replica would change its own copy. Leave it out, and scale the embeddings in "
        "forward."
    ),
    "a missing label": Difference(
        "the loss leaves missing labels out, of which this is the first: {place} If they are meant "
        "to be missing, {spec} says so.",
        refuses=False,
    ),
    "a step's update": Difference(
        f'step changes "{{name}}", and updates belong to the engine. {ALONE}'
    ),
}


def found(difference: str, cause: Exception | None = None, **facts: object) -> None:
    """Raise :class:`ModelError` for a difference that refuses a fit, and warn of any other."""
    row = DIFFERENCES[difference]
    sentence = row.sentence.format(**facts)
    if row.refuses:
        raise ModelError(sentence) from cause
    logger.warning("%s", sentence)
