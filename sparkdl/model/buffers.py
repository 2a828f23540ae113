"""The rules by which replicas agree on the buffers that they have changed.

Each replica changes its copy of a buffer, and after an iteration all go on with one value. The rule of
a buffer says which. The first of these that names it counts: ``Trainer.buffers``; the attribute
``sparkdl_buffers`` of the module that has it, or of one around that; the table of known modules. A
buffer that none of them names has the value of the first replica that had rows, as in torch's
DistributedDataParallel.

Options for making and applying gradients: constants of a run that travel with its recipe.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from sparkdl.errors import ModelError, in_quotes, nearest
from sparkdl.process.determinism import seeded

Rule: TypeAlias = str | Callable[[torch.Tensor], torch.Tensor]
"""One of :data:`RULES`, or a function of the replicas' values, stacked, that returns one value."""

FIRST, MEAN, MIN, MAX, SUM = RULES = ("first", "mean", "min", "max", "sum")
"""FIRST: the value of the first replica that had rows. MEAN: the mean by the weight of the rows. MIN,
MAX: of each element; of replicas that may be behind, with the newest value. SUM: the value before, and
all that replicas have added to it."""

ATTRIBUTE = "sparkdl_buffers"
"""The attribute with which a module says the rules of its buffers, by name or pattern."""

_STATISTICS = {"running_mean": MEAN, "running_var": MEAN, "num_batches_tracked": FIRST}
_RANGE = "torch.ao.quantization.observer."
_KNOWN: Mapping[str, Mapping[str, Rule]] = {
    "torch.nn.modules.batchnorm._NormBase": _STATISTICS,
    f"{_RANGE}MovingAverageMinMaxObserver": {"min_val": MEAN, "max_val": MEAN},
    f"{_RANGE}MinMaxObserver": {"min_val": MIN, "max_val": MAX},
}
"""The rules of modules of torch and of all classes that extend them, by the name of the class."""


def rules_of(module: nn.Module, patterns: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the rule of each buffer that something names."""
    owners = dict(module.named_modules(remove_duplicate=False))
    aliases: dict[int, list[str]] = {}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        aliases.setdefault(id(buffer), []).append(name)
    found = {}
    for names in aliases.values():
        rule = next(_rules(names, owners, patterns), None)
        if rule is not None:
            found[names[0]] = rule
    return found


def _rules(
    names: list[str], owners: Mapping[str, nn.Module], patterns: Mapping[str, Rule]
) -> Iterator[Rule]:
    """Yield the rules of the trainer, those that modules say, the innermost first, and the table's."""
    for pattern, rule in patterns.items():
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            yield rule
    for name in names:
        path, _, attribute = name.rpartition(".")
        owner, within = owners[path], attribute
        while True:
            for pattern, rule in getattr(owners[path], ATTRIBUTE, {}).items():
                if fnmatch.fnmatchcase(within, pattern):
                    yield rule
            if not path:
                break
            path, _, last = path.rpartition(".")
            within = f"{last}.{within}"
        known = known_rule(owner, attribute)
        if known is not None:
            yield known


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has a buffer, and the name of the buffer there."""
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def known_rule(owner: nn.Module, attribute: str) -> Rule | None:
    """Return the rule that the table has for a buffer of ``owner``, or None."""
    for kind in type(owner).__mro__:
        known = _KNOWN.get(f"{kind.__module__}.{kind.__qualname__}", {})
        if attribute in known:
            return known[attribute]
    return None


def problems_of_rules(rules: Any, what: str) -> Iterator[str]:
    """Yield the problem of a mapping of rules."""
    known = f"{', '.join(map(in_quotes, RULES))}, or a function of the stacked values"
    if not isinstance(rules, Mapping) or not all(isinstance(name, str) for name in rules):
        yield f'{what}: give a mapping from names, or patterns such as "*.codes", to {known}.'
        return
    for name, rule in rules.items():
        if not callable(rule) and rule not in RULES:
            hint = nearest(str(rule), RULES)
            yield f'{what}: "{name}" has the rule {in_quotes(rule)}: give {known}.{hint}'


def check_rules(module: nn.Module, patterns: Mapping[str, Rule], gossip: bool) -> None:
    """Raise :class:`ModelError` if a name matches no buffer, or a rule does not go with a buffer.

    With ``gossip`` replicas keep weights, and so buffers, of their own.
    """
    buffers = dict(module.named_buffers(remove_duplicate=False))
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in buffers):
            raise ModelError(
                f'buffers: no buffer matches "{pattern}".{nearest(pattern, buffers)} A pattern must '
                'match the whole name, such as "encoder.codes" or "*.codes".'
            )
    for path, owner in module.named_modules():
        for problem in problems_of_rules(
            getattr(owner, ATTRIBUTE, {}), f"{path or 'model'}.{ATTRIBUTE}"
        ):
            raise ModelError(problem)
    for name, rule in rules_of(module, patterns).items():
        problem = problem_of_rule(buffers[name], rule)
        if gossip and rule not in (FIRST, MEAN):
            problem = (
                "replicas with consistency=Gossip average with a few others and never all meet: give "
                '"mean" or "first"'
            )
        wide = buffers[name].element_size() > _itemsize(module)
        if gossip and rule == MEAN and wide:
            problem = 'it is wider than the parameters, and Gossip averages none such: give "first"'
        if problem:
            told = in_quotes(rule) if isinstance(rule, str) else "a function"
            raise ModelError(f'the buffer "{name}" has the rule {told}, but {problem}.')


def _itemsize(module: nn.Module) -> int:
    """Return the bytes of a parameter's element."""
    return max((p.element_size() for p in module.parameters() if p.is_floating_point()), default=8)


def problem_of_rule(buffer: torch.Tensor, rule: Rule) -> str:
    """Return what is wrong with the rule of a buffer, or an empty string."""
    if callable(rule):
        return _problem_of_function(buffer, rule)
    kind = str(buffer.dtype).removeprefix("torch.")
    floats = buffer.is_floating_point() or buffer.is_complex()
    if rule == MEAN and not floats:
        return f'it is {kind}, which has no mean: give "first", "min", "max" or "sum"'
    if rule == SUM and buffer.dtype == torch.bool:
        return (
            f'it is {kind}: give "max" for any of the replicas, "min" for all of them, or "first"'
        )
    if rule in (MIN, MAX) and buffer.is_complex():
        return f'it is {kind}, which has no order: give "first", "mean" or "sum"'
    return ""


def _problem_of_function(buffer: torch.Tensor, rule: Callable[[torch.Tensor], torch.Tensor]) -> str:
    values = torch.stack([buffer.detach().cpu()] * 2)
    try:
        with seeded(0):
            found = rule(values)
    except Exception as error:
        return f"it fails on two values {list(values.shape)}: {type(error).__name__}: {error}"
    if not isinstance(found, torch.Tensor) or found.shape != buffer.shape:
        shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        return f"it returned {shape} for values {list(values.shape)}: return {list(buffer.shape)}"
    return ""


def values_in(place: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a buffer in its place in a flat vector, as a view.

    Behind those of an "exact" buffer there may be some more, which only fill the place.
    """
    return place.view(torch.uint8).view(dtype) if kind == "exact" else place


PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Names of ``Trainer.precision`` and ``Trainer.wire`` -> dtype (None: the model's own)."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The training options; see the fields of :class:`sparkdl.Trainer` with the same names."""

    accumulate: int = 1
    local_steps: int = 1
    precision: str = "fp32"
    wire: str = "fp32"
    clip_norm: float | None = None
    clip_value: float | None = None
    l1: float | Mapping[str, float] = 0.0
    l2: float | Mapping[str, float] = 0.0
    on_nan: str = "raise"
    ema: float | None = None
    weighted: bool = False
    """Samples have weights: the loss gives one value a sample, and the weights average them."""
    class_weights: tuple[float, ...] | None = None
    sync_batchnorm: bool = False
    activation_checkpointing: tuple[str, ...] = ()
    compile: bool | Mapping[str, object] = False
    outer: bool = False
    """An outer optimizer is given the distance that local steps have moved the weights."""
    topology: str | None = None
    """Replicas have weights of their own, and average them over this topology."""
    behind: bool = False
    """Replicas may compute on an older version than the one that is updated."""
    buffers: Mapping[str, Rule] = field(default_factory=dict)

    @property
    def steps_on_replicas(self) -> bool:
        """Return whether replicas take the steps of the user's optimizer themselves."""
        return self.keeps_own or self.local_steps > 1

    @property
    def keeps_own(self) -> bool:
        """Return whether each replica keeps the state of its optimizer from step to step."""
        return self.outer or self.topology is not None

    @property
    def averages(self) -> bool:
        """Return whether replicas are averaged, with their optimizer state, after local steps."""
        return self.steps_on_replicas and not self.keeps_own

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return PRECISIONS[self.precision]

    @property
    def wire_dtype(self) -> torch.dtype | None:
        return PRECISIONS[self.wire]

    @property
    def clips_norm(self) -> bool:
        """Return whether slice owners need each other's norms.

        After local steps replicas clip their own.
        """
        return self.clip_norm is not None and not self.steps_on_replicas

    @property
    def scales_loss(self) -> bool:
        return self.precision == "fp16"
