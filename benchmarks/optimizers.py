"""What an optimizer's step on a slice costs: torch's default, ``foreach=True`` and ``fused=True``.

    .venv/bin/python benchmarks/optimizers.py

One slice with square layers and their biases, on 1 and 2 threads; milliseconds of ``step_slice``, state
included, the fastest of all steps, as other programs disturb the slower ones. "=" marks the very
weights of the default after all steps, "~" weights that differ in the last bits. The table is Markdown.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial

import torch
from torch import nn, optim

from sparkdl.model.flat import FlatModule
from sparkdl.model.recipe import Recipe
from sparkdl.slices.optimizer import OptimizerSpec
from sparkdl.slices.optimizer_step import step_slice
from sparkdl.slices.spec import SliceState, slice_specs

WIDTH_AND_DEPTH = {"0.67 M": (256, 10), "25 M": (1024, 24)}
OPTIMIZERS = {
    "SGD": partial(optim.SGD, lr=1e-3),
    "SGD, momentum": partial(optim.SGD, lr=1e-3, momentum=0.9),
    "Adam": partial(optim.Adam, lr=1e-3),
    "AdamW": partial(optim.AdamW, lr=1e-3),
    "Adagrad": partial(optim.Adagrad, lr=1e-3),
}
KINDS: dict[str, dict[str, bool]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def measure(size: str, make: partial, steps: int) -> tuple[float, torch.Tensor]:
    """Milliseconds of the fastest step, and the weights after all of them."""
    width, depth = WIDTH_AND_DEPTH[size]
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
    recipe = Recipe(module, torch.square, make, 0)
    optimizer = OptimizerSpec.of(recipe, list(module.parameters()), module)
    flat = FlatModule(module)
    (plan,) = slice_specs(flat.layout, 1)
    state = SliceState(flat.flat.clone())
    gradient = torch.randn(plan.dense_length)
    seconds = []
    for _ in range(steps + 3):
        started = time.perf_counter()
        step_slice(plan, state, gradient, frozenset(), optimizer)
        seconds.append(time.perf_counter() - started)
    return min(seconds[3:]) * 1e3, state.weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    print(f"{os.cpu_count()} cores, CPU, torch {torch.__version__}\n")
    print(f"| parameters | threads | optimizer | {' | '.join(KINDS)} |")
    print(f"|---|---|---|{'---|' * len(KINDS)}")
    for size in WIDTH_AND_DEPTH:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for name, make in OPTIMIZERS.items():
                cells, default = [], None
                for kind in KINDS.values():
                    milliseconds, weights = measure(size, partial(make, **kind), steps)
                    default = weights if default is None else default
                    same = "=" if torch.equal(weights, default) else "~"
                    cells.append(f"{milliseconds:.1f} {same if kind else ''}".strip())
                print(f"| {size} | {threads} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
