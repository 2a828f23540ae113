"""Mistakes in the recipe: model, loss, optimizer, schedule."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from typing import Any

import torch
from bad_inputs import (
    Embedded,
    HoldsLock,
    Weighing,
    batch_normed,
    cross_entropy,
    detached_loss,
    holding,
    mean_square,
    model_error,
    parameter_error,
    scalar_model,
    tried,
    two_classes,
    vector_loss,
)
from own_optimizers import ScheduleFree
from pyspark import cloudpickle
from torch import nn

import sparkdl

cloudpickle.register_pickle_by_value(sys.modules[__name__])


OWN_MODELS = (
    "Each process calls model() for itself, with the modules and files that it finds. If you "
    "changed a module here, save and reload it, or pass what model() needs as arguments "
    "(functools.partial); if it reads a file, ship that (spark.sparkContext.addFile). Or pass a "
    "module instance."
)
OWN_WEIGHTS = (
    "Each process calls model() for itself. If it reads a file, ship that "
    "(spark.sparkContext.addFile), or pass weights=; draw weights with torch, numpy or random only "
    "(all three are seeded); or pass a module instance."
)


def wider_elsewhere(here: int, width: int = 3) -> nn.Module:
    """As where a constant of an imported module was changed in the driver's process only."""
    width += os.getpid() != here
    return nn.Sequential(nn.Sequential(nn.Linear(2, width)), nn.Linear(width, 1), nn.Flatten(0))


def other_backbone_elsewhere(here: int) -> nn.Module:
    """As where a file of weights is another one on the executors."""
    model = wider_elsewhere(os.getpid())
    with torch.no_grad():
        model[0][0].weight.fill_(1.0 if os.getpid() == here else 1.001)
    return model


def hooked() -> nn.Module:
    module = nn.Linear(2, 1)
    module.weight.register_hook(lambda gradient: gradient * 0)
    return module


def tied_by_view() -> nn.Module:
    """A module whose copies are no longer tied."""
    module = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2), nn.Flatten(0))
    module[1].weight = nn.Parameter(module[0].weight.t())
    return module


class ReturnsNothing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        super().forward(x)


class ReturnsTuple(ReturnsNothing):
    def forward(self, x: torch.Tensor) -> Any:
        return nn.Linear.forward(self, x)[:, 0], x


class Classifies(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": nn.functional.cross_entropy(nn.Linear.forward(self, x), labels)}


class TakesLabels(ReturnsNothing):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return nn.Linear.forward(self, x), labels


def root_mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean().sqrt()


class ReturnsNaN(ReturnsNothing):
    def forward(self, x: torch.Tensor) -> Any:
        return nn.Linear.forward(self, x)[:, 0] / 0.0 * 0.0


class Normed(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 1, max_norm=1.5)


class Counted(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 1, scale_grad_by_freq=True)


class Force(ReturnsNothing):
    def forward(self, x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(nn.Linear.forward(self, x).sum(), x, create_graph=True)[0][:, 0]


class Counting(nn.Sequential):
    """Its part counts in a plain attribute, for annealing."""

    def __init__(self) -> None:
        super().__init__(Annealed())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, 0]


class Annealed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(x) / self.passes


class Squeezed(nn.Linear):
    """What it puts out for one row lacks a dimension."""

    def __init__(self) -> None:
        super().__init__(2, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).unsqueeze(-1).squeeze()


class Momentum(nn.Module):
    """A copy that follows what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(2, 1), nn.Linear(2, 1)
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for follows, followed in zip(
            self.target.parameters(), self.online.parameters(), strict=True
        ):
            follows.data.lerp_(followed.data, 0.01)
        return (self.online(x) + self.target(x))[:, 0]


def unseeded() -> nn.Module:
    torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
    return scalar_model()


def wants_a_gpu() -> nn.Module:
    raise AssertionError("Torch not compiled with CUDA enabled")


def loss_that_raises(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise KeyError("margin")


MODELS = [
    model_error(
        "model with a lock",
        lambda fit: fit(fit.good(), model=HoldsLock()),
        "model cannot be pickled, so it cannot travel to the executors (TypeError: cannot pickle "
        "'_thread.lock' object). Pass a function that builds the module (model=make_model), and "
        "open files, locks, connections and Spark sessions inside it.",
    ),
    model_error(
        "model with a session",
        lambda fit: fit(fit.good(), model=holding(fit.spark)),
        "model cannot be pickled, so it cannot travel to the executors (PySparkRuntimeError: "
        "[CONTEXT_ONLY_VALID_ON_DRIVER] It appears that you are attempting to reference "
        "SparkContext from a broadcast variable, action, or transformation. SparkContext can "
        "only be used on the driver, not in code that runs on workers. For more information, "
        "see SPARK-5063.). "
        "Pass a function that builds the module (model=make_model), and "
        "open files, locks, connections and Spark sessions inside it.",
    ),
    model_error(
        "loss with a lock",
        lambda fit: fit(fit.good(), loss=partial(mean_square, target=threading.Lock())),
        "loss cannot be pickled, so it cannot travel to the executors (TypeError: cannot pickle "
        "'_thread.lock' object). Use a function or class of an importable module, with no open "
        "resource in it.",
    ),
    model_error(
        "model that wants arguments",
        lambda fit: fit(fit.good(), model=nn.Linear),
        "model(), which is called without arguments, raised TypeError: Linear.__init__() missing 2 "
        "required positional arguments: 'in_features' and 'out_features'",
    ),
    model_error(
        "model that wants a GPU where there is none",
        lambda fit: fit(fit.good(), model=wants_a_gpu),
        "model(), which is called without arguments, raised AssertionError: Torch not compiled with "
        "CUDA enabled. Name no device in it: each task moves the model to its GPU, if it has one.",
    ),
    tried(
        "wrong input size",
        lambda fit: fit(fit.good(), model=lambda: nn.Linear(3, 1)),
        'the model fails on the first rows ("features" [2, 2]; float32): RuntimeError: mat1 '
        "and mat2 shapes "
        "cannot be multiplied (2x2 and 3x1). Each is [rows, ...]: build the model for inputs "
        "of these shapes and types.",
    ),
    tried(
        "two columns for one input",
        lambda fit: fit(fit.good(), features=["features", "label"]),
        'the model fails on the first rows ("features" [2, 2], "label" [2]; float32, float32): '
        "TypeError: Sequential.forward() takes 2 positional arguments but 3 were given. Each "
        "of the 2 feature columns "
        "is an input of its own, model(a, b, ...); for one input join them first: "
        'df.selectExpr("array(features, label) AS features", ...), which is data.select of a job, or '
        "VectorAssembler.",
    ),
    tried(
        "integers into Linear",
        lambda fit: fit(fit.features("array<int>", [1, 2], [3, 4])),
        'the model fails on the first rows ("features" [3, 2]; int64): RuntimeError: mat1 and '
        "mat2 must have the same dtype, but got Long and Float. Integer "
        "columns stay integers; cast a column that holds measurements: "
        'df.withColumn(name, df[name].cast("float")) or .cast("array<float>").',
    ),
    tried(
        "an index beyond the embedding, in a late row",
        lambda fit: fit(fit.features("int", 0, 1, 2, 0, 1, 2, 0, 1, 5, 0), model=Embedded),
        'the model fails on the first rows ("features" [3]; int64): IndexError: index out of range '
        'in self. In the data, "features" goes from 0 to 5: an embedding needs a row for each '
        "number from 0 to the largest.",
    ),
    tried(
        "rows that are normed in place",
        lambda fit: fit(fit.features("int", 0, 1, 2, 0, 1, 2), model=Normed),
        '"table" has max_norm=1.5: torch then changes the weights of the rows that are looked up, '
        "and each replica would change its own copy. Leave it out, and scale the embeddings in "
        "forward.",
    ),
    tried(
        "gradients that are divided by counts",
        lambda fit: fit(fit.features("int", 0, 1, 2, 0, 1, 2), model=Counted),
        '"table" has scale_grad_by_freq=True: torch then divides by how often a row occurs in a '
        "mini-batch, and each replica or micro-batch would count its own. Leave it out, or train "
        "with replicas=1 and accumulate=1.",
    ),
    tried(
        "a forward that writes to constants",
        lambda fit: fit(fit.good(), model=Momentum),
        'forward writes to "target.weight", a parameter with requires_grad=False: such parameters '
        "are treated as constants, and each worker would change its own copy. Make it a buffer "
        "(register_buffer): replicas agree on buffers, which are saved with the model.",
    ),
    tried(
        "a counter that is no buffer",
        lambda fit: fit(fit.good(), model=Counting),
        'forward changes "0.passes" in each pass, but it is neither a parameter nor a buffer that '
        "has a tensor from the start: each worker would have its own value, and the trained model "
        "would have none. If the model needs it, make it a buffer: call register_buffer with a "
        "tensor in __init__, and change that in forward. If it does not, as with a measured time, "
        "remove it, or list it in the "
        'module\'s class: sparkdl_no_state = ("passes",).',
    ),
    tried(
        "one row a mini-batch for batch norm",
        lambda fit: fit(fit.good(), model=batch_normed, stop=sparkdl.max_epoch(1)),
        "the model needs mini-batches of more than one row (Expected more than 1 value per "
        "channel when training, got input size torch.Size([1, 2])), and in iteration 2 of each "
        "epoch a "
        "replica gets one: 6 rows, batch_size=4, replicas=2. Choose another batch_size or fewer "
        "replicas.",
    ),
    tried(
        "one row a mini-batch for a loss",
        lambda fit: fit(
            fit.good(),
            model=Squeezed,
            loss=nn.CrossEntropyLoss(),
            label="n",
            stop=sparkdl.max_epoch(1),
        ),
        "the loss needs mini-batches of more than one row (size mismatch (got input: [6], target: "
        "[1]); the output of one is [6] float32), and in iteration 2 of each epoch a replica gets one: "
        "6 rows, batch_size=4, replicas=2. Choose another batch_size or fewer replicas.",
    ),
    model_error(
        "model on no device",
        lambda fit: fit(fit.good(), model=lambda: nn.Linear(2, 1, device="meta")),
        'parameter "weight" is on the device "meta" and has no values: build the model on the CPU.',
    ),
    model_error(
        "a hook on the gradient of an instance",
        lambda fit: fit(fit.good(), model=hooked()),
        'the model is an instance of a module, and its "weight" has a hook on the gradient, which '
        "the copies that train would not have: pass a function that builds the module and registers "
        "the hook.",
    ),
    model_error(
        "parameters of a module that share memory",
        lambda fit: fit(fit.good(), model=tied_by_view()),
        'parameters "0.weight" and "1.weight" share memory but are two objects: to tie them, assign '
        "the same nn.Parameter to both places.",
    ),
    tried(
        "model of half precision",
        lambda fit: fit(fit.good(), model=lambda: scalar_model().half()),
        'the model fails on the first rows ("features" [2, 2]; float32): RuntimeError: mat1 '
        "and mat2 must have the same dtype, but got Float and Half. The model has weights of float16, "
        "and columns of floats arrive as float32: build it in float32 and pass "
        'precision="fp16", which computes in float16, or begin its forward with '
        "x = x.to(torch.float16).",
    ),
    tried(
        "model that returns nothing",
        lambda fit: fit(fit.good(), model=ReturnsNothing),
        "the model returned None: its forward must return the output.",
    ),
    tried(
        "model that computes gradients where there are none",
        lambda fit: fit(fit.good(), model=Force),
        "the model works in training, and fails on the same rows in evaluation mode without "
        "gradients, as in validation and predictions: RuntimeError: element 0 of tensors does not "
        "require grad and does not have a grad_fn. If its forward computes gradients, as by "
        "torch.autograd.grad, do that in a block of torch.enable_grad().",
    ),
    tried(
        "model that returns a tuple",
        lambda fit: fit(fit.good(), model=ReturnsTuple),
        "the loss fails on output tuple and label [2] float32: AttributeError: 'tuple' object has "
        "no attribute 'size'. The loss gets what the model returns, a tuple of 0 [2], 1 [2, 2]: "
        "say which part of it the loss needs, output=0, or output=function of what it returns, "
        "write a loss that takes all of it, or, if the model computes its own loss from the label, "
        "use loss=sparkdl.ModelLoss().",
    ),
    tried(
        "a function of the output that fails",
        lambda fit: fit(fit.good(), output=lambda returned: returned["logits"]),
        "output=, the function of what the model returns, fails on a tensor of shape [2]: IndexError: "
        "too many indices for tensor of dimension 1.",
    ),
    tried(
        "model that returns NaN",
        lambda fit: fit(fit.good(), model=ReturnsNaN),
        'the output of the model holds NaN on the first rows ("features" [2, 2]; float32), before '
        "any training. Look for a division by 0, the log or root of 0, or inputs that are too "
        'large; on_nan="skip" skips such updates.',
    ),
    model_error(
        "weights that differ in each process",
        lambda fit: fit(fit.good(), engine="shuffle", model=unseeded),
        "model() gave different initial weights in different processes: draw them with "
        "torch, numpy or random only (all three are seeded), or pass a module instance.",
        jobs=4,
    ),
    model_error(
        "a model of another shape on the executors",
        lambda fit: fit(fit.good(), engine="shuffle", model=partial(wider_elsewhere, os.getpid())),
        'the executors build a different model than this process: "0.0.weight" is a trained '
        "parameter [3, 2] of float32 here, and a trained parameter [4, 2] of float32 there "
        "(replica 0). " + OWN_MODELS,
        jobs=4,
    ),
    model_error(
        "another frozen backbone on the ranks",
        lambda fit: fit(
            fit.good(),
            engine="gang",
            model=partial(other_backbone_elsewhere, os.getpid()),
            freeze=["0"],
        ),
        "the executors start with different weights than this process: the frozen parameter "
        '"0.0.weight" [3, 2] has other values here than there, 1 and 1.001 to begin with (replica '
        "0). " + OWN_WEIGHTS,
        jobs=4,
    ),
    model_error(
        "weights that are no tensors",
        lambda fit: fit(fit.good(), weights={"0.weight": 3}),
        "weights['0.weight'] is an int: give a state_dict, which maps the names of the model "
        "to tensors.",
    ),
]

LOSSES = [
    tried(
        "vector loss",
        lambda fit: fit(fit.good(), loss=vector_loss),
        "the loss returned a tensor of shape [2]: it must return one number, the mean over the "
        'batch (reduction="mean" in torch.nn losses), or (sum, count).',
    ),
    *(
        tried(
            f"a loss that adds up: {name}",
            lambda fit, loss=loss: fit(fit.good(), loss=loss),
            'the loss adds up (reduction="sum"), but the losses of replicas are averaged, each '
            'weighted by its samples: use reduction="mean", or return (sum, count) from your own '
            "function, where count is the number of values in the sum.",
        )
        for name, loss in {
            "module": nn.MSELoss(reduction="sum"),
            "function": partial(nn.functional.mse_loss, reduction="sum"),
        }.items()
    ),
    tried(
        "a loss that is no mean over rows",
        lambda fit: fit(fit.good(), replicas=2, loss=root_mean_square),
        "the loss of the first 3 rows is …, and … when two parts of them are combined as replicas "
        "and accumulate do, each part weighted by its rows: it is not a mean over the rows. If it "
        "is a mean over tokens, pairs or labels that are not padding, return both, (sum, count), "
        "such as ((losses * mask).sum(), mask.sum()). If it makes rows depend on each other, train "
        "with replicas=1 and accumulate=1, or let each replica compute the loss of its own rows, "
        "as torch's DDP does: loss=sparkdl.PerReplica(loss).",
    ),
    tried(
        "a pair that is no sum and count",
        lambda fit: fit(fit.good(), loss=lambda output, target: (output.sum(), output.mean())),
        "the loss returned a pair, which stands for (sum, count), and the count has a gradient: "
        "the sum must be one number or one for each row; the count must be the number of values "
        "(tokens, pairs, ...) in it, in the same shape, at least 0 and without a gradient.",
    ),
    tried(
        "a class that a model with a loss of its own does not have",
        lambda fit: fit(fit.labels("long", 5, 5, 5, 5), model=Classifies, loss=sparkdl.ModelLoss()),
        'the model fails on the first rows ("features" [2, 2]; float32): IndexError: Target 5 is out '
        'of bounds. "label" goes from 5 to 5: give the model an output for each class from 0 on, or '
        "renumber the classes (pyspark.ml.feature.StringIndexer).",
    ),
    tried(
        "a model without a loss of its own",
        lambda fit: fit(fit.good(), model=TakesLabels, loss=sparkdl.ModelLoss()),
        "no loss was found in what the model returned, a tuple: it must be one number, have an "
        "attribute or key named loss, or be a tuple with one number in it. Otherwise pass "
        "sparkdl.ModelLoss(loss=function), a function that returns the loss from it.",
    ),
    tried(
        "a loss with parameters",
        lambda fit: fit(fit.good(), loss=Weighing()),
        "the loss has parameters (scale), but only the parameters of the model are trained: move "
        "them into the model, or set requires_grad=False.",
    ),
    tried(
        "detached loss",
        lambda fit: fit(fit.good(), loss=detached_loss),
        "the loss cannot be differentiated: RuntimeError: element 0 of tensors does not "
        "require grad and does not have a grad_fn. It must depend on the model's output "
        "through torch operations.",
    ),
    tried(
        "output [B, 1] and label [B]",
        lambda fit: fit(fit.good(), model=lambda: nn.Linear(2, 1), loss=mean_square),
        'the output has shape [2, 1] and the label "label" [2] (2 rows): torch would broadcast '
        "them against each other; end the model with torch.nn.Flatten(0) or .squeeze(-1).",
    ),
    tried(
        "output [B] and label [B, 1]",
        lambda fit: fit(fit.labels("array<double>", [1.0], [2.0])),
        'the output has shape [2] and the label "label" [2, 1] (2 rows): torch would broadcast '
        "them against each other; give the model an output of that shape, for example "
        ".unsqueeze(-1).",
    ),
    tried(
        "MSELoss of other shapes",
        lambda fit: fit(fit.labels("array<double>", [1.0], [2.0]), model=two_classes),
        "the loss fails on output [2, 2] float32 and label [2, 1] float32: UserWarning: Using a "
        "target size (torch.Size([2, 1])) that is different to the input size (torch.Size([2, 2]))"
        ". This will likely lead to incorrect results due to broadcasting. Please ensure they have "
        "the same size. Give the model an output of the label's shape.",
    ),
    tried(
        "class numbers as doubles",
        lambda fit: fit(fit.good(), **cross_entropy),
        "the loss fails on output [2, 2] float32 and label [2] float32: RuntimeError: expected "
        "target dtype to be Long or Byte, but got Float. "
        'If "label" holds class numbers, cast it: '
        'df.withColumn("label", df["label"].cast("long")).',
    ),
    tried(
        "a class beyond the outputs, in a late row",
        lambda fit: fit(fit.labels("int", 0, 1, 0, 1, 0, 1, 0, 1, 7, 0), **cross_entropy),
        "the loss fails on output [4, 2] float32 and label [4] int64: IndexError: Target 7 is out "
        'of bounds. "label" goes from 0 to 7: give the model an output for each class from 0 on, '
        "or renumber the classes (pyspark.ml.feature.StringIndexer).",
    ),
    tried(
        "class numbers in arrays of one",
        lambda fit: fit(fit.labels("array<long>", [0], [1], [0]), **cross_entropy),
        "the loss fails on output [3, 2] float32 and label [3, 1] int64: RuntimeError: 0D or 1D "
        'target tensor expected, multi-target not supported. "label" holds arrays, and the loss takes '
        'numbers: df.withColumn("label", df["label"][0]).',
    ),
    model_error(
        "a class of the validation data alone",
        lambda fit: fit(
            fit.labels("int", 0, 1, 0, 1),
            validation=sparkdl.Validation(fit.labels("int", 0, 1, 0, 2)),
            **cross_entropy,
        ),
        "validation data: the loss fails on output (3, 2) float32 and label (3,) int64: "
        "IndexError: "
        "Target 2 is out of bounds. Give a label of the kind and range that the model was trained "
        "on.",
        jobs=6,
    ),
    model_error(
        "an index of the validation data alone",
        lambda fit: fit(
            fit.features("int", 0, 1, 2, 0),
            model=Embedded,
            validation=sparkdl.Validation(fit.features("int", 0, 1, 2, 3)),
        ),
        "validation data: the model fails on a batch of [3] int64: IndexError: index out of "
        "range in "
        "self.",
        jobs=6,
    ),
    tried(
        "a label beyond a loss, in a late row",
        lambda fit: fit(
            fit.labels("double", *[0.0, 1.0] * 4, 1.5, 0.0),
            model=lambda: nn.Sequential(scalar_model(), nn.Sigmoid()),
            loss=nn.BCELoss(),
        ),
        '"label" goes from 0 to 1.5, and BCELoss takes labels from 0 to 1: make them 0 and 1, or '
        "use CrossEntropyLoss for class numbers and MSELoss for measurements.",
    ),
    tried(
        "the second of two labels beyond a masked loss, in a late row",
        lambda fit: fit(
            fit.frame(
                "features array<double>, seen long, bought double",
                *[([1.0, 2.0], 1, 0.0), ([1.0, 2.0], None, 1.0)] * 4,
                ([1.0, 2.0], 0, 2.0),
            ),
            model=two_classes,
            label=["seen", "bought"],
            loss=sparkdl.MaskedLoss(nn.BCEWithLogitsLoss()),
        ),
        '"bought" goes from 0 to 2, and BCEWithLogitsLoss takes labels from 0 to 1: make them 0 and '
        "1, or use CrossEntropyLoss for class numbers and MSELoss for measurements.",
    ),
    model_error(
        "labels of signs for probabilities, in the validation data alone",
        lambda fit: fit(
            fit.labels("double", 0.0, 1.0, 0.0, 1.0),
            loss=partial(nn.functional.binary_cross_entropy_with_logits),
            validation=sparkdl.Validation(fit.labels("double", 1.0, -1.0, 1.0, 1.0)),
        ),
        'validation data: "label" goes from -1 to 1, and BCEWithLogitsLoss takes labels from 0 to '
        "1: make them 0 and 1, or use CrossEntropyLoss for class numbers and MSELoss for "
        "measurements.",
        jobs=6,
    ),
    model_error(
        "an RDD of probabilities for signs",
        lambda fit: fit(
            fit.spark.sparkContext.parallelize([([1.0, 2.0], float(i % 2)) for i in range(6)], 2),
            loss=nn.SoftMarginLoss(),
        ),
        '"label" goes from 0 to 1, and SoftMarginLoss takes labels of -1 and 1: make them -1 and 1: '
        'df.withColumn("label", df["label"] * 2 - 1) does if they are 0 and 1.',
        jobs=2,
    ),
    tried(
        "integer labels for BCE",
        lambda fit: fit(fit.labels("int", 0, 1), loss=nn.BCEWithLogitsLoss()),
        "the loss fails on output [3] float32 and label [3] int64: RuntimeError: result type "
        "Float can't be cast to the desired output type Long. "
        'If "label" holds measurements, cast it: '
        'df.withColumn("label", df["label"].cast("float")).',
    ),
    tried(
        "loss that raises",
        lambda fit: fit(fit.good(), loss=loss_that_raises),
        "the loss fails on output [2] float32 and label [2] float32: KeyError: 'margin'.",
    ),
    tried(
        "loss of one argument",
        lambda fit: fit(fit.good(), loss=lambda output: output.mean()),
        "the loss fails on output [2] float32 and label [2] float32: TypeError: "
        "<lambda>.<locals>.<lambda>() "
        "takes 1 positional argument but 2 were given. It is called as loss(output, label).",
    ),
    tried(
        "loss of two arguments, and no label",
        lambda fit: fit(fit.good(), label=None, loss=mean_square),
        "the loss fails on output [2] float32 and label no label: TypeError: mean_square() "
        "missing 1 required positional argument: 'target'. It is called as loss(output).",
    ),
    tried(
        "loss that returns nothing",
        lambda fit: fit(fit.good(), loss=lambda output, target: None),
        "the loss returned None: it must return one number, the mean over the batch "
        '(reduction="mean" in torch.nn losses), or (sum, count).',
    ),
    tried(
        "NaN loss",
        lambda fit: fit(
            fit.good(), loss=lambda output, target: (output - target).mean() * float("nan")
        ),
        'the loss is nan on the first rows ("features" [2, 2]; float32), before any training. Look '
        'for a division by 0, the log or root of 0, or inputs that are too large; on_nan="skip" '
        "skips such updates.",
    ),
    tried(
        "classes without a weight",
        lambda fit: fit(fit.labels("int", 0, 5), class_weights=[1.0, 1.0], **cross_entropy),
        'class_weights has 2 classes, 0 to 1, and "label" goes from 0 to 5: give a list with a '
        "weight for each class.",
    ),
    tried(
        "class weights of measurements",
        lambda fit: fit(fit.good(), class_weights=[1.0, 1.0]),
        "class_weights need one label that holds class numbers: a column of whole numbers.",
    ),
    tried(
        "weights, and a loss that is one number",
        lambda fit: fit(fit.good(), weight="n", loss=mean_square),
        "weights of samples or classes need a loss value for each sample, but the loss gave [] for "
        '3 samples: use a torch loss, a function with reduction="none", or one that returns shape '
        "[rows], or (sum, count) of that shape each.",
    ),
    parameter_error(
        "augment that raises",
        lambda fit: fit(fit.good(), augment=lambda x, rng: 1 / 0),
        "augment raised ZeroDivisionError: division by zero. It is called with the arrays of "
        "one sample (float32[2]) and a numpy.random.Generator.",
        jobs=3,
    ),
]


class LooksAhead(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure):
        (p, *_) = self.param_groups[0]["params"]
        p.add_(p.grad)
        closure()


class Tag(torch.Tensor):
    pass


class Tagged(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["kept"] = p.as_subclass(Tag)


ONE_LBFGS = partial(torch.optim.LBFGS, max_iter=1)
OPTIMIZERS = [
    model_error(
        "optimizer of parameters, not of the module",
        lambda fit: fit(fit.good(), optimizer=lambda parameters: torch.optim.SGD(parameters)),
        "the optimizer cannot be built (TypeError: optimizer can only optimize Tensors, but "
        "one of the params is torch.nn.modules.linear.Linear). Give a "
        "torch.optim class, a partial of one such as partial(torch.optim.Adam, lr=1e-3), or a "
        "callable that is given the module and returns an optimizer.",
    ),
    *[
        model_error(
            f"{name} in {model}",
            lambda fit, model=model, optimizer=optimizer: fit(
                fit.good(), optimizer=optimizer, consistency=model
            ),
            f"optimizer {name} with consistency={type(model).__name__}: its step needs the loss of the "
            "very weights that it changes, and with this model other changes of the weights come in "
            "between. Use an optimizer whose step takes no closure, such as torch.optim.Adam, or "
            "consistency=sparkdl.Synchronous().",
        )
        for name, optimizer, model in [
            ("LBFGS", ONE_LBFGS, sparkdl.StaleSynchronous()),
            ("LBFGS", ONE_LBFGS, sparkdl.Asynchronous()),
            ("LBFGS", ONE_LBFGS, sparkdl.DiLoCo()),
            ("LBFGS", torch.optim.SGD, sparkdl.DiLoCo(outer_optimizer=ONE_LBFGS)),
        ]
    ],
    *[
        model_error(
            f"schedule-free in {type(model).__name__}",
            lambda fit, model=model, how=how: fit(
                fit.good(), optimizer=ScheduleFree, consistency=model, **how
            ),
            f"optimizer ScheduleFree with consistency={type(model).__name__}: the weights that count "
            "are those of its eval(), which depend on its state, and with this model each replica "
            "keeps a state of its own. Use an optimizer without eval(), such as torch.optim.AdamW, or "
            "consistency=sparkdl.Synchronous().",
        )
        for model, how in [(sparkdl.DiLoCo(), {}), (sparkdl.Gossip(), {"engine": "local"})]
    ],
    model_error(
        "an optimizer that moves the weights before it evaluates the loss",
        lambda fit: fit(fit.good(), optimizer=LooksAhead),
        "optimizer LooksAhead moves the weights before it evaluates the loss, but an iteration is a "
        "single pass, at the weights with which it begins: use an optimizer whose step takes no "
        "closure, such as torch.optim.AdamW.",
    ),
    model_error(
        "an optimizer whose state is more than its values",
        lambda fit: fit(fit.good(), optimizer=Tagged),
        'optimizer Tagged keeps "kept" of its state in a tensor of the class Tag, of which slices and '
        "checkpoints would keep the values alone: use an optimizer whose state is plain tensors, such "
        "as torch.optim.AdamW.",
    ),
    tried(
        "plateau without validation",
        lambda fit: fit(fit.good(), schedule=torch.optim.lr_scheduler.ReduceLROnPlateau),
        "schedule ReduceLROnPlateau follows a metric of the validation, but there is no "
        "validation: pass validation=..., or use a schedule that follows the iterations.",
    ),
    model_error(
        "learning rate that is text",
        lambda fit: fit(fit.good(), optimizer=partial(torch.optim.SGD, lr="0.1")),
        'the optimizer cannot be built: lr is the text "0.1": give a number, lr=0.1.',
    ),
    model_error(
        "no optimizer at all",
        lambda fit: fit(fit.good(), optimizer=lambda module: []),
        "the optimizer has no trainable parameter of the model, so nothing would be trained: "
        "give it the parameters of the module that it is built for.",
    ),
    model_error(
        "compression that returns a number",
        lambda fit: fit(fit.good(), compression=lambda bucket: 3),
        "compression fails on a gradient of \"0.weight\" [1, 2]: AttributeError: 'int' object "
        "has no attribute 'items'. It is a function of a sparkdl.GradBucket that returns a "
        "dictionary of tensors, as sparkdl.TopK and sparkdl.PowerSGD do.",
    ),
    tried(
        "schedule that ends too early",
        lambda fit: fit(
            fit.good(),
            stop=sparkdl.max_iteration(9),
            schedule=partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=5),
        ),
        "schedule ends after total_steps=5, and the run has 9 iterations: set total_steps=9.",
    ),
]
