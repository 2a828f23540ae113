"""A trained model as ``fit`` returns it, of a module that needs no training."""

from __future__ import annotations

from typing import Any

from torch import nn

from sparkdl.data.fields import Field
from sparkdl.infer.model import TrainedModel
from sparkdl.loop.history import History


def trained_model(module: nn.Module, **changes: Any) -> TrainedModel:
    """Return a model of one column of three numbers, unless ``changes`` say otherwise."""
    values: dict[str, Any] = {
        "model": module,
        "loss": None,
        "features": ("x",),
        "label": (),
        "fields": (Field("x", "float32", (3,)),),
        "num_features": len(changes.get("features", "x")),
        "float_dtype": "float32",
        "output": None,
        "history": History(),
    }
    return TrainedModel(module=module.eval(), **{**values, **changes})
