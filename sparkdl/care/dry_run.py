"""The dry run: a few rows pass through the model on the driver as a whole and in two parts.

It tests what is promised, that the gradient is that of one process. One pass over all rows is that of
one process; two passes, over the first row and over the rest, are those of two replicas. Their losses,
gradients and buffers are compared, within rounding, and the attributes before and after. Only where
something differs do more passes find out why; :mod:`sparkdl.care.differences` has the causes, and the
checks that were not made.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from sparkdl.care.attributes import Attributes, comparable
from sparkdl.care.averages import (
    ROUNDING,
    ROUNDING_OF_16_BITS,
    Sum,
    agree,
    check_parts,
    leaves,
    rounding_of_module,
    rows_for_loss,
)
from sparkdl.care.differences import found as tell
from sparkdl.care.first_pass import Tried, check_scorer, fresh_tensors, masks, try_model
from sparkdl.care.hints import check_labels, missing_label_error, missing_labels, shape_of, text_of
from sparkdl.data.batches import Batch, BatchSpec, input_fields, preview_batch
from sparkdl.data.epoch import EpochPlan
from sparkdl.data.ragged import Rows
from sparkdl.data.row_errors import columns_with
from sparkdl.data.samples import SampleSet
from sparkdl.engines.delivery import ValidationSet
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
from sparkdl.model.flat import form_of, one_place_each
from sparkdl.model.loss import (
    ClassLoss,
    PerReplica,
    inner,
    is_own_loss,
    is_step,
    loss_of,
    masses_of,
)
from sparkdl.model.recipe import Recipe, bytes_of, with_tensors
from sparkdl.parallel.plan import ParallelPlan
from sparkdl.process.determinism import seeded
from sparkdl.replica.compute import MiniBatch, buffers_kept, evaluating, to_tensors, weigh
from sparkdl.slices.reduce import merge_values

Values = dict[str, torch.Tensor]
LARGE = 1 << 30
"""The bytes of parameters from which on gradients are not compared, whose passes take long."""
GRADIENT, SMALL = 0.05, 0.01
"""The allowed difference of a gradient, relative to its norm, and the norm, relative to the largest,
below which a gradient is not looked at."""
MOST_NAMES = 5
SEARCHED_BATCHES = 1000


@dataclass(frozen=True)
class Division:
    """The division of the rows in a run."""

    plan: EpochPlan
    iterations: int | None  # None: no end is known
    parallel: ParallelPlan

    def have_copies(self) -> bool:
        """Return whether several copies of the model have rows."""
        groups, counts = self.parallel.mesh.model_groups, self.plan.counts
        return sum(any(counts[rank] for rank in group) for group in groups) > 1


@dataclass(frozen=True)
class DryRun:
    """The dry run of a built recipe, whose loss and module may change, on the first rows of a run."""

    module: nn.Module
    recipe: Recipe
    batch_spec: BatchSpec  # with the recipe's ``augment``
    samples: SampleSet
    division: Division
    build: Callable[[], nn.Module]  # the module anew
    validation: ValidationSet | None = None

    @property
    def averaged(self) -> bool:
        """Return whether the loss of a batch is put together from several mini-batches."""
        options, parallel = self.recipe.options, self.division.parallel
        return self.division.have_copies() or options.accumulate > 1 or parallel.micro_batches > 1

    def run(self, care: bool = True) -> Tried:
        """Return what the first pass has shown. Raises :class:`sparkdl.UserError`.

        Without ``care`` only that pass is made, and one over the validation data.
        """
        module, recipe, samples = self.module, self.recipe, self.samples
        check_labels(recipe.loss, samples)
        if self.validation is not None:
            check_labels(recipe.loss, self.validation.samples, "validation data: ")
        with seeded(recipe.seed):
            batch = preview_batch(self.batch_spec, samples.preview, augment=True)
        missing, first = missing_labels(samples, self.validation)
        masked = masks(module, recipe, batch, missing) if missing else True
        if masked is False and first is not None:
            raise missing_label_error(*first)
        if care:
            tell_of_own_draws(self.batch_spec, samples.preview, batch)
        labels_are = samples.fields[samples.num_features :][: samples.num_labels]
        inputs_are = input_fields(self.batch_spec, samples.fields)
        run = functools.partial(try_model, module, recipe, batch, inputs_are, labels_are)
        rows = FirstRows(module, recipe, batch) if care else None
        tried = run()
        if not masked and first is not None:
            raise missing_label_error(*first)
        if first is not None and ClassLoss.of(inner(recipe.loss)) is not None:  # not meant to mask
            tell("a missing label", place=first[1], spec=columns_with(first[0], "Masked()"))
        if rows is not None:
            rows.keep_buffers()
            rows.attributes.check(run)
            rows.attributes.check_made(run, rows.pass_first_row_only, self.build)
            rows.divide(tried, self.averaged)  # last, as a cache may grow with each number of rows
        for part in self.division.parallel.parts.values():
            part.check_rows(module, samples.fields)
        if rows is not None:
            self._compare(rows, tried)
        if self.validation is not None:
            check_scorer(module, recipe.signature, self.validation)
        if rows is not None:
            rows.check_writes()
        module.zero_grad()  # gradients take as much memory as the model
        return tried

    def _compare(self, rows: FirstRows, tried: Tried) -> None:
        """Find out why parts differ from the whole."""
        recipe, samples = self.recipe, self.samples
        own = isinstance(recipe.loss, PerReplica) or is_own_loss(recipe.loss)
        if (problem := rows.problem_of_one()) is not None:
            check_one_row(self.division, recipe, problem)
        if self.division.have_copies():
            rows.tell_of_buffers()
        looked_at = rows_for_loss(recipe.loss, samples.preview, samples.more)
        known, given = rows.known, tried.given
        if looked_at is not samples.preview and (self.averaged or tried.sums):
            with seeded(recipe.seed):
                batch = preview_batch(self.batch_spec, looked_at, augment=True)
            known = mini_batch(recipe, batch)
            given = None if is_own_loss(recipe.loss) else output_of(self.module, recipe, known)
        labels = looked_at[samples.num_features :][: samples.num_labels]
        check_parts(self.module, recipe, known, given, labels, tried.sums, self.averaged)
        if self.averaged:
            check_frequencies(self.module)
        if isinstance(recipe.loss, PerReplica) or is_step(recipe.loss) or not rows.agree:
            if not rows.tell_of_hidden_state() and self.averaged and not own:
                rows.tell_of_mixed_rows(tried)
        elif name := rows.other_gradient():
            tell("gradient", name=name)


def mini_batch(recipe: Recipe, batch: Batch) -> MiniBatch:
    """Return a batch as fresh tensors, with the weight and the mass of each sample."""
    inputs, targets = fresh_tensors(batch)
    own = None if batch.weights is None else torch.from_numpy(batch.weights)
    weights = weigh(targets, own, recipe.options)
    return MiniBatch(inputs, targets, weights, masses_of(recipe.loss, targets), batch.lengths)


def output_of(module: nn.Module, recipe: Recipe, known: MiniBatch) -> object:
    """Return the argument of the loss for a mini-batch in training mode, without gradients."""
    with seeded(recipe.seed):  # a forward or a step may compute gradients
        returned = recipe.signature.call_for_loss(recipe.loss, module, known.inputs, known.targets)
        return with_tensors(recipe.signature.for_loss(recipe.loss, returned), torch.Tensor.detach)


Problem = tuple[str, str, Exception]
"""The culprit on some rows ("model" or "loss"), the reason, and the error."""


@dataclass(frozen=True)
class Part:
    """The result of a pass over some rows."""

    loss: Sum | None = None  # None: it failed
    output: list[torch.Tensor] = field(default_factory=list)  # what has a value for each row
    buffers: Values = field(default_factory=dict)  # empty: it failed, or they took another form
    problem: Problem | None = None


class FirstRows:
    """The first rows of a run, and what the model is before any pass over them."""

    def __init__(self, module: nn.Module, recipe: Recipe, batch: Batch) -> None:
        self.module, self.recipe, self.batch = module, recipe, batch
        self.attributes = Attributes(module, recipe.loss)
        self._sums = parameter_sums(module)
        self._wrote: list[str] = []
        named = rules_of(module, recipe.options.buffers)
        self._places = [
            (owner, name, buffer, buffer.clone() if one_place_each(buffer) else None)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._buffers = {
            name: buffer.detach().clone()
            for name, buffer in module.named_buffers()
            if name not in named
        }
        self._after: Values = {}
        self._norms: dict[str, float] = {}
        self._left: dict[str, float] = {}
        self._parts: list[tuple[int, int, Part]] = []
        self._same = False
        """Their outputs are known and the same."""
        self.agree = False
        """The whole has the loss of its two parts."""

    def __len__(self) -> int:
        return len(self.batch.inputs[0])

    @functools.cached_property
    def known(self) -> MiniBatch:
        return mini_batch(self.recipe, self.batch)

    def problem_of_one(self) -> Problem | None:
        """Return what fails on the first row alone, with the buffers that the first pass has left."""
        if any(high == 1 and part.problem is None for _, high, part in self._parts):
            return None
        with buffers_kept(self.module):  # those as built may get values from the first rows
            return self._pass(0, 1, bool(self._norms), restored=False).problem

    def keep_buffers(self) -> None:
        """Note the buffers that the first pass has left."""
        self._after = {
            name: content.clone()
            for name in self._buffers
            if (content := self._buffer(name)) is not None
        }

    def divide(self, tried: Tried, averaged: bool) -> None:
        """Pass over two parts of the rows, after the pass over all of them.

        A part of one row also shows what a batch of one row does. If it fails, there are two halves.
        """
        self._wrote, rows = self._written(), len(self)
        if self._wrote or not averaged or rows < 2:
            return
        total = self.known.weight
        large = sum(p.numel() * p.element_size() for p in self.module.parameters()) > LARGE
        goes_back = not large and bool(total)
        self._norms = gradient_norms(self.module) if goes_back else {}
        with buffers_kept(self.module):
            parts = [self._pass(low, high, goes_back) for low, high in ((0, 1), (1, rows))]
            self._parts = [(0, 1, parts[0]), (1, rows, parts[1])]
            if parts[0].problem is not None and rows >= 4:
                cuts = (0, rows // 2), (rows // 2, rows)
                self._parts += [(low, high, self._pass(low, high)) for low, high in cuts]
        self._left = gradient_norms(self.module)
        count = tried.count if tried.count is not None else total
        whole = Sum(tried.value if tried.sums else tried.value * count, count)
        losses = [part.loss for part in parts if part.loss is not None]
        rounding = rounding_of_module(self.module)
        output = of_rows(tried.given, rows)
        joined = [
            torch.cat(pair)
            for pair in zip(*(part.output for part in parts), strict=False)
            if pair[0].shape[1:] == pair[1].shape[1:]  # else the parts were padded to other lengths
        ]
        self._same = len(joined) == len(output) > 0 and all(
            one.shape == other.shape and not bool(_far(one, other, rounding).any())
            for one, other in zip(output, joined, strict=True)
        )
        finite = all(math.isfinite(loss.total) for loss in losses)
        self.agree = len(losses) == 2 and finite and agree(whole, losses, rounding)
        self.agree = self.agree and (self._same or not output)

    def _pass(self, low: int, high: int, goes_back: bool = False, restored: bool = True) -> Part:
        """Pass over some rows in training mode, from the buffers as built if they are ``restored``.

        With ``goes_back`` their part of the gradient is taken away from the gradients of the module.
        """
        recipe, signature = self.recipe, self.recipe.signature
        part = mini_batch(recipe, self.batch).rows(slice(low, high))
        if restored:
            self._restore()
        with seeded(recipe.seed), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those about shapes: the results are right
            try:
                returned = signature.call_for_loss(
                    recipe.loss, self.module, part.inputs, part.targets
                )
                output = signature.for_loss(recipe.loss, returned)
            except Exception as error:
                return Part(problem=("model", text_of(error), error))
            try:
                loss = recipe.loss, output, part.targets, part.weights, part.masses
                value, count = loss_of(*loss)
                share = -1.0 if count is not None else -part.weight / (self.known.weight or 1.0)
                if goes_back and part.weight and value.requires_grad:
                    (value * share).backward()
                weight = part.weight if count is None else count
                total = float(value.detach()) * (weight if count is None else 1.0)
            except Exception as error:
                reason = f"{text_of(error)}; the output of one is {shape_of(output)}"
                return Part(problem=("loss", reason, error))
        return Part(Sum(total if weight else 0.0, weight), of_rows(output, len(part)), self._now())

    def _restore(self) -> None:
        for owner, name, buffer, content in self._places:
            owner._buffers[name] = buffer
            if content is not None:  # torch lets nobody write to an expanded buffer
                buffer.copy_(content)

    def _buffer(self, name: str) -> torch.Tensor | None:
        owner, attribute = owner_of(self.module, name)
        return owner._buffers.get(attribute)

    def _now(self) -> Values:
        """Return the buffers that no rule names; none if one has another form than before."""
        now = {name: self._buffer(name) for name in self._buffers}
        if any(b is None or form_of(b) != form_of(self._buffers[n]) for n, b in now.items()):
            return {}
        return {name: buffer.detach().clone() for name, buffer in now.items() if buffer is not None}

    def pass_first_row_only(self, module: nn.Module) -> None:
        """Run forward of a module on a batch of the same size in which every row is the first one."""
        rows = np.zeros(len(self), np.int64)
        tensors = to_tensors([array[rows] for array in self.batch.inputs])
        with torch.no_grad(), seeded(self.recipe.seed), contextlib.suppress(Exception):
            self.recipe.signature.bound(module)(*tensors)

    def tell_of_hidden_state(self) -> bool:
        """Warn if the output of a model, or of a step, depends on earlier passes; return whether."""
        outputs = []
        for _ in range(2):
            inputs, targets = fresh_tensors(self.batch)
            with buffers_kept(self.module), seeded(self.recipe.seed):
                output = self.recipe.signature.call_for_loss(
                    self.recipe.loss, self.module, inputs, targets
                )
                outputs.append(comparable(output))
        if hidden := outputs[0] != outputs[1]:
            tell("hidden state")
        return hidden

    def tell_of_mixed_rows(self, tried: Tried) -> None:
        """Warn if the output for a row depends on other rows of its mini-batch, in evaluation mode.

        It does only if this changes at least half of the rows, and by more than rounding would in any
        dtype: in another mini-batch a model may choose another expert for a few rows. A model that
        draws random numbers, has weights of 16 bits, or cannot be compared, is passed over.
        """
        rows, module, signature = len(self), self.module, self.recipe.signature
        if rows < 2 or any(p.element_size() < 4 for p in module.parameters()):
            return

        def outputs(start: int, stop: int, seed: int = 0) -> list[torch.Tensor]:
            inputs = [tensor[start:stop] for tensor in fresh_tensors(self.batch)[0]]
            with evaluating(module), buffers_kept(module), seeded(seed):
                output = signature.output(signature.call(module, inputs))
            return of_rows(output, stop - start)

        def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
            return 2 * int(_far(one, other, ROUNDING_OF_16_BITS).sum()) >= len(one)

        try:
            whole = of_rows(tried.in_use, rows)
            halves = zip(outputs(0, rows // 2), outputs(rows // 2, rows), strict=True)
            joined = [torch.cat(pair) for pair in halves]
            mixed = any(map(differ, whole, joined))
            mixed = mixed and not any(map(differ, whole, outputs(0, rows, seed=1)))
        except Exception:  # it accepts no other number of rows, for example
            return
        if mixed:
            tell("mixed rows")

    def other_gradient(self) -> str:
        """Return the name of a parameter whose gradient is not that of two parts, if there is one."""
        if not self._same:  # losses may be the same by chance, as of what is normalized
            return ""
        least = SMALL * max(self._norms.values(), default=0.0)
        names = [
            name
            for name, norm in self._norms.items()
            if norm > least and self._left.get(name, norm) > GRADIENT * norm
        ]
        if not names or any(p.element_size() < 4 for p in self.module.parameters()):
            return ""
        self.module.zero_grad()
        with buffers_kept(self.module):  # a gradient that is drawn differs from itself
            whole = self._pass(0, len(self), goes_back=True)
            norms = gradient_norms(self.module)
        same = all(abs(norms.get(n, 0.0) - self._norms[n]) <= SMALL * self._norms[n] for n in names)
        return names[0] if same and whole.problem is None else ""

    def tell_of_buffers(self) -> None:
        """Warn of buffers that passes have changed by their rows, and that no rule names.

        A buffer that changes in the same way whatever the rows are, such as a count of passes or the
        vectors of spectral norm, needs no rule. A rule that makes of two parts what all rows give is
        named in the warning.
        """
        changed = [n for n, after in self._after.items() if _differ(self._buffers[n], after)]
        last = self._parts[-2:]
        cuts = [(high - low, part.buffers) for low, high, part in last if part.buffers]
        if not changed or not last:
            return
        fitting = dict.fromkeys(changed, "")
        with buffers_kept(self.module):  # after the first pass came one in evaluation mode
            whole = self._pass(0, len(self)).buffers
        if len(cuts) == 2 and whole:
            weights, parts = [rows for rows, _ in cuts], [values for _, values in cuts]
            changed = [n for n in changed if any(_differ(whole[n], v[n]) for v in parts)]
            fitting = {n: self._fitting(n, whole, parts, weights) for n in changed}
        if not changed:
            return
        # a rule for a part of what belongs together, such as a queue and its place, would part it
        alone = {n.rpartition(".")[0] for n, rule in fitting.items() if not rule}
        fitting = {n: rule for n, rule in fitting.items() if n.rpartition(".")[0] not in alone}
        few = dict(list(fitting.items())[:MOST_NAMES])
        rules = ", ".join(f'"{name}": "{rule}"' for name, rule in few.items())
        listed = ", ".join(f'"{name}"' for name in changed[:MOST_NAMES])
        more = f" and {len(changed) - MOST_NAMES} more" if len(changed) > MOST_NAMES else ""
        tell(
            "buffers",
            names=f"the buffer{'s' if len(changed) > 1 else ''} {listed}{more}",
            result="the result has those of replica 0"
            if self.recipe.options.topology is not None
            else "after each iteration all have what the first has, as with torch's DDP",
            first=changed[0],
            attribute=ATTRIBUTE,
            last=changed[0].rpartition(".")[2],
            hint=f" On the first rows, one process has the same as with {{{rules}}}."
            if few
            else "",
        )

    def _fitting(self, name: str, whole: Values, parts: list[Values], weights: list[int]) -> str:
        """Return the rule that makes of two parts what all rows give, or an empty string."""
        before = self._buffers[name]
        for rule in (MAX, MIN, SUM, MEAN):
            if problem_of_rule(before, rule):
                continue
            values = [part[name] - before if rule == SUM else part[name] for part in parts]
            merged = before.clone()
            merge_values(rule, values, weights, merged)
            if not _differ(merged, whole[name], ROUNDING_OF_16_BITS):
                return rule
        return ""

    def check_writes(self) -> None:
        """Warn of a forward pass that writes to trained parameters.

        Raise ModelError if a step writes to parameters, a pass to frozen ones, or a lookup to a
        trained table (``max_norm``). This changes the weights of the module.
        """
        module = self.module
        for name, table in module.named_modules():
            norm = table.max_norm if isinstance(table, nn.Embedding | nn.EmbeddingBag) else None
            if norm is not None and table.weight.requires_grad:
                tell("normed in place", name=name, norm=norm)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.requires_grad and parameter.is_floating_point():
                    parameter.add_(0.01)  # as an update does: else writing a copy of it goes unseen
                    if is_step(self.recipe.loss):  # an optimizer inside of it meets gradients
                        parameter.grad = torch.ones_like(parameter)
        self._sums = parameter_sums(module)
        with contextlib.suppress(Exception):  # it need not work with all weights
            output_of(module, self.recipe, self.known)
        for name in [*self._wrote, *self._written()][:1]:
            tell("a trained parameter", name=name)

    def _written(self) -> list[str]:
        """Return the names of trained parameters with other sums; refuse all others."""
        now, step = parameter_sums(self.module), is_step(self.recipe.loss)
        changed = [name for name in now if now[name] != self._sums.get(name, now[name])]
        for name in changed:
            if step:
                tell("a step's update", name=name)
            if not self.module.get_parameter(name).requires_grad:
                tell("a frozen parameter", name=name)
        return changed


def of_rows(output: object, rows: int) -> list[torch.Tensor]:
    """Return the tensors in an output that have values for each of so many rows, as matrices."""
    tensors = [t for t in leaves(output) if torch.is_tensor(t) and t.layout is torch.strided]
    some = [t.detach() for t in tensors if t.dtype in ROUNDING and not t.is_nested]
    return [t.reshape(rows, -1) for t in some if t.ndim and len(t) == rows and t.numel()]


def _far(one: torch.Tensor, other: torch.Tensor, rounding: float) -> torch.Tensor:
    """Return for each row whether it differs by more than rounding, relative to the largest value."""
    return (one - other).abs().amax(1) > rounding * torch.maximum(
        one.abs().max(), other.abs().max()
    )


def parameter_sums(module: nn.Module) -> dict[str, int]:
    """Return a checksum of each parameter, by name."""
    return {name: zlib.adler32(bytes_of(p)) for name, p in module.named_parameters()}


def gradient_norms(module: nn.Module) -> dict[str, float]:
    """Return the norm of the gradient of each parameter that has one, by name."""
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    dense = {n: g.coalesce().values() if g.is_sparse else g for n, g in gradients.items()}
    return {name: float(gradient.norm()) for name, gradient in dense.items()}


def _differ(one: torch.Tensor, other: torch.Tensor | None, rounding: float = 0.0) -> bool:
    """Return whether two buffers differ, if the second has the form of the first."""
    if other is None or form_of(one) != form_of(other):
        return False
    if rounding and one.is_floating_point():
        return not torch.allclose(one, other, rtol=rounding, atol=0.0, equal_nan=True)
    return bytes_of(one) != bytes_of(other)


def tell_of_own_draws(how: BatchSpec, preview: Sequence[Rows], batch: Batch) -> None:
    """Warn if ``augment``, which made ``batch``, makes something else this time."""
    if how.augment is None:
        return
    with seeded(how.seed):
        again = preview_batch(how, preview, augment=True)
    if comparable(batch.inputs) != comparable(again.inputs):
        tell("draws of augment")


def check_frequencies(module: nn.Module) -> None:
    """Raise :class:`ModelError` if a trained table divides gradients by counts in a mini-batch."""
    for name, table in module.named_modules():
        counts = isinstance(table, nn.Embedding | nn.EmbeddingBag) and table.scale_grad_by_freq
        if counts and table.weight.requires_grad:
            tell("counts in a batch", name=name)


def check_one_row(division: Division, recipe: Recipe, problem: Problem) -> None:
    """Raise :class:`ModelError` if a mini-batch would have one row, on which something fails.

    Batch norm needs more, and so does a loss whose input went through ``.squeeze()``.
    """
    (what, reason, error), plan, parallel = problem, division.plan, division.parallel
    options = recipe.options
    last, together = plan.num_iterations - 1, parallel.mesh.model_groups
    of_all = options.sync_batchnorm and what == "model"  # the rows of all ranks count together
    if of_all:
        together = [[rank for group in together for rank in group]]
    for number in (*range(min(last, SEARCHED_BATCHES)), last):
        rows_of = [stop - start for start, stop in plan.rows(number)]
        counts = [sum(rows_of[rank] for rank in group) for group in together]
        steps = (part for rows in counts for part in _cut(rows, options.local_steps))
        single = any(1 in parallel.pass_sizes(part, options.accumulate) for part in steps)
        if single and (division.iterations is None or number < division.iterations):
            steps_name = "inner_steps" if options.outer else "local_steps"
            cuts = {steps_name: options.local_steps, "accumulate": options.accumulate}
            cut = "".join(f", {name}={parts}" for name, parts in cuts.items() if parts > 1)
            if parallel.micro_batches > 1:
                cut += f", micro_batches={parallel.micro_batches}"
            tell(
                "one row",
                cause=error,
                what=what,
                reason=reason,
                iteration=number + 1,
                who="the whole batch" if of_all else "a replica",
                sizes=f"{plan.num_samples} rows, "
                f"batch_size={plan.batch_size // options.local_steps}, "
                f"replicas={len(plan.counts)}{cut}",
                cut=", or cut less" if cut else "",
            )


def _cut(rows: int, count: int) -> list[int]:
    """Return the sizes of ``count`` nearly equal parts of ``rows``."""
    return [rows * (i + 1) // count - rows * i // count for i in range(count)]
