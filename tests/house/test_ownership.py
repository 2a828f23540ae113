"""One writer for each changing thing: nobody else assigns to the attributes of an object."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from launch import ROOT
from trees import parsed

ROOMS = ("engines", "replica")
TORCH = {
    "parameter.data": "memory is taken away and given back",
    "parameter.grad": "gradients are set, as autograd does",
    "parameter._local_tensor": "a shard is replaced in its DTensor",
    "child.forward": "a layer is wrapped in place, so that its names stay",
    "child.__class__": "a batch norm becomes one over all ranks, so that its names stay",
    "live.flat.module.forward": "the forward pass goes through all stages",
    "wrapped.bucket_bytes_cap": "DDP has no parameter for it",
    "ctx.counts": "what forward leaves for backward",
    "ctx.group": "what forward leaves for backward",
    "ctx.shape": "what forward leaves for backward",
}
"""Attributes of torch's objects, which have no methods for this, and why they are set."""
ASSEMBLED = "build."
"""A rank is assembled in turn by its strategies, which fill a :class:`Build`."""


def assigned(tree: ast.AST) -> Iterator[str]:
    """Yield every attribute that is set or deleted on something else than ``self`` and ``cls``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls"):
                yield f"{owner.removeprefix('self.')}.{node.attr}"


def test_what_is_assigned_is_found() -> None:
    text = """
self.a = cls.b = 1
x.c, (self.d, y.e) = 1, (2, 3)
self.f.g += 1
del z.h
for w.i in (): pass
x.j[0] = k
"""
    assert sorted(assigned(ast.parse(text))) == ["f.g", "w.i", "x.c", "y.e", "z.h"]


def test_nobody_assigns_to_the_attributes_of_another_object() -> None:
    found = {}
    paths = [path for room in ROOMS for path in sorted((ROOT / "sparkdl" / room).rglob("*.py"))]
    for path in paths:
        name = str(path.relative_to(ROOT / "sparkdl"))
        own = {target for target in assigned(parsed(path)) if target not in TORCH}
        if name.startswith("engines/gang/strategies/"):
            own = {target for target in own if not target.startswith(ASSEMBLED)}
        if own:
            found[name] = own
    assert found == {}
