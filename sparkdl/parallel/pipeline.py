"""The division of a model into pipeline stages, and checks of whether it is possible. Plain torch."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sparkdl.data.fields import Field
from sparkdl.errors import ModelError, ParameterError
from sparkdl.model.flat import Layout
from sparkdl.model.options import TrainingOptions
from sparkdl.model.preparation import matches_module
from sparkdl.parallel.base import Pipeline, check_dense
from sparkdl.parallel.chain import chain_of, first_of, is_chain
from sparkdl.parallel.tensor import without_fused_layers
from sparkdl.parallel.trace import Items
from sparkdl.slices.optimizer import OptimizerSpec

OPERATION = 1.0
"""The cost of a module besides its multiplications, in floating-point operations. It is very small, and
only makes modules without multiplications spread evenly."""


def check_stages(
    strategy: Pipeline,
    module: nn.Module,
    layout: Layout,
    optimizer: OptimizerSpec,
    policy: TrainingOptions,
) -> None:
    """Check that a model and its optimizer can be split into pipeline stages.

    Raises:
        sparkdl.ModelError: If they cannot.
    """
    _check_torch()
    if not optimizer.separate:
        raise ModelError(
            f'strategy="pipeline" updates each stage where it is, and optimizer {optimizer.name} needs '
            'all parameters together: use strategy="ddp", or an optimizer that treats every parameter '
            "by itself."
        )
    check_dense(strategy.word, layout, instead="ddp")
    if is_chain(module):
        items = chain_of(module)
        for name in strategy.split:
            first_of(items, name)
        check_called(module, items, policy)


def _check_torch() -> None:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    if "return_outputs" not in inspect.signature(PipelineScheduleSingle.step).parameters:
        raise ModelError(
            f'strategy="pipeline" needs a newer torch than {torch.__version__}: install torch 2.13, or '
            'use strategy="zero1".'
        )


def check_one_length(word: str, fields: Sequence[Field]) -> None:
    """Check that no column is padded to the longest row of each mini-batch.

    Micro-batches, and the rows that ranks bring together, must have one shape. ``word`` is the word
    for the strategy.

    Raises:
        sparkdl.ParameterError: If a column is.
    """
    for field in fields:
        if field.padding is not None and field.padding.length is None:
            raise ParameterError(
                f'strategy="{word}" needs inputs of one shape, and column "{field.name}" is padded '
                "to the longest row of each mini-batch: pad it to one length, "
                "sparkdl.Sequence(max_length=..., pad_to_max=True)."
            )


def check_called(module: nn.Module, items: Items, policy: TrainingOptions) -> None:
    """Check that the modules for activation checkpointing are called as a whole.

    Args:
        module: The model.
        items: Its chain of modules.
        policy: The options of training, which name the modules.

    Raises:
        sparkdl.ModelError: If one is not.
    """
    whole = {id(child) for _, item in items for child in item.modules()}
    for pattern in policy.activation_checkpointing:
        for name, child in module.named_modules():
            if name and matches_module(pattern, name) and id(child) not in whole:
                raise ModelError(
                    f'strategy="pipeline" calls the members of "{name}" one by one: name these in '
                    f'activation_checkpointing, "{name}.*".'
                )


def check_split(strategy: Pipeline, module: nn.Module, ranks: int) -> None:
    """Check that an ``nn.Sequential`` can have the number of pipeline stages that this many ranks need.

    For another model this is known only when there is data to call it with.

    Raises:
        sparkdl.ParameterError: If it cannot.
        sparkdl.ModelError: If ``strategy.split`` names an unknown module.
    """
    if is_chain(module):
        _check_count(strategy, chain_of(module), ranks * strategy.stages_per_rank)


def _check_count(strategy: Pipeline, items: Items, count: int) -> None:
    if len(items) < count:
        raise ParameterError(
            f'strategy="pipeline" with {count} stages: the model is a chain of {len(items)} modules. '
            'Use fewer replicas, or copies of the pipeline, mesh={"data": ..., "pipe": ...}.'
        )
    if not strategy.split:
        return
    if len(strategy.split) != count - 1:
        raise ParameterError(
            f"strategy=Pipeline(split=...) names {len(strategy.split)} modules with which a stage "
            f"begins, after the first: {count} stages need {count - 1}."
        )
    places = [first_of(items, name) for name in strategy.split]
    if places[0] == 0 or any(a >= b for a, b in itertools.pairwise(places)):
        raise ParameterError(
            f"strategy=Pipeline(split={list(strategy.split)}): name them in the order of the model, "
            "and not the first module, with which the first stage begins."
        )


def check_shared(module: nn.Module, items: Items, bounds: Sequence[int]) -> None:
    """Check that no parameter or buffer is in two pipeline stages.

    Args:
        module: The model.
        items: Its chain of modules.
        bounds: The positions in the chain where stages begin, and the end.

    Raises:
        sparkdl.ModelError: If one is.
    """
    seen: dict[int, int] = {}
    for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
        for _, item in items[start:stop]:
            for tensor in (*item.parameters(), *item.buffers()):
                if seen.setdefault(id(tensor), stage) != stage:
                    raise ModelError(
                        f'strategy="pipeline": {_names_of(tensor, module)} in two stages. Name a cut '
                        "that leaves it in one, strategy=sparkdl.Pipeline(split=[...]), or use "
                        'strategy="fsdp".'
                    )


def _names_of(tensor: torch.Tensor, module: nn.Module) -> str:
    """Return the model's names of a tensor, for a message.

    The parts of a traced forward have others.
    """
    of_module = itertools.chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    names = [f'"{name}"' for name, other in of_module if other is tensor]
    return f"{' and '.join(names)} are one tensor," if len(names) > 1 else f"{names[0]} is"


def with_split(
    strategy: Pipeline,
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    ranks: int,
    policy: TrainingOptions,
) -> Pipeline:
    """Return ``strategy`` with every cut named: the user's cuts, or those for equal work.

    Work is counted in floating-point operations of the multiplications in a forward pass.

    Args:
        strategy: The user's options.
        module: The model.
        inputs: A few rows of each input.
        ranks: The number of ranks of a pipeline.
        policy: The options of training.

    Raises:
        sparkdl.ModelError: If the model cannot be split so.
        sparkdl.ParameterError: If the number of stages, or the names of the cuts, do not fit the model.
    """
    items, count = chain_of(module, strategy.split, inputs), ranks * strategy.stages_per_rank
    starts = [first_of(items, name) for name in strategy.split]
    _check_count(strategy, items, count)
    check_called(module, items, policy)
    costs, outputs = _tried(module, items, inputs)
    if not starts:
        starts = _chosen(costs, outputs, count)
    check_shared(module, items, [0, *starts, len(items)])
    for start in starts:
        _check_output(items[start - 1][0], outputs[start - 1])
    for kind in _not_sent(outputs[-1]):
        raise ModelError(
            f'strategy="pipeline" needs a model that puts out a tensor or a plain tuple of tensors, '
            f'and {type(module).__name__} puts out a {kind}: change that, or use strategy="fsdp".'
        )
    return replace(strategy, split=tuple(items[start][0] for start in starts))


def bounds_of(strategy: Pipeline, items: Items) -> list[int]:
    """Return the beginnings of the stages, and the end, for the result of :func:`with_split`."""
    return [0, *(first_of(items, name) for name in strategy.split), len(items)]


def _chosen(costs: Sequence[float], outputs: Sequence[object], count: int) -> list[int]:
    """Return the beginnings of the second and later stages, where only tensors pass."""
    places = [0, *(p for p in range(1, len(costs)) if not _not_sent(outputs[p - 1]))]
    if len(places) < count:
        raise ParameterError(
            f'strategy="pipeline" with {count} stages: the model is a chain of {len(places)} parts '
            "between which only tensors go. Use fewer replicas, or copies of the pipeline, "
            'mesh={"data": ..., "pipe": ...}.'
        )
    parts = [sum(costs[a:b]) for a, b in itertools.pairwise([*places, len(costs)])]
    return [places[part] for part in balanced(parts, count)[1:]]


def _not_sent(output: object) -> list[str]:
    """Return the types of values that cannot be sent from one pipeline stage to the next."""
    values = output if type(output) is tuple else (output,)  # a named tuple would lose its names
    return [type(value).__name__ for value in values if not isinstance(value, torch.Tensor)]


def _check_output(name: str, output: object) -> None:
    """Raise :class:`sparkdl.ModelError` if an output cannot be sent to the next pipeline stage."""
    for kind in _not_sent(output):
        raise ModelError(
            f'strategy="pipeline" sends tensors from stage to stage, and "{name}" puts out a '
            f"{kind}: cut elsewhere, strategy=sparkdl.Pipeline(split=[...]), or let it put out a "
            "tensor or a tuple of tensors."
        )


def _tried(
    module: nn.Module, items: Items, inputs: Sequence[torch.Tensor]
) -> tuple[list[float], list[object]]:
    """Return the floating-point operations and the output of each module of the chain."""
    costs, outputs = [], []
    training = module.training
    value: object = inputs[0] if len(inputs) == 1 else tuple(inputs)
    try:
        module.eval()
        with torch.no_grad(), _plain_operations():
            for _, item in items:
                with FlopCounterMode(display=False) as counter:
                    value = item(value)
                costs.append(counter.get_total_flops() + OPERATION)
                outputs.append(value)
    finally:
        module.train(training)
    return costs, outputs


@contextlib.contextmanager
def _plain_operations() -> Iterator[None]:
    """Replace attention and recurrent layers in the block by plain multiplications.

    These can be counted: torch's counter counts fused ones (a transformer layer in evaluation, an
    LSTM) as nothing.
    """
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        with without_fused_layers(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mkldnn.enabled = before


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Divide a sequence into contiguous parts so that the most costly part is as cheap as possible.

    Of several such divisions, return one whose earlier parts are shorter.

    Args:
        costs: The cost of each item.
        parts: The number of parts, none of which is empty.

    Returns:
        The beginning of each part.
    """
    count, sums = len(costs), [0.0, *itertools.accumulate(costs)]
    best = [[sums[stop] if stop else float("inf") for stop in range(count + 1)]]
    cuts: list[list[int]] = [[0] * (count + 1)]
    for part in range(1, parts):
        row, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for stop in range(part + 1, count + 1):
            for start in range(part, stop):
                cost = max(best[-1][start], sums[stop] - sums[start])
                if cost < row[stop]:
                    row[stop], cut[stop] = cost, start
        best.append(row)
        cuts.append(cut)
    starts, stop = [], count
    for part in reversed(range(parts)):
        stop = cuts[part][stop]
        starts.append(stop)
    return starts[::-1]


def micro_batches(rows: int, accumulate: int, count: int) -> list[tuple[int, int, int]]:
    """Divide the rows of a mini-batch into runs of equal micro-batches.

    Each of the ``accumulate`` parts of a mini-batch becomes ``count`` micro-batches, or fewer if it
    has fewer rows. They are two runs if the rows do not divide evenly.

    Args:
        rows: The number of rows.
        accumulate: The number of parts of a mini-batch.
        count: The number of micro-batches of each part.

    Returns:
        The runs: (first row, rows of each micro-batch, number of micro-batches).
    """
    parts, found = min(accumulate, rows), list[tuple[int, int, int]]()
    for i in range(parts):
        start, stop = rows * i // parts, rows * (i + 1) // parts
        many = min(count, stop - start)
        each, larger = divmod(stop - start, many)
        if larger:
            found.append((start, each + 1, larger))
        found.append((start + larger * (each + 1), each, many - larger))
    return found


def pass_sizes(strategy: Pipeline, rows: Sequence[int], accumulate: int) -> Iterator[set[int]]:
    """Yield the numbers of rows that forward passes will have, for each copy of the pipeline.

    Args:
        strategy: The options of the pipeline.
        rows: The number of rows of a mini-batch that each copy gets.
        accumulate: The number of parts of a mini-batch.
    """
    for together in rows:
        yield {each for _, each, _ in micro_batches(together, accumulate, strategy.micro_batches)}
