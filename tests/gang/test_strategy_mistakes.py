"""A strategy says before the data are read what it cannot do: a row each."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import strategy_models as models
import torch
from gang_training import CLASSES, WIDTH, refused
from gang_training import trainer_of as any_trainer
from pyspark import cloudpickle
from torch import nn

import sparkdl
from sparkdl import DDP, FSDP, ModelError, ParameterError, Pipeline, Tensor

pytestmark = pytest.mark.gang
cloudpickle.register_pickle_by_value(sys.modules[__name__])
WORDS = (
    "use one of ddp, zero1, fsdp, tensor, pipeline, sparkdl.DDP(...), sparkdl.FSDP(...), "
    "sparkdl.Tensor(...) or sparkdl.Pipeline(...)."
)
ZERO1 = 'Use strategy="zero1", or leave compression out.'
ADAFACTOR = {"optimizer": partial(torch.optim.Adafactor, lr=1e-2)}
COMPRESSED = {"compression": sparkdl.TopK(0.1)}
VALUES: dict[str, tuple[Any, str]] = {
    "a word": ("fsdp3", f'strategy="fsdp3": {WORDS} Did you mean "fsdp"?'),
    "a class": (FSDP, "strategy is the class FSDP: give an instance, sparkdl.FSDP()."),
    "bucket_cap_mb": (
        DDP(bucket_cap_mb=0),
        "strategy=DDP(bucket_cap_mb=0): give a number of megabytes above 0.",
    ),
    "passes": (
        DDP(static_graph=True, find_unused_parameters=True),
        "strategy=DDP(static_graph=True, find_unused_parameters=True): passes are alike, or they are "
        "not.",
    ),
    "units": (
        FSDP(units="layers"),
        "strategy=FSDP(units='layers'): give a list of names or patterns, such as [\"layers.*\"].",
    ),
    "param_dtype": (
        FSDP(param_dtype="fp8"),
        'strategy=FSDP(param_dtype="fp8"): use one of fp32, bf16, fp16.',
    ),
    "a way": (
        Tensor(plan={"0": "columns"}),
        'strategy=Tensor(plan={"0": \'columns\'}): use "column", "row", or a style of '
        'torch.distributed.tensor.parallel. Did you mean "column"?',
    ),
    "a list of names": (
        Tensor(plan=["0"]),  # type: ignore[arg-type]
        "strategy=Tensor(plan=['0']): give ways by name or pattern, such as "
        '{"0": "column", "2": "row"}.',
    ),
    "a width that does not come out even": (
        Tensor(plan={"4": "column"}),
        'strategy="tensor" with 2 parts: "4" has 1 outputs, which 2 does not divide. Choose another '
        "width, or leave it out of the plan.",
    ),
    "split": (
        Pipeline(split="3"),
        'strategy=Pipeline(split=\'3\'): give a list of names of modules, such as ["3", "6"].',
    ),
    "micro_batches": (
        Pipeline(micro_batches=0),
        "strategy=Pipeline(micro_batches=0): give a whole number of at least 1.",
    ),
    "schedule": (
        Pipeline(schedule="zb"),
        'strategy=Pipeline(schedule="zb"): use one of 1f1b, gpipe.',
    ),
    "more stages than modules": (
        Pipeline(stages_per_rank=4),
        'strategy="pipeline" with 8 stages: the model is a chain of 6 modules. Use fewer replicas, or '
        'copies of the pipeline, mesh={"data": ..., "pipe": ...}.',
    ),
    "too few cuts": (
        Pipeline(split=["1"], stages_per_rank=2),
        "strategy=Pipeline(split=...) names 1 modules with which a stage begins, after the first: 4 "
        "stages need 3.",
    ),
    "cuts in disorder": (
        Pipeline(split=["2", "1", "3"], stages_per_rank=2),
        "strategy=Pipeline(split=['2', '1', '3']): name them in the order of the model, and not the "
        "first module, with which the first stage begins.",
    ),
    "no sizes": (
        ["fsdp", "tensor"],
        'strategy: "fsdp" and "tensor" together need sizes: give them, such as '
        'mesh={"shard": 2, "tensor": 2}.',
    ),
}
MESHES: dict[str, tuple[Any, dict[str, int], str]] = {
    "weights that stay, and parts of layers": (
        [FSDP(cpu_offload=True), "tensor"],
        {"shard": 2, "tensor": 1},
        'strategy: "fsdp" and "tensor" together keep their weights where they compute: leave out '
        "cpu_offload=True.",
    ),
    "sizes that do not fit": (
        "fsdp",
        {"shard": 3},
        "mesh={'shard': 3} has 3 ranks, and there are 2 replicas: give sizes whose product is "
        "replicas.",
    ),
    "a part of the update": (
        ["tensor", "zero1"],
        {"data": 1, "tensor": 2},
        "strategy=\"zero1\" divides the update among copies of the model, but mesh={'data': 1, "
        "'tensor': 2} of 2 ranks has only one copy: give \"data\" a size of at least 2, or leave "
        '"zero1" out.',
    ),
    "a size is missing": (
        "tensor",
        {"shard": 2},
        'mesh={\'shard\': 2} has no size of strategy="tensor": name "tensor" too.',
    ),
    "an unknown dimension": (
        "tensor",
        {"tensors": 2},
        'mesh={\'tensors\': 2}: use data, pipe, shard, tensor, not "tensors". Did you mean "tensor"?',
    ),
}
WITH: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{word} and compression": (
            {"strategy": word, **COMPRESSED},
            f'compression with strategy="{word}": torch sums the gradients itself. {ZERO1}',
        )
        for word in ("fsdp", "tensor", "pipeline")
    },
    **{
        f"{word} and sync_batchnorm": (
            {"strategy": word, "sync_batchnorm": True},
            f'sync_batchnorm does not go with strategy="{word}": leave it out.',
        )
        for word in ("tensor", "pipeline")
    },
    "pipeline and compile": (
        {"strategy": "pipeline", "compile": True},
        'compile does not go with strategy="pipeline": leave it out.',
    ),
    "a static graph and accumulate": (
        {"accumulate": 2, "strategy": DDP(static_graph=True)},
        "strategy=DDP(static_graph=True) with accumulate=2: torch records the graph in a backward "
        "pass that sums gradients, and only the last part of an accumulated batch does. Leave one "
        "of the two out.",
    ),
    "local_steps": (
        {"local_steps": 2},
        'local_steps=2 with engine="gang": its ranks do not average optimizer state. Use '
        'engine="shuffle", or consistency=sparkdl.DiLoCo(inner_steps=...).',
    ),
    "slices": (
        {"slices": 2},
        'slices=2 with engine="gang": the strategy decides how the state is divided. Leave slices '
        "out.",
    ),
}
ODD, SGD = partial(partial, models.Odd), {"optimizer": torch.optim.SGD}
UNFIT: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a unit that is not there": (
        FSDP(units=["layer.*"]),
        {"model": ODD("")},
        'strategy=FSDP: no submodule matches "layer.*". Did you mean "layers.1"? The model has layers, '
        "layers.0, layers.1, out.",
    ),
    "a list": (
        FSDP(units=["layers"]),
        {"model": ODD("")},
        'strategy=FSDP: "layers" is a list of modules, which is never called itself: name its '
        'members, "layers.*".',
    ),
    **{
        f"{word}, whole tensors": (
            word,
            ADAFACTOR,
            f'strategy="{word}" cuts tensors, and optimizer Adafactor needs whole ones: use '
            'strategy="zero1", or an optimizer that treats every element by itself, such as AdamW.',
        )
        for word in ("fsdp", "tensor")
    },
    "fsdp, a sparse table": (
        "fsdp",
        {"model": ODD("sparse"), **SGD},
        'strategy="fsdp" does not go with the embedding "table", which has sparse=True: use '
        'strategy="zero1", or sparse=False.',
    ),
    "two dtypes": (
        "fsdp",
        {"model": ODD("double")},
        'strategy="fsdp" needs one dtype: "layers.0.weight" is torch.float32 and "layers.1.weight" is '
        "torch.float64.",
    ),
    "a single number": (
        FSDP(cpu_offload=True),
        {"model": ODD("scalar")},
        'strategy=FSDP(cpu_offload=True): "scale" is a single number, of which every rank needs the '
        "whole where it computes: give it the shape [1], or leave out cpu_offload=True.",
    ),
    "shared by units": (
        FSDP(units=["layers.*"]),
        {"model": ODD("shared")},
        'strategy="fsdp": "layers.0.weight" is shared by several units. Name units that hold all of '
        'its places, strategy=sparkdl.FSDP(units=[...]), or use strategy="zero1".',
    ),
    "a name that is not there": (
        Tensor(plan={"9": "column"}),
        {},
        'strategy=Tensor: no submodule matches "9". The model has 0, 1, 2, 3, 4, 5.',
    ),
    "no linear layer": (
        Tensor(plan={"3": "column"}),
        {},
        'strategy=Tensor: "3" is a LayerNorm, and "column" is a way to cut an nn.Linear or an '
        "nn.Embedding: name these, or give a style of torch.distributed.tensor.parallel.",
    ),
    "nothing to cut": (
        "tensor",
        {"model": partial(nn.Linear, WIDTH, CLASSES)},
        'strategy="tensor" finds no two nn.Linear that follow each other, with an activation between '
        "them: name what to cut, strategy=sparkdl.Tensor("
        'plan={"name": "column", "name": "row"}).',
    ),
    "a cut that is not there": (
        Pipeline(split=["head"]),
        {},
        'strategy=Pipeline: no module of the chain is called "head". It has 0, 1, 2, 3, 4, 5.',
    ),
    "pipeline, a sparse table": (
        "pipeline",
        {"model": models.with_a_table, **SGD},
        'strategy="pipeline" does not go with the embedding "1.0.table", which has sparse=True: use '
        'strategy="ddp", or sparse=False.',
    ),
    "a block that is checkpointed": (
        "pipeline",
        {"model": models.nested, "activation_checkpointing": ["0"]},
        'strategy="pipeline" calls the members of "0" one by one: name these in '
        'activation_checkpointing, "0.*".',
    ),
    "parameters together": (
        "pipeline",
        {"optimizer": partial(torch.optim.LBFGS, max_iter=1)},
        'strategy="pipeline" updates each stage where it is, and optimizer LBFGS needs all parameters '
        'together: use strategy="ddp", or an optimizer that treats every parameter by itself.',
    ),
}
MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    **{name: ({"strategy": value}, ParameterError, said) for name, (value, said) in VALUES.items()},
    **{
        name: ({"strategy": one, "mesh": mesh}, ParameterError, said)
        for name, (one, mesh, said) in MESHES.items()
    },
    **{name: (changes, ParameterError, said) for name, (changes, said) in WITH.items()},
    **{
        name: ({"strategy": one, **changes}, ModelError, said)
        for name, (one, changes, said) in UNFIT.items()
    },
}


def trainer_of(**changes: Any) -> sparkdl.Trainer:
    return any_trainer(**{"model": models.layers, **changes})


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_before_the_data_are_read(parts, mistake):
    changes, error, message = MISTAKES[mistake]
    refused(lambda: trainer_of(**changes), parts(12, 12), error, message)
