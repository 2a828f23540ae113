"""What starts, what trains, how the module runs, and what is kept of it."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import safetensors.torch
import torch
from feature_runs import (
    CLASSES,
    CUTS,
    WIDTH,
    Parts,
    assert_close,
    assert_same_bits,
    fit_here,
    mlp,
    normed,
    plain_loss,
    plainly,
    recipe_of,
    trainer_of,
    whole,
)
from launch import in_turn
from mistakes import message_of
from remembering import Codes
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import get_ema_avg_fn

import sparkdl
from sparkdl.slices.update import EDGES

pytestmark = pytest.mark.parity
SIZES = (22, 21)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict(
            {"first": nn.Linear(WIDTH, 8), "second": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}
        )
        self.head = nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x):
        hidden = torch.tanh(self.encoder["first"](x))
        return self.head(torch.tanh(self.encoder["norm"](self.encoder["second"](hidden))))


# Freezing

FROZEN = [
    (["encoder"], [], ["head.weight", "head.bias"]),
    (["encoder"], ["head", "encoder.first.bias"], ["head.weight", "head.bias", "encoder.first.bias"]),
    (["*.bias"], [], ["head.weight", *(f"encoder.{n}.weight" for n in ("first", "second", "norm"))]),
    (["encoder.first.weight", "head"], ["head.bias"], None),
]  # fmt: skip


@pytest.mark.parametrize(("freeze", "unfreeze", "trains"), FROZEN, ids=str)
def test_frozen_parameters_keep_their_bits(freeze, unfreeze, trains):
    parts = Parts.of(SIZES)
    trainer = trainer_of(SIZES, 3, model=Deep, freeze=freeze, unfreeze=unfreeze, l2=0.1)
    start = recipe_of(trainer_of(SIZES, model=Deep)).build().state_dict()
    end = fit_here(trainer, parts).trained.module.state_dict()
    if trains is None:
        trains = set(start) - {"encoder.first.weight", "head.weight"}
    for name, tensor in end.items():
        assert torch.equal(tensor, start[name]) == (name not in trains), name


def test_what_is_not_frozen_trains_as_in_torch():
    parts = Parts.of(SIZES)
    trainer = trainer_of(SIZES, 2, model=Deep, freeze=["encoder"], unfreeze=["*.norm.*"])
    seen = fit_here(trainer, parts)
    assert set(seen.steps[0]) == {
        "encoder.norm.weight", "encoder.norm.bias", "head.weight", "head.bias"
    }  # fmt: skip
    assert_close(seen.steps, plainly(trainer, parts)[0])


def test_unfreeze_reaches_what_the_model_itself_froze():
    def frozen():
        return mlp().requires_grad_(False)

    trainer = trainer_of(SIZES, model=frozen, unfreeze=["2"])
    assert set(fit_here(trainer, Parts.of(SIZES)).steps[0]) == {"2.weight", "2.bias"}


# Modes


class Pretrained(nn.Module):
    """A backbone with statistics and dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        norm, drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.backbone = nn.Sequential(nn.Linear(WIDTH, 8), norm, drop, nn.Linear(8, 8))
        self.head = nn.Linear(8, CLASSES)
        norm.running_mean.normal_()
        self.double()

    def forward(self, x):
        return self.head(torch.tanh(self.backbone(x)))


class Overridden(Pretrained):
    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self


def evaluated(change=None, kind=Pretrained):
    module = kind()
    if change is not None:
        change(module)
    return module


def frozen_backbone(module):
    module.backbone.eval().requires_grad_(False)


def norms_and_dropout(module):
    """The statistics stay, the rest of the norm trains."""
    module.backbone[1].eval()
    module.backbone[2].eval()


def whole_model(module):
    """As a library loads it."""
    module.eval()
    module.backbone[2].p = 0.0


def loaded_backbone(module):
    """Likewise, in a module of one's own: it trains, so it is in training mode."""
    module.backbone.eval()
    module.backbone[2].p = 0.0


MODES = {
    "a frozen backbone": (partial(evaluated, frozen_backbone), frozen_backbone, ()),
    "some layers": (partial(evaluated, norms_and_dropout), norms_and_dropout, ()),
    "a train of its own": (partial(evaluated, kind=Overridden), lambda _: None, ()),
    "the whole model": (partial(evaluated, whole_model), lambda _: None, ()),
    "the whole model, some of it frozen": (
        *(partial(evaluated, whole_model), lambda _: None, ["backbone"]),
    ),
    "a part that trains": (partial(evaluated, loaded_backbone), lambda _: None, ()),
}


@pytest.mark.parametrize("name", MODES)
def test_modules_keep_the_mode_in_which_they_arrive(name, caplog):
    """As in a loop that calls ``train()`` and evaluates these; validations change nothing."""
    model, after_train, freeze = MODES[name]
    sizes = SIZES if "the whole" not in name and "part" not in name else (43,)
    parts = Parts.of(sizes)
    validation = sparkdl.Validation(parts, every=sparkdl.every(1))
    trainer = trainer_of(sizes, 2, model=model, freeze=freeze, validation=validation)
    seen = fit_here(trainer, parts)

    def loss(module, part):
        module.train()
        after_train(module)
        return plain_loss(trainer, module, part)

    steps, losses = plainly(trainer, parts, loss)
    assert_close(seen.steps, steps)
    assert seen.losses == pytest.approx(losses)
    told = "batch norms arrive in evaluation mode" in caplog.text
    assert told == (name in ("the whole model, some of it frozen", "a part that trains"))


FREEZES = (
    'freeze: no parameter matches "encoder.firts". Did you mean "encoder.first.bias"? The model has '
    "encoder.first.weight, encoder.first.bias,"
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"freeze": ["encoder.firts"]}, FREEZES),
        ({"unfreeze": ["*.wieght"]}, 'unfreeze: no parameter matches "*.wieght".'),
        ({"freeze": ["*"]}, "no trainable parameter"),
        ({"activation_checkpointing": ["encodr"]}, 'matches "encodr". Did you mean "encoder"?'),
        ({"activation_checkpointing": ["head.weight"]}, "no submodule matches"),
        ({"l1": {"bias": 0.1}}, 'l1: no trainable parameter matches "bias".'),
        ({"l2": {"encoder": 0.1}}, 'l2: no trainable parameter matches "encoder".'),
        ({"weights": {"x": torch.ones(2)}}, 'the model has no "x"; the weights'),
        ({"weights": {"head.bias": torch.ones(2)}}, '"head.bias" is [2] in the weights and [3] in'),
        ({"weights": {"x": torch.ones(2)}, "strict_weights": False}, "no name of the weights (x)"),
        ({"weights": {"head.bias": torch.ones(2)}, "strict_weights": False}, '"head.bias" is [2] in'),
    ],
    ids=str,
)  # fmt: skip
def test_a_name_without_a_match_is_an_error(changes, message):
    assert message in message_of(
        sparkdl.ModelError, fit_here, trainer_of(SIZES, model=Deep, **changes), Parts.of(SIZES)
    )


def test_a_file_of_weights_that_cannot_be_read(tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"no such thing")
    for name in ("bad.safetensors", "missing.safetensors"):
        with pytest.raises(
            sparkdl.ParameterError, match=f"{name}.*cannot be read as a safetensors"
        ):
            fit_here(trainer_of(SIZES, weights=tmp_path / name), Parts.of(SIZES))


# Weights to start from


@pytest.fixture
def state():
    torch.manual_seed(99)
    return normed().state_dict()


def continued(trainer, parts, module):
    """The first step of plain SGD from ``module``."""
    loss = plain_loss(trainer, module.train(), whole(trainer, parts, 0))
    loss.backward()
    return float(loss.detach()), {
        n: (p - 0.1 * p.grad).detach() for n, p in module.named_parameters()
    }


@pytest.mark.parametrize("form", ["state_dict", "str", "Path"])
def test_weights_to_start_from(state, form, tmp_path):
    path = tmp_path / "start.safetensors"
    safetensors.torch.save_file(state, path)
    given = {"state_dict": state, "str": str(path), "Path": path}[form]
    sizes = (43,)
    sgd = partial(torch.optim.SGD, lr=0.1)
    trainer = trainer_of(sizes, model=normed, weights=given, optimizer=sgd)
    parts, kept = Parts.of(sizes), copy.deepcopy(state)
    seen = fit_here(trainer, parts)
    module = normed()
    module.load_state_dict(state)
    loss, wanted = continued(trainer, parts, module)
    assert seen.losses[0] == pytest.approx(loss, rel=1e-12)
    step = {name: seen.steps[0][name] for name in wanted}
    assert_close([step], [wanted], 1e-12)
    torch.testing.assert_close(seen.steps[0]["1.running_mean"], module[1].running_mean)
    assert all(torch.equal(state[n], kept[n]) for n in state), "what was given is not changed"


def test_not_strict_takes_what_fits_by_name(state):
    del state["2.weight"]
    state["other.weight"] = torch.ones(3)
    sizes = (43,)
    parts = Parts.of(sizes)
    with pytest.raises(
        sparkdl.ModelError, match=r'the weights have no "2.weight".*strict_weights=False'
    ):
        fit_here(trainer_of(sizes, model=normed, weights=state), parts)
    sgd = partial(torch.optim.SGD, lr=0.1)
    trainer = trainer_of(sizes, model=normed, weights=state, strict_weights=False, optimizer=sgd)
    seen = fit_here(trainer, parts)
    module = recipe_of(trainer).build()
    module.load_state_dict({n: t for n, t in state.items() if n != "other.weight"}, strict=False)
    loss, wanted = continued(trainer, parts, module)
    assert seen.losses[0] == pytest.approx(loss, rel=1e-12)
    assert_close([{n: seen.steps[0][n] for n in wanted}], [wanted], 1e-12)


# How the module runs

PASSES: list[int] = []


class Counted(nn.Module):
    """A block that notes each of its forward passes."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), norm, nn.Dropout(0.3)

    def forward(self, x):
        PASSES.append(len(x))
        return torch.tanh(self.dropout(self.norm(self.layer(x))))


def blocks():
    """Only the first has running statistics."""
    first, second = Counted(nn.BatchNorm1d(WIDTH, momentum=None)), Counted(nn.Identity())
    return nn.Sequential(first, second, nn.Linear(WIDTH, CLASSES)).double()


class Annealed(Counted):
    """It reads buffers that each pass changes, in place and by another tensor."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(WIDTH))
        spectral_norm(self.layer)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        if self.training:
            self.step += 1
            self.scale = self.scale * 0.9
        return super().forward(x) * (1 - 0.5**self.step) * self.scale


def annealed():
    return nn.Sequential(Annealed(), Annealed(), nn.Linear(WIDTH, CLASSES)).double()


@pytest.mark.parametrize(
    ("blocks", "patterns"), [(blocks, ["0"]), (blocks, ["[01]"]), (annealed, ["[01]"])]
)
def test_activation_checkpointing_gives_the_same_bits(blocks, patterns):
    """Dropout's draws in the second pass are those of the first, and so are the buffers that it
    reads; running statistics count a batch once, though it goes forward twice."""
    sizes = (24, 16)  # which leave no mini-batch of a single row
    parts = Parts.of(sizes)
    PASSES.clear()
    plain = fit_here(trainer_of(sizes, 2, model=blocks), parts)
    passes = len(PASSES)
    PASSES.clear()
    again = fit_here(trainer_of(sizes, 2, model=blocks, activation_checkpointing=patterns), parts)
    assert len(PASSES) > passes + 9, "activations are computed again in backward"
    assert_same_bits(plain.flats, again.flats)
    assert "forward" not in vars(again.trained.module[0]), "the result has no trace of it"


COMPILED: list[int] = []


def counting_backend(graph, inputs):
    COMPILED.append(len(inputs))
    return graph.forward


def test_a_compiled_model_trains_alike():
    parts = Parts.of(SIZES)
    COMPILED.clear()
    torch._dynamo.reset()
    options = {"backend": counting_backend, "dynamic": True}
    seen = fit_here(trainer_of(SIZES, 2, compile=options), parts)
    assert COMPILED
    assert_close(seen.steps, plainly(trainer_of(SIZES), parts)[0])
    assert type(seen.trained.module) is nn.Sequential
    assert list(seen.trained.module.state_dict()) == list(mlp().state_dict())


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_compiled_by_inductor():
    parts = Parts.of((43,))
    torch._dynamo.reset()
    trainer = trainer_of((43,), model=partial(mlp, torch.float32), compile=True)
    seen = fit_here(trainer, parts)
    assert_close(seen.steps, plainly(trainer, parts)[0], 1e-3)


# The moving average


AVERAGED = [
    (*CUTS[0], 0.999, {}),
    (*CUTS[2], 0.9, {"clip_norm": 0.3}),
    ((30, 2, 11), 5, 0.9, {"local_steps": 3}),
]


@pytest.mark.parametrize(("sizes", "slices", "decay", "changes"), AVERAGED, ids=str)
def test_ema_is_the_recursion_of_swa_utils(sizes, slices, decay, changes):
    parts, update = Parts.of(sizes), get_ema_avg_fn(decay)
    trainer = trainer_of(sizes, slices, ema=decay, **changes)
    seen = fit_here(trainer, parts)
    start = recipe_of(trainer).build().state_dict()
    average = {name: tensor.clone() for name, tensor in start.items()}
    for step in seen.steps:
        average = {name: update(average[name], step[name], None) for name in average}
    assert_close([seen.trained.ema.module.state_dict()], [average])
    assert_close([seen.trained.module.state_dict()], [seen.steps[-1]], 0.0)
    bare = fit_here(trainer_of(sizes, slices, **changes), parts)
    assert_same_bits(seen.flats, bare.flats)
    assert bare.trained.ema is None


def test_ema_has_the_buffers_of_the_last_iteration():
    sizes = (24, 24)
    seen = fit_here(trainer_of(sizes, 3, model=normed, ema=0.9), Parts.of(sizes))
    average, last = seen.trained.ema.module[1], seen.trained.module[1]
    assert torch.equal(average.running_mean, last.running_mean)
    assert int(average.num_batches_tracked) == int(last.num_batches_tracked) == 9
    assert not torch.equal(average.weight, last.weight)


# Histograms


@pytest.mark.parametrize(("clip_norm", "cut"), in_turn([None, 0.2], CUTS[::-1]), ids=str)
def test_histograms_are_numpys(clip_norm, cut):
    """Of the weights after the step, and of the gradient that made it."""
    (sizes, slices), parts = cut, Parts.of(cut[0])
    sgd = partial(torch.optim.SGD, lr=0.5)
    trainer = trainer_of(
        sizes, slices, optimizer=sgd, histograms=sparkdl.every(3), clip_norm=clip_norm
    )
    seen = fit_here(trainer, parts)
    with_them = [t for t, state in enumerate(seen.states) if state.histograms]
    assert with_them == [2, 5, 8]
    for t in with_them:
        module = recipe_of(trainer).build()
        module.load_state_dict(seen.steps[t - 1])
        plain_loss(trainer, module, whole(trainer, parts, t)).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        found = seen.states[t].histograms
        assert set(found) == {
            f"{what}/{name}" for what in ("weights", "gradients") for name in seen.steps[t]
        }
        for name, p in module.named_parameters():
            check(found[f"weights/{name}"], seen.steps[t][name].numpy(), exactly=True)
            check(found[f"gradients/{name}"], p.grad.numpy(), exactly=False)


def check(histogram, values, exactly):
    counts, _ = np.histogram(values, EDGES)
    assert histogram.counts.sum() == values.size, "no padding is counted"
    if exactly:
        assert (histogram.counts == counts).all()
    else:  # a value may lie on the other side of a border by its last bit
        assert np.abs(np.cumsum(histogram.counts) - np.cumsum(counts)).max() <= 1
    assert histogram.smallest == pytest.approx(values.min(), rel=1e-10)
    assert histogram.largest == pytest.approx(values.max(), rel=1e-10)
    assert histogram.total == pytest.approx(values.sum(), rel=1e-9, abs=1e-12)
    assert histogram.squares == pytest.approx((values**2).sum(), rel=1e-9)


# Buffers that replicas agree on by rules

WAYS = {
    "slices": {"slices": 3},
    "clip_norm": {"clip_norm": 0.1},
    "accumulate": {"accumulate": 3},
    "local_steps": {"local_steps": 2},
    "DiLoCo": {"consistency": sparkdl.DiLoCo(inner_steps=2)},
    "stale": {"consistency": sparkdl.StaleSynchronous(staleness=2)},
    "asynchronous": {"consistency": sparkdl.Asynchronous()},
    "skip": {"on_nan": "skip", "ema": 0.9},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_sum_loses_no_row(way):
    """Nor does a range."""
    parts, run = Parts.of((22, 0, 21)), {"replicas": 3, "stop": sparkdl.max_epoch(2)}
    model = partial(nn.Sequential, Codes(WIDTH), nn.Linear(WIDTH, CLASSES))
    seen = fit_here(trainer_of(parts.counts, model=model, **{**run, **WAYS[way]}), parts)
    buffers, rows = seen.trained.module[0], np.array([r.features for p in parts.records for r in p])
    assert int(buffers.rows) == float(buffers.mass) == 2 * len(rows)
    assert torch.equal(buffers.low, torch.from_numpy(rows.min(0)).float())
    assert torch.equal(buffers.high.float(), torch.from_numpy(rows.max(0)).float())
    assert buffers.signs.tolist() == (rows > 2.0).any(0).tolist()


def test_with_gossip_each_replica_keeps_what_is_first():
    """The result has what replica 0 has, and the mean of what is averaged."""
    parts = Parts.of((22, 21))
    rules = {"0.centre": "mean", "0.*": "first"}
    model = partial(nn.Sequential, Codes(WIDTH), nn.Linear(WIDTH, CLASSES))
    how = {"buffers": rules, "consistency": sparkdl.Gossip(topology="complete")}
    seen = fit_here(trainer_of(parts.counts, model=model, **how), parts)
    buffers, rows = seen.trained.module[0], seen.states[-1].samples
    assert 0.4 * rows < int(buffers.rows) < 0.6 * rows
    assert not torch.equal(buffers.centre, buffers.codes)


def test_a_replay_of_other_rows_is_told(caplog):
    parts = Parts.of((22, 21))
    run = trainer_of(parts.counts, consistency=sparkdl.StaleSynchronous(staleness=1))
    recorded = fit_here(run, parts).trained.history
    fit_here(run, parts, replay=recorded)
    assert not caplog.messages
    fit_here(run, Parts.of((22, 21), seed=1), replay=recorded)
    (told,) = caplog.messages
    assert told.startswith("replay: the loss of iteration 1 is ")
