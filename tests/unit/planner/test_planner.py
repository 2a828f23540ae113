"""The planner without a session: choices, formulas, ranking, reasons, simulation, what is kept."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sparkdl
from sparkdl.connect.rows import for_gang
from sparkdl.data.batches import BatchSpec
from sparkdl.loop.history import History
from sparkdl.loop.state import TrainState
from sparkdl.planner import follow
from sparkdl.planner.choice import PLAINNESS, Choice, Facts, Search, replicas_up_to
from sparkdl.planner.estimate import LIBRARIES, Estimate, Formulas
from sparkdl.planner.follow import MOST, PlanCache, place
from sparkdl.planner.plan import Plan, ranked, with_measured
from sparkdl.planner.probe import Probe, _between, measure_on_rank, probe_of
from sparkdl.planner.profile import Block, Line, Profile, ProfileOrder, Timed, profile_of
from sparkdl.planner.timeline import Timeline, draw, duration, one_f_one_b, simulated
from sparkdl.train.chosen import whole_nodes
from sparkdl.train.prepare import prepare

BLOCKS = tuple(Block(str(n), 0.25, 100.0, 400.0) for n in range(4))
PROFILE = Profile(Line(0.001, 0.0001), 0.004, 1_000_000, 8, 2.0, 1000.0, BLOCKS, key="k")
PROBE = Probe(
    slots=4,
    cores=8,
    memory=1e9,
    overheads={("shuffle", 1): 0.02, ("shuffle", 4): 0.026, ("gang", 1): 0.001, ("gang", 4): 0.004},
    units={"fsdp": 0.0005, "tensor": 0.001, "pipeline": 0.002},
    sums={
        2: [(256, 0.0001), (262144, 0.0003), (4194304, 0.0041)],
        4: [(256, 0.0002), (262144, 0.0006), (4194304, 0.0082)],
    },
)
FACTS = Facts(batch_size=64, rows=4096, iterations=200)
FORMULAS = Formulas(FACTS, PROFILE, PROBE)


def trainer(**changes: Any) -> sparkdl.Trainer:
    fields: dict[str, Any] = {
        "model": partial(nn.Linear, 3, 2),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=0.1),
        **changes,
    }
    return sparkdl.Trainer(**fields)


def test_all_choices_of_64_ranks_are_listed() -> None:
    found = [*Search(["shuffle", "gang"], [64], PLAINNESS).choices()]
    meshes = {choice.sizes for choice in found if choice.engine == "gang"}
    assert len(meshes) == 84  # factors of 64 over data, pipe, shard and tensor
    assert len(found) == len(set(found)) < 1000
    assert all(choice.sizes.size == 64 for choice in found)
    assert replicas_up_to(6) == [1, 2, 4, 6]


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        (Choice("shuffle", 2), {"engine": "shuffle", "replicas": 2}),
        (Choice("gang", 2), {"engine": "gang", "replicas": 2, "strategy": "ddp", "mesh": None}),
        (
            Choice("gang", 4, "pipeline", (("data", 2), ("pipe", 2)), 8),
            {
                "engine": "gang",
                "replicas": 4,
                "strategy": sparkdl.Pipeline(micro_batches=8),
                "mesh": {"data": 2, "pipe": 2},
            },
        ),
        (
            Choice("gang", 4, "fsdp+tensor", (("shard", 2), ("tensor", 2))),
            {
                "engine": "gang",
                "replicas": 4,
                "strategy": ["fsdp", "tensor"],
                "mesh": {"shard": 2, "tensor": 2},
            },
        ),
        (Choice("gang", 4, "ddp", own=True), {"engine": "gang", "replicas": 4}),
    ],
    ids=str,
)
def test_a_choice_is_fields_of_a_trainer_and_a_record(
    choice: Choice, fields: dict[str, Any]
) -> None:
    assert choice.fields() == fields
    assert Choice.from_plain(choice.to_plain()) == choice
    made = replace(trainer(model=partial(nn.Sequential, nn.Linear(3, 2), nn.ReLU())), **fields)
    assert made.engine == choice.engine
    history = History()
    history.note_plan({"fields": choice.to_plain(), "seconds": 0.1})
    for again in (
        History.from_bytes(history.to_bytes()),
        History.from_json_bytes(history.to_json_bytes()),
        history.branch(),
    ):
        assert again.plan is not None
        plan = again.plan["fields"]
        assert {name: plan.get(name) for name in fields} == fields


@pytest.mark.parametrize("record", [{}, {"engine": "x", "replicas": 1}, {"engine": "gang"}])
def test_a_damaged_record_is_no_choice(record: dict[str, Any]) -> None:
    with pytest.raises((KeyError, ValueError)):
        Choice.from_plain(record)


COMPUTE = 0.001 + 0.0001 * 64
TIMES = [
    (Choice("shuffle", 1), 0.02 + 1.3e-3 + COMPUTE + 0.004),
    (Choice("shuffle", 4), 0.026 + 1.3e-3 + 0.0026 + 0.004),
    (Choice("gang", 1), 0.001 + COMPUTE + 0.004),
    (Choice("gang", 2), 0.002 + 0.0042 + 0.0002 + 0.0038 * (1e6 - 262144) / 3932160 + 0.004),
    (Choice("gang", 2, "zero1"), 0.0 + 0.002 + 0.0042 + 0.000913 + 0.002),
    (
        Choice("gang", 2, "fsdp"),
        0.002 + 8 * 0.0005 + 0.0042 + 1.5 * (0.0002 + 0.0038 * (1e6 - 262144) / 3932160) + 0.002,
    ),
]


@pytest.mark.parametrize(("choice", "seconds"), TIMES, ids=str)
def test_the_time_of_an_iteration_is_the_sum_of_its_parts(choice: Choice, seconds: float) -> None:
    estimate = FORMULAS.estimate(choice)
    assert estimate.seconds == pytest.approx(seconds, rel=1e-3)
    assert sum(estimate.parts.values()) == pytest.approx(seconds, rel=1e-3)
    assert estimate.low < seconds < estimate.high


def test_a_pipeline_waits_for_its_longest_stage() -> None:
    choice = Choice("gang", 2, "pipeline", (), 4)
    parts = FORMULAS.estimate(choice).parts
    assert parts["compute"] == pytest.approx(5 * (0.001 + 0.0001 * 16) / 2)
    assert parts["overhead"] == pytest.approx(0.002 + 4 * 0.002)
    blocks = (replace(BLOCKS[0], share=0.7), *(replace(b, share=0.1) for b in BLOCKS[1:]))
    uneven = replace(FORMULAS, profile=replace(PROFILE, blocks=blocks)).estimate(choice)
    assert uneven.parts["compute"] == pytest.approx(parts["compute"] * 0.8 / 0.5)


def test_more_ranks_than_cores_share_them() -> None:
    few = replace(FORMULAS, probe=replace(PROBE, cores=1))
    alone, four = (few.estimate(Choice("gang", n)) for n in (1, 4))
    assert alone.seconds is not None
    assert four.seconds is not None
    assert four.seconds > alone.seconds


def test_sparks_schedule_gets_cheaper_in_a_long_fit() -> None:
    long = replace(FORMULAS, facts=replace(FACTS, iterations=4500))
    assert long.estimate(Choice()).parts["overhead"] == pytest.approx(
        0.02 * (450 + 0.55 * 4050) / 4500 + 1.3e-3
    )


MEMORY = [
    (Choice("gang", 2), 790),
    (Choice("gang", 2, "zero1"), 690),
    (Choice("gang", 2, "fsdp"), 590),
    (Choice("gang", 2, "pipeline", (), 4), 590),
]


@pytest.mark.parametrize(("choice", "megabytes"), MEMORY, ids=str)
def test_memory_of_100_mb_under_adam(choice: Choice, megabytes: float) -> None:
    large = replace(FORMULAS, profile=replace(PROFILE, nbytes=100_000_000, kept=0.0))
    assert large.memory(choice) / 1e6 == pytest.approx(megabytes, rel=0.01)


def test_what_does_not_fit_is_refused_with_figures() -> None:
    tight = replace(FORMULAS, probe=replace(PROBE, memory=4e6))
    assert tight.estimate(Choice("gang", 2)).refused == (
        "a worker needs 0.2 GB, and 0.0 GB are left to each of 4 task slots"
    )
    assert tight.memory(Choice("gang", 2)) > LIBRARIES


def test_what_was_not_measured_says_why() -> None:
    probe = replace(PROBE, overheads={("shuffle", 1): 0.02}, reasons={"gang": "no slots"})
    assert replace(FORMULAS, probe=probe).estimate(Choice("gang", 1)).unknown == "no slots"
    probe = replace(PROBE, units={}, reasons={"fsdp": "an old torch"})
    estimate = replace(FORMULAS, probe=probe).estimate(Choice("gang", 2, "fsdp"))
    assert (estimate.seconds, estimate.unknown) == (None, "an old torch")


def estimate(choice: Choice, ms: float, off: float = 0.1) -> Estimate:
    seconds = ms / 1e3
    return Estimate(choice, seconds, seconds * (1 - off), seconds * (1 + off), {"compute": seconds})


SHUFFLE, ONE, TWO, ZERO = (
    Choice("shuffle", 4),
    Choice("gang", 1),
    Choice("gang", 4),
    Choice("gang", 4, "zero1"),
)
RANKED = [
    ({SHUFFLE: 10, TWO: 5}, TWO),
    ({SHUFFLE: 10, TWO: 9}, SHUFFLE),  # a gain of 10 %
    ({SHUFFLE: 11, TWO: 9.4}, SHUFFLE),
    ({SHUFFLE: 20, TWO: 9.4, ZERO: 9}, TWO),  # level: the plainer one
    ({SHUFFLE: 20, TWO: 9, ONE: 9.4}, ONE),  # level: the fewer ranks
    ({SHUFFLE: 20, TWO: 9, ONE: 10.8}, TWO),  # a gain of 17 %, though ranges overlap
    ({SHUFFLE: 20, ZERO: 5, TWO: 9}, ZERO),
    ({ZERO: 5, TWO: 9}, ZERO),
]


@pytest.mark.parametrize(("times", "first"), RANKED)
def test_the_default_is_left_only_for_a_gain(times: dict[Choice, float], first: Choice) -> None:
    rows = ranked([estimate(c, ms) for c, ms in times.items()], SHUFFLE)
    assert rows[0].choice == first
    others = [row.milliseconds for row in rows[1:]]
    assert others == sorted(others)
    assert len(rows) == len(times)


def plan_of(formulas: Formulas = FORMULAS, **more: Any) -> Plan:
    choices = [*Search(["shuffle", "gang"], [1, 2, 4], PLAINNESS).choices()]
    estimates = [formulas.estimate(c, "too few slots" if c.replicas == 4 else "") for c in choices]
    rows = ranked(estimates, Choice("shuffle", 4))
    refused = [e for e in estimates if e.seconds is None]
    other = formulas.estimate(Choice("shuffle", 2, more=(("local_steps", 8),)))
    told = {"_trainer": trainer(), "subject": "a model of 8 parameters", **more}
    return Plan(rows, refused, [other], formulas.facts, formulas.profile, formulas.probe, **told)


def test_a_plan_is_a_table_with_reasons() -> None:
    plan = plan_of(measured_in=7.0)
    lines = str(plan).splitlines()
    assert lines[0] == (
        "4,096 rows, batches of 64, 200 iterations, a model of 8 parameters; predicted "
        "from 7 s of measuring"
    )
    assert lines[1].split() == [
        "engine",
        "replicas",
        "strategy",
        "ms/iteration",
        "range",
        "MB/worker",
        "why",
    ]
    assert lines[2].split()[:4] == ["1", "gang", "2", "zero1"]
    assert (
        "an iteration computes for 4.2 ms; as Spark jobs, starting tasks alone would take"
        in lines[2]
    )
    text = "\n".join(lines)
    assert "a lost executor costs some iterations at most" in text
    assert "level with 1" in text
    assert "another algorithm: shuffle, 2, local_steps=8: " in text
    assert "not possible: shuffle, 4 and " in text
    assert text.count("too few slots") == 1
    html = plan._repr_html_()
    assert html.count("<tr>") == 1 + min(len(plan.rows), 10)
    assert "computing" in html
    assert plan.trainer.engine == "gang"
    assert plan.trainer.strategy == "zero1"
    assert plan.trainer_of(3).strategy == "ddp"
    record = plan.record()
    assert record["fields"]["engine"] == "gang"
    assert record["instead"]["fields"]["engine"] == "shuffle"


def test_a_busy_machine_is_told_and_widens_ranges() -> None:
    busy = replace(FORMULAS, profile=replace(PROFILE, busy=3.0))
    assert "the machine is busy, so ranges are wide" in str(plan_of(busy))
    wide, narrow = (f.estimate(Choice("gang", 1)) for f in (busy, FORMULAS))
    assert wide.high - wide.low == pytest.approx(2 * (narrow.high - narrow.low))


def test_what_an_earlier_fit_took_counts() -> None:
    before = with_measured(FORMULAS.estimate(Choice("gang", 1)), 0.005)
    assert (before.seconds, before.measured) == (0.005, True)
    assert "measured in a fit, not predicted" in plan_of().reason(before)


def test_a_row_that_is_not_there() -> None:
    with pytest.raises(
        sparkdl.ParameterError, match=r"row=99: give the number of a row, from 1 to"
    ):
        plan_of().timeline(99)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("parts", [1, 2, 8, 16])
def test_1f1b_is_exact(stages: int, parts: int) -> None:
    line = Timeline()
    one_f_one_b(line, [1.0] * stages, parts)
    assert duration(line.run()) == pytest.approx(parts + stages - 1)


AGREE = [
    Choice("shuffle", 1),
    Choice("shuffle", 4),
    Choice("gang", 1),
    Choice("gang", 2),
    Choice("gang", 2, "zero1"),
    Choice("gang", 4),
    Choice("gang", 2, "fsdp"),
    Choice("gang", 4, "fsdp", (("data", 2), ("shard", 2))),
    Choice("gang", 2, "tensor"),
    Choice("gang", 2, "pipeline", (), 4),
    Choice("gang", 4, "pipeline", (), 8),
    Choice("gang", 4, "pipeline", (("data", 2), ("pipe", 2)), 4),
]


@pytest.mark.parametrize("nbytes", [1_000_000, 64 << 20])
@pytest.mark.parametrize("choice", AGREE, ids=str)
def test_formulas_and_simulation_agree(choice: Choice, nbytes: int) -> None:
    formulas = replace(FORMULAS, profile=replace(PROFILE, nbytes=nbytes))
    predicted = formulas.estimate(choice).seconds
    whole = duration(simulated(choice, formulas))
    assert whole == pytest.approx(predicted, rel=0.03)


@pytest.mark.parametrize("nodes", [2, 16, 96, 256])
@pytest.mark.parametrize("seconds", [0.02, 2.0])
def test_formulas_and_simulation_agree_between_nodes(nodes: int, seconds: float) -> None:
    profile = replace(PROFILE, line=Line(0.0, seconds), nbytes=28_000_000)
    probe = sparkdl.Cluster(nodes=nodes, slots=1).probe()
    facts, choice = replace(FACTS, batch_size=nodes), Choice("shuffle", nodes)
    formulas = Formulas(facts, profile, probe)
    predicted = formulas.estimate(choice).seconds
    whole = duration(simulated(choice, formulas))
    assert whole == pytest.approx(predicted, rel=0.03)


@pytest.mark.parametrize(("slots", "each"), [(8, 0.05), (8, 1e-5), (1, 0.05)])
def test_one_replica_a_node_is_named_where_it_saves(slots: int, each: float) -> None:
    cluster, facts = sparkdl.Cluster(nodes=64, slots=slots), replace(FACTS, batch_size=512)
    profile = replace(PROFILE, line=Line(0.0, each))
    formulas = Formulas(facts, profile, cluster.probe())
    seconds = formulas.estimate(Choice("shuffle", 64 * slots)).seconds if each > 1e-3 else 0.001
    told = [*whole_nodes(cluster, facts, (profile, PROBE), ["shuffle"], seconds)]
    named = "with spark.task.cpus=8 and replicas=64, where torch's threads share"
    assert [line.startswith(named) for line in told] == [True] * (slots > 1 and each > 1e-3)


def test_the_simulation_has_stragglers_and_uneven_stages() -> None:
    slow = replace(FORMULAS, profile=replace(PROFILE, line=replace(PROFILE.line, spread=0.1)))
    even, uneven = (duration(simulated(Choice("gang", 4), f)) for f in (FORMULAS, slow))
    assert even < uneven < 1.2 * even
    line = Timeline()
    one_f_one_b(line, [1.0, 3.0, 1.0], 8)
    assert 8 * 3 < duration(line.run()) < 8 * 3 + 3 * 3


def test_the_picture_has_a_lane_for_each_rank() -> None:
    svg = plan_of().timeline(2)
    assert svg.startswith("<svg")
    assert [name in svg for name in ("driver", "rank 0", "rank 1", "network")] == [True] * 4
    many = simulated(Choice("gang", 64), FORMULAS)
    assert "lanes more" in draw(many)


CLUSTERS = [
    ({"nodes": 0, "slots": 2}, "Cluster(nodes=0): give a whole number of at least 1."),
    ({"nodes": 2, "slots": 2, "gbit": 0}, "Cluster(gbit=0): give a number above 0."),
    ({"nodes": 2, "slots": 2, "latency": -1}, "Cluster(latency=-1): give a number of at least 0."),
]


@pytest.mark.parametrize(("fields", "message"), CLUSTERS)
def test_clusters_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(sparkdl.ParameterError) as error:
        sparkdl.Cluster(**fields)
    assert str(error.value) == message


def test_a_cluster_that_is_not_here() -> None:
    few, many = (
        Formulas(FACTS, PROFILE, sparkdl.Cluster(nodes=n, slots=1, gbit=10).probe())
        for n in (2, 64)
    )
    large = replace(PROFILE, nbytes=100_000_000)
    slow, fast = (
        Formulas(FACTS, large, sparkdl.Cluster(nodes=2, slots=1, gbit=g).probe()) for g in (1, 100)
    )
    two, sixty_four = few.estimate(Choice("shuffle", 2)), many.estimate(Choice("shuffle", 64))
    assert sixty_four.parts["driver"] > two.parts["driver"]
    one, hundred = (f.estimate(Choice("gang", 2)).parts["sum"] for f in (slow, fast))
    assert one == pytest.approx(100 * hundred, rel=0.01)  # 0.8 s at 1 Gbit/s
    assert one == pytest.approx(0.8, rel=0.01)
    computed = plan_of(few, subject=str(sparkdl.Cluster(nodes=2, slots=1)))
    assert "Cluster(nodes=2, slots=1, gbit=10); computed, not run" in str(computed)


def test_points_between_and_beyond() -> None:
    points = [(1.0, 10.0), (3.0, 20.0)]
    assert [_between(points, x) for x in (1, 2, 3, 5)] == [10, 15, 20, 30]
    assert _between([(4.0, 7.0)], 1) == 7


def test_trials_find_floors_and_say_what_failed() -> None:
    here = {"here": {"node": "a", "cores": 2, "memory": 8e9}, "sums": {}}

    def trial(choice: Choice, iterations: int) -> Timed:
        if choice.strategy == "tensor":
            raise sparkdl.TrainingError("an old torch\nmore")
        base = {"shuffle": 0.02, "gang": 0.002}[choice.engine] + 0.001 * choice.replicas
        return Timed(3 * base + (0.004 if choice.split > 1 else 0), 2 * base)

    probe = probe_of([here], 4, trial, [1, 4], PLAINNESS, ["shuffle", "gang"], busy=1.0)
    assert probe.overheads["gang", 4] == pytest.approx(3 * 0.006)
    assert probe.units["fsdp"] == pytest.approx(0.0005)
    assert probe.reasons == {"tensor": "an old torch"}
    assert probe.memory == 2e9
    busy = probe_of([here], 4, trial, [1, 4], (), ["shuffle", "gang"], busy=3.0)
    assert busy.overheads["gang", 4] == pytest.approx(2 * 0.006 / 2)  # processor time by the cores


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_model_is_profiled(optimizer: Callable[..., Any]) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

    model_of = prepare(trainer(model=model, optimizer=partial(optimizer, lr=0.1)), None)
    rows = [np.ones((5, 3), np.float32), np.zeros(5, np.int64)]
    order = ProfileOrder(model_of.payload, BatchSpec(num_features=1, num_labels=1), rows, (2, 8), 1)
    measured = measure_on_rank(pickle.loads(pickle.dumps(order)), ())
    profile = profile_of([measured], order)
    assert profile.nbytes == 4 * (3 * 8 + 8 + 8 * 2 + 2)
    assert profile.tensors == 4
    assert profile.state == (2.0 if optimizer is torch.optim.Adam else 0.0)
    assert [block.name for block in profile.blocks] == ["0", "1", "2"]
    assert sum(block.share for block in profile.blocks) == pytest.approx(1)
    assert profile.output == 32
    assert profile.kept >= 4 * (8 + 3)
    assert profile.line(8) > 0
    assert profile.update > 0


def test_lines_never_fall() -> None:
    assert Line.through([(4.0, 2.0), (8.0, 3.0)])(12) == pytest.approx(4)
    assert Line.through([(4.0, 3.0), (8.0, 2.0)])(4) == pytest.approx(1)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_is_kept_for_the_next_plan(home: Path) -> None:
    cache, choice = PlanCache(), Choice("gang", 2)
    cache.note_plan("k", choice, 0.008)
    cache.keep_measured("k", choice, 0.009, True)
    cache.keep_probe("s", PROBE, True)
    again = PlanCache()  # of another process
    assert again.measured("k", choice, True) == 0.009
    assert again.probe("s", True) == PROBE
    assert again.planned("k", choice) is None
    assert (again.measured("k", choice, False), again.probe("s", False)) == (None, None)
    for n in range(MOST + 5):
        cache.keep_measured(f"n{n}", choice, 0.1, True)
    assert PlanCache().measured("k", choice, True) is None
    place().write_text("[not json")
    assert PlanCache().measured("n9", choice, True) is None


def test_what_the_user_refuses_is_not_written(home: Path) -> None:
    cache = PlanCache()
    cache.keep_measured("k", Choice(), 0.009, False)
    cache.keep_probe("s", PROBE, False)
    assert cache.measured("k", Choice(), False) == 0.009  # within the process
    assert not place().exists()


def test_auto_needs_one_form_that_works() -> None:
    assert trainer(engine="auto").settled().engine == "shuffle"
    assert trainer(engine="auto", sync_batchnorm=True).settled().engine == "gang"
    assert trainer(engine="auto", local_steps=8).settled().engine == "shuffle"
    both = trainer(engine="auto", strategy="auto", replicas="auto")
    assert (both.number_of_replicas, both.settled().replicas) == (None, None)
    assert both.settled().strategy == "ddp"
    assert trainer(engine="gang", strategy="auto").settled().parts.keys() == {"data"}
    with pytest.raises(sparkdl.ParameterError, match=r'sync_batchnorm=True with engine="shuffle"'):
        trainer(engine="auto", sync_batchnorm=True, local_steps=8)
    with pytest.raises(sparkdl.ParameterError, match="give a whole number of at least 1"):
        trainer(replicas="many")


def test_over_spark_connect_auto_is_the_gang_with_ddp() -> None:
    there = for_gang(trainer(engine="auto", strategy="auto", replicas="auto"))
    assert (there.engine, there.strategy, there.replicas) == ("gang", "ddp", None)


def test_what_a_trainer_has_chosen_is_a_choice() -> None:
    chain = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    gang = partial(trainer, model=chain, engine="gang")
    assert follow.own_choice(trainer(), 3) == Choice("shuffle", 3)
    assert follow.own_choice(gang(), 3) == Choice("gang", 3)
    assert follow.own_choice(gang(strategy="zero1"), 3) == Choice("gang", 3, "zero1")
    pipes = gang(strategy=sparkdl.Pipeline(micro_batches=8), mesh={"data": 2, "pipe": 2})
    expected = Choice("gang", 4, "pipeline", (("data", 2), ("pipe", 2)), 8, own=True)
    assert follow.own_choice(pipes, 4) == expected


@pytest.mark.parametrize(("schedule", "told"), [(0.021, True), (0.012, False)])
def test_a_line_says_what_a_gang_would_take(
    schedule: float, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(follow, "log_line", lines.append)
    monkeypatch.setattr(follow, "check_slots", lambda *arguments: 2)
    watch = follow.ScheduleShare(trainer(), SimpleNamespace(context=None), 2)  # type: ignore[arg-type]
    state = TrainState(timings={"schedule": schedule, "iteration": 0.028})
    for _ in range(200):
        watch.on_iteration_end(None, state)
    assert len(lines) == told
    if told:
        assert lines[0].startswith(
            "the schedule of Spark's jobs takes 21 of 28 ms of an iteration: "
            'engine="gang" would take about 8 ms'
        )
