"""Every message about a wrong parameter of the trainer: what is wrong, and what to do."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from mistakes import message_of
from torch import nn

import sparkdl

GOOD: dict[str, Any] = {
    "model": lambda: nn.Linear(2, 2),
    "loss": nn.MSELoss(),
    "optimizer": torch.optim.Adam,
}
DATA = object()  # a validation reads it in fit, not before

COUNTS = [
    ({name: value}, f"{name}={value!r}: give a whole number of at least 1.")
    for name in (
        *("batch_size", "replicas", "min_ranks", "slices", "accumulate", "local_steps"),
        "bucketing",
    )
    for value in (0, -1, 1.5, True, "4")
] + [
    ({name: None}, f"{name}=None: give a whole number of at least 1.")
    for name in ("batch_size", "accumulate", "local_steps")
]
NUMBERS = (
    [
        ({name: value}, f"{name}={value!r}: give a number above 0, or None.")
        for name in ("clip_norm", "clip_value")
        for value in (0, -1.0, math.inf, math.nan, True, "1")
    ]
    + [
        ({"ema": value}, f"ema={value!r}: give a decay between 0 and 1, such as 0.999, or None.")
        for value in (0, 1, 1.5, -0.1, math.nan, True, "0.9")
    ]
    + [
        ({name: value}, f"{name}={value!r}: give a number of at least 0, or a mapping of patterns")
        for name in ("l1", "l2")
        for value in (-1e-9, math.nan, math.inf, True, None, "0", {"*": -1.0}, {"a": 0.1, "b": "c"})
    ]
    + [
        ({"seed": value}, f"seed={value!r}: give a whole number from 0 to 2**63 - 1.")
        for value in (1.0, True, "1", None, -1, 2**63)
    ]
)
_REMEDY = (
    'give "balanced", a list with the weight of each class, or a mapping {class: weight}, all of at '
    "least 0."
)
_CLASSES = "classes are whole numbers, starting at 0."
CLASS_WEIGHTS = [
    ({"class_weights": value}, f"class_weights{told}")
    for value, told in (
        ("even", f" is a str: {_REMEDY}"),
        (2.0, f" is a float: {_REMEDY}"),
        ([], f"=[]: {_REMEDY}"),
        ({}, f"={{}}: {_REMEDY}"),
        ([1.0, -1.0], f"=[1.0, -1.0]: {_REMEDY}"),
        ([1.0, math.nan], f"=[1.0, nan]: {_REMEDY}"),
        ({1.5: 2.0}, f"={{1.5: 2.0}}: {_CLASSES}"),
        ({"a": 1.0}, f"={{'a': 1.0}}: {_CLASSES}"),
        ({-1: 1.0}, f"={{-1: 1.0}}: {_CLASSES}"),
        ({True: 1.0}, "={True: 1.0}: classes are whole numbers"),
        (
            {1: 0.0, 0: 0},
            "={1: 0.0, 0: 0}: no sample would count. Give at least one class a weight above 0.",
        ),
    )
]
CHOICES = [
    (
        {"engine": "shufle"},
        'engine="shufle": use one of local, shuffle, gang, auto. Did you mean "shuffle"?',
    ),
    ({"engine": np.ones(2)}, "engine=array([1., 1.]): use one of local, shuffle, gang, auto."),
    ({"engine": None}, "engine=None: use one of local, shuffle, gang, auto."),
    ({"precision": "fp8"}, 'precision="fp8": use one of fp32, bf16, fp16.'),
    ({"precision": torch.bfloat16}, "precision=torch.bfloat16: use one of fp32, bf16, fp16."),
    ({"wire": "bf61"}, 'wire="bf61": use one of fp32, bf16, fp16. Did you mean "bf16"?'),
    ({"on_nan": "skipp"}, 'on_nan="skipp": use one of raise, skip. Did you mean "skip"?'),
    ({"schedule_per": "batch"}, 'schedule_per="batch": use one of iteration, epoch.'),
]
ADAM = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
KINDS = [
    ({"model": 3}, "model is an int: give a function that builds a torch.nn.Module, or a module."),
    ({"loss": "mse"}, "loss is a str: give a function of (output, target), such as"),
    ({"loss": nn.MSELoss}, "loss is the class MSELoss: give an instance, MSELoss()."),
    ({"optimizer": "adam"}, "optimizer is a str: give a torch.optim class, or a partial of one"),
    ({"optimizer": None}, "optimizer is None: give a torch.optim class, or a partial of one such as"),
    ({"output": ["logits"]}, "output=['logits']: name a field of what the model returns, or give a"),
    ({"optimizer": ADAM}, (
        "optimizer is already built: give a recipe for it instead, partial(torch.optim.Adam,"
    )),
    ({"schedule": 0.1}, "schedule is a float: give a partial of a torch.optim.lr_scheduler class"),
    ({"compression": "top-k"}, "compression is a str: give sparkdl.TopK(), sparkdl.PowerSGD(), a fun"),
    ({"compression": sparkdl.TopK}, "compression is the class TopK: give an instance, TopK()."),
    (
        {"compression": sparkdl.TopK(), "local_steps": 2},
        "compression with local_steps=2: with local steps, replicas send weights and optimizer "
        "state, not gradients. Leave one of the two out.",
    ),
    ({"augment": "flip"}, "augment is a str: give a function of (*features, rng)."),
    ({"stop": 10}, "stop=10: give a trigger, such as sparkdl.max_epoch(10)."),
    ({"stop": 3}, "stop=3: give a trigger, such as sparkdl.max_epoch(3)."),
    ({"stop": sparkdl.max_epoch}, (
        "stop=sparkdl.max_epoch: call it, as in sparkdl.max_epoch(epochs)."
    )),
    ({"validation": DATA}, "validation is an object: give sparkdl.Validation(data, metrics=[...])."),
    ({"checkpoint": "path"}, 'checkpoint is a str: give sparkdl.Checkpoint("path").'),
    ({"histograms": True}, "histograms=True: give a trigger, such as sparkdl.every(100)."),
    (
        {"histograms": sparkdl.every_epoch},
        "histograms=sparkdl.every_epoch: call it, as in sparkdl.every_epoch(epochs).",
    ),
    ({"callbacks": sparkdl.Callback()}, "callbacks is a Callback: give a list of sparkdl.Callback"),
    ({"callbacks": [sparkdl.Callback]}, "callback Callback is a class: give an instance of it."),
    ({"callbacks": [print]}, "callback <built-in function print> is not a sparkdl.Callback."),
    ({"weight": 1.0}, "weight is a float: give the name of a column."),
    ({"schedule_metric": 3}, "schedule_metric is an int: give the name of a metric of the validation."),
    ({"buffers": "first"}, 'buffers: give a mapping from names, or patterns such as "*.codes", to "fi'),
    (
        {"buffers": {"*.codes": "mena"}},
        'buffers: "*.codes" has the rule "mena": give "first", "mean", "min", "max", "sum", or a '
        'function of the stacked values. Did you mean "mean"?',
    ),
    ({"compile": "inductor"}, "compile is a str: give True, or a mapping of torch.compile's options."),
    (
        {"compile": {"faster": True}},
        "compile={'faster': True}: torch.compile does not take these options (compile() got an "
        "unex",
    ),
    (
        {"compile": {"mode": "fast"}},
        "compile={'mode': 'fast'}: torch.compile does not take these options (Unrecognized "
        "mode=fast",
    ),
    ({"weights": nn.Linear(1, 1)}, "weights is a Linear: give a state_dict, or the path"),
    ({"strict_weights": 1}, "strict_weights is an int: give True or False."),
    ({"keep_optimizer_state": None}, "keep_optimizer_state is None: give True or False."),
]  # fmt: skip
NAMES = [
    ({"features": []}, "features is empty: name at least one column."),
    ({"features": 3}, "features=3: give a column name, or a list of names."),
    ({"features": ["a", 1]}, "features=['a', 1]: give a column name, or a list of names."),
    ({"label": {"y"}}, "label={'y'}: give a column name, or a list of names."),
    (
        {"features": {"input ids": "features"}},
        "features={'input ids': 'features'}: give a mapping from each parameter of forward to the name",
    ),
    ({"freeze": "encoder"}, "freeze='encoder': give a list of names or patterns, such as"),
    ({"unfreeze": [1]}, "unfreeze=[1]: give a list of names or patterns, such as"),
    ({"activation_checkpointing": None}, "activation_checkpointing=None: give a list of names"),
    ({"columns": ["a"]}, "columns is a list: give a dict of column names"),
    (
        {"features": ["words"], "columns": {"wrods": sparkdl.Sequence()}},
        'columns["wrods"] is neither a feature nor a label. Did you mean "words"?',
    ),
    ({"columns": {"features": sparkdl.Image}}, 'columns["features"] is the class Image'),
    ({"weight": "w", "columns": {"w": sparkdl.Sequence()}}, 'columns["w"] is the weight'),
]  # fmt: skip
ACCURATE = sparkdl.Validation(DATA, metrics=["accuracy"])
OWN = {"loss": sparkdl.ModelLoss()}
PIPELINE = {"engine": "gang", "strategy": "pipeline", "replicas": 2}
COMBINATIONS = [
    (
        {**OWN, "label": None},
        "loss=ModelLoss() with label=None: a model that computes its own loss needs labels. Name the "
        "label column.",
    ),
    (
        {**OWN, "label": ["a", "b"]},
        "loss=ModelLoss(labels='labels') with 2 label columns: give a list with one keyword for each "
        "label, or None to pass the labels after the inputs.",
    ),
    (
        {**OWN, "weight": "n"},
        "loss=ModelLoss() with weight: the model returns one loss for all rows together. Leave one of "
        "the two out, or give a loss that is computed from the model's output.",
    ),
    (
        {**OWN, **PIPELINE},
        'loss=ModelLoss() with strategy="pipeline": only the last stage has the labels. Give a loss '
        "that is computed from the model's output.",
    ),
    (
        {"features": {"x": "features"}, **PIPELINE},
        'features by keyword with strategy="pipeline": pipeline stages take tensors by position and '
        "pass tensors on. Give a list of columns, and a model that returns only its output.",
    ),
    (
        {"min_ranks": 2},
        'min_ranks=2 with engine="shuffle": only a gang needs task slots for all replicas at once. Use '
        'engine="gang", or leave it out.',
    ),
    (
        {"min_ranks": 3, "replicas": 2, "engine": "gang"},
        "min_ranks=3 with 2 replicas: a gang uses at most one task slot for each replica. Give at "
        "most 2.",
    ),
    (
        {"wire": "bf16", "local_steps": 2},
        'wire="bf16" with local_steps=2: with local steps, replicas send weights and optimizer '
        'state, which must not be rounded. Use wire="fp32".',
    ),
    (
        {"stop": sparkdl.max_score("accuracy", 0.9)},
        'stop needs the metric "accuracy", and there is no validation: give '
        'validation=sparkdl.Validation(data, metrics=["accuracy"]).',
    ),
    (
        {"stop": sparkdl.max_epoch(3) | ~sparkdl.plateau("acuracy", 2), "validation": ACCURATE},
        'stop needs the metric "acuracy", which the validation does not have. Did you mean '
        '"accuracy"? It has: accuracy, loss.',
    ),
    (
        {"histograms": sparkdl.max_score("loss", 1.0)},
        'histograms needs the metric "loss", and there is no validation',
    ),
    (
        {"checkpoint": sparkdl.Checkpoint("p", every=sparkdl.plateau("mae", 1)),
         "validation": ACCURATE},
        'checkpoint.every needs the metric "mae", which the validation does not have.',
    ),
    (
        {"validation": sparkdl.Validation(DATA, every=sparkdl.max_score("auc", 1.0))},
        'validation.every needs the metric "auc", which the validation does not have.',
    ),
]  # fmt: skip
TABLE = [*COUNTS, *NUMBERS, *CLASS_WEIGHTS, *CHOICES, *KINDS, *NAMES, *COMBINATIONS]


@pytest.mark.parametrize(("changes", "message"), TABLE, ids=[str(i) for i in range(len(TABLE))])
def test_message(changes: dict[str, Any], message: str) -> None:
    told = message_of(sparkdl.ParameterError, sparkdl.Trainer, **{**GOOD, **changes})
    assert told.startswith(message)
    assert "\n" not in told, "one mistake, one sentence"


ACCEPTED: list[dict[str, Any]] = [
    {"replicas": None, "slices": None, "bucketing": None, "clip_norm": None, "ema": None},
    {"clip_norm": 1, "clip_value": 1e-9, "ema": 0.999, "l1": {"*": 0.0}, "l2": {}, "seed": 2**63 - 1},
    {"class_weights": [0.0, 1], "compile": {"backend": "eager"}, "weights": {}},
    {"class_weights": "balanced", "sampling": sparkdl.Balanced("shop", replacement=False)},
    {"buffers": {"*.codes": "first", "*": torch.amax}},
    {"class_weights": {0: 1.0, 7: 0}, "wire": "bf16", "precision": "fp16", "on_nan": "skip"},
    {"features": ("a", "b"), "label": None, "weight": "w", "freeze": ("a",), "callbacks": ()},
    {"optimizer": {"": torch.optim.SGD}, "schedule": partial, "augment": lambda x, rng: x},
    {"stop": sparkdl.plateau("loss", 2), "validation": sparkdl.Validation(DATA)},
    {"model": nn.Linear(1, 1), "local_steps": 3, "wire": "fp32"},
]  # fmt: skip


@pytest.mark.parametrize("changes", ACCEPTED, ids=lambda changes: ", ".join(changes))
def test_accepted(changes: dict[str, Any]) -> None:
    trainer = sparkdl.Trainer(**{**GOOD, **changes})
    for name, value in changes.items():
        found = getattr(trainer, name)
        assert found is value or found == value


def test_all_mistakes_are_told_at_once() -> None:
    changes = {"batch_size": 0, "wire": "x", "ema": 2, "callbacks": [print]}
    told = message_of(sparkdl.ParameterError, sparkdl.Trainer, **{**GOOD, **changes})
    first, *others = told.splitlines()
    assert first == "4 problems:"
    assert len(others) == 4
    assert all(line.startswith("  - ") for line in others)


def test_metrics_that_can_be_gone_through_once() -> None:
    made = sparkdl.Validation(DATA, metrics=zip(["a", "b"], ["accuracy", "auc"], strict=True))
    assert made.metrics == (("a", "accuracy"), ("b", "auc"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"every": 3}, "Validation(every=3): give a trigger, such as sparkdl.every(3)."),
        *(
            (
                {"batch_size": size},
                f"Validation(batch_size={size}): give a whole number of at least 1.",
            )
            for size in (0, True, 1.5)
        ),
        (
            {"best": "auc", "metrics": ["accuracy"]},
            'Validation(best="auc") is not one of its metrics: loss, accuracy.',
        ),
    ],
    ids=str,
)
def test_validation(changes: dict[str, Any], message: str) -> None:
    assert message_of(sparkdl.ParameterError, sparkdl.Validation, DATA, **changes) == message


STRAGGLERS = {"consistency": sparkdl.Synchronous(drop_stragglers=0.5), "accumulate": 4}
TOP_K, GANG = {"compression": sparkdl.TopK()}, {"engine": "gang"}
HISTOGRAMS, STEPS, FP16 = (
    {"histograms": sparkdl.every(2)},
    {"local_steps": 2},
    {"precision": "fp16"},
)
SPLIT, NORM_OF_ALL = {**GANG, "strategy": "fsdp"}, {**GANG, "sync_batchnorm": True}
CONSISTENCIES: dict[str, tuple[dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    "stale": ({"consistency": sparkdl.StaleSynchronous()}, [
        (GANG, 'with engine="gang": its ranks have one version of the weights'),
        (STEPS, "with local_steps=2: after local steps the optimizer state"),
        (TOP_K, "with compression: it delays parts of the"),
    ]),
    "asynchronous": ({"consistency": sparkdl.Asynchronous()}, [
        (GANG, 'with engine="gang": its ranks sum gradients at every step'),
        (STEPS, "with local_steps=2: after local steps the optimizer"),
        (TOP_K, "with compression: it delays parts"),
        (FP16, 'with precision="fp16": the loss scale is one'),
        ({"ema": 0.9}, "with ema=0.9: its decay is one"),
        (HISTOGRAMS, "with histograms: there is no gradient of"),
        ({"clip_norm": 1.0}, "with clip_norm=1.0: slices would wait"),
        ({"consistency": sparkdl.Asynchronous(quorum=0)}, "Asynchronous: quorum=0: give a"),
        ({"consistency": sparkdl.Asynchronous(scale="half")}, "scale='half': give \"auto\""),
        ({"consistency": sparkdl.Asynchronous(groups=2), "replicas": 3}, "with 3 replicas"),
    ]),
    "stragglers": (STRAGGLERS, [
        (GANG, 'with engine="gang": its ranks sum gradients while they compute'),
        (STEPS, "with local_steps=2: a replica that left out steps"),
        ({"accumulate": 3}, "with accumulate=3: a replica stops between micro-batches"),
        ({"consistency": sparkdl.Synchronous(drop_stragglers=1)}, "drop_stragglers=1: give the"),
        ({"consistency": sparkdl.Synchronous(drop_stragglers=True)}, "drop_stragglers=True: "),
    ]),
    "stragglers of rounds": ({"consistency": sparkdl.DiLoCo(inner_steps=4, drop_stragglers=0.5)}, [
        (GANG, 'with drop_stragglers=0.5 and engine="gang": its ranks sum what their steps have moved'),
        (
            {"consistency": sparkdl.DiLoCo(inner_steps=3, drop_stragglers=0.25)},
            "inner_steps=3 with drop_stragglers=0.25: a replica stops between its steps",
        ),
        (
            {"consistency": sparkdl.DiLoCo(drop_stragglers=1)},
            "drop_stragglers=1: give the share of the rows that a round may leave out, above 0 and",
        ),
    ]),
    "DiLoCo": ({"consistency": sparkdl.DiLoCo(inner_steps=2)}, [
        (
            SPLIT,
            'DiLoCo with strategy="fsdp": a replica takes steps by itself, so each rank needs the '
            "whole",
        ),
        (NORM_OF_ALL, "DiLoCo with sync_batchnorm=True: replicas do not wait"),
        (STEPS, "with local_steps=2: inner_steps says how many"),
        (TOP_K, "with compression: a replica keeps the state"),
        (FP16, 'with precision="fp16": a loss scale that overflows'),
        ({"consistency": sparkdl.DiLoCo(inner_steps=0)}, "DiLoCo: inner_steps=0: give"),
        (
            {"consistency": sparkdl.DiLoCo(outer_optimizer=None)},
            "DiLoCo: outer_optimizer=None: give a torch.optim class",
        ),
        (
            {"consistency": sparkdl.DiLoCo(outer_optimizer=torch.optim.SGD([torch.zeros(1)]))},
            "DiLoCo: outer_optimizer=<SGD object>: give a torch.optim class",
        ),
    ]),
    "Gossip": ({"consistency": sparkdl.Gossip(), "engine": "local"}, [
        ({"engine": "shuffle"}, 'with engine="shuffle": its tasks have no connections'),
        (
            {**GANG, "strategy": "zero1"},
            'with strategy="zero1": each rank updates all of its own weights',
        ),
        (SPLIT, 'with strategy="fsdp": a replica takes steps by itself'),
        (STEPS, "with local_steps=2: leave one"),
        (TOP_K, "with compression: there is no gradient"),
        ({"ema": 0.9}, "with ema=0.9: there is no"),
        (HISTOGRAMS, "with histograms: there is no"),
        (FP16, 'with precision="fp16": replicas scale no loss'),
        ({"wire": "fp16"}, 'with wire="fp16": weights may be too large'),
        (NORM_OF_ALL, "with sync_batchnorm=True: replicas are apart"),
        (
            {"consistency": sparkdl.Gossip(topology="rings")},
            "Gossip: topology='rings': use one of ring, exponential, complete. Did you mean \"ring\"?",
        ),
    ]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("base", "changes", "said"),
    [(base, *row) for base, rows in CONSISTENCIES.values() for row in rows],
    ids=[f"{name}-{row[1]}" for name, (_, rows) in CONSISTENCIES.items() for row in rows],
)
def test_what_does_not_go_with_a_consistency_model(
    base: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    values = {**GOOD, "replicas": 2, **base, **changes}
    assert said in message_of(sparkdl.ParameterError, sparkdl.Trainer, **values)
    if base["consistency"] == sparkdl.StaleSynchronous():
        sparkdl.Trainer(**{**values, "consistency": sparkdl.StaleSynchronous(staleness=0)})
