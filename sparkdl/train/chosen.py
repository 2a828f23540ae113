"""Plans of a fit, and the decision of the fields that a trainer leaves to one.

Fits of a tiny model find out what an engine itself costs, and short fits of the user's what it gains.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyspark
import torch
from pyspark import RDD
from pyspark.sql import SparkSession
from torch import nn

from sparkdl import gang
from sparkdl.care.rules import decided_later
from sparkdl.checkpoint.resume import ResumeCandidates
from sparkdl.data.batches import preview_batch
from sparkdl.data.partition_reader import open_partition
from sparkdl.data.ragged import Rows
from sparkdl.data.samples import SampleSet
from sparkdl.engines.resources import FitResources
from sparkdl.errors import ParameterError, SessionError, TrainingError, UserError, counted
from sparkdl.gang.slots import check_slots, cpus_of, task_slots
from sparkdl.loop.callbacks import Callback, none_added
from sparkdl.loop.progress import log_line
from sparkdl.loop.state import TrainState
from sparkdl.loop.triggers import max_iteration
from sparkdl.parallel.plan import parallel_of
from sparkdl.planner import follow
from sparkdl.planner.choice import GANG, PLAINNESS, SHUFFLE, Choice, Facts, Search, replicas_up_to
from sparkdl.planner.estimate import Estimate, Formulas
from sparkdl.planner.follow import CACHE, digest
from sparkdl.planner.plan import Plan, ranked, with_measured
from sparkdl.planner.probe import (
    SUMMED,
    Cluster,
    Probe,
    Trial,
    measure_on_rank,
    probe_of,
    processor_seconds,
)
from sparkdl.planner.profile import BUSY, Profile, ProfileOrder, Timed, profile_of, scaled
from sparkdl.process.memory import left_to_machine
from sparkdl.replica.compute import to_tensors
from sparkdl.session import SessionFacts
from sparkdl.slab.root import SlabConfig
from sparkdl.spark.frames import is_local
from sparkdl.train.engine_inputs import batch_spec
from sparkdl.train.placed_samples import PlacedSamples, as_read, replicas_of
from sparkdl.train.preflight import check_mesh, preflight
from sparkdl.train.prepare import PreparedModel, prepare
from sparkdl.train.request import FitRequest
from sparkdl.train.spec import TrainerSpec

TINY_ROWS = 4
"""The rows of a tiny fit's batch, for each replica."""
Run = Callable[[Any, FitRequest, SessionFacts], Any]
"""The type of :func:`sparkdl.train.fit.run`."""


def tiny_model() -> nn.Module:
    """Return four linear layers, 1,152 bytes of parameters in eight tensors."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers)


@dataclass
class LastThird(Callback):
    """Times of the last third of some iterations, all processes of this machine together."""

    iterations: int
    everything: bool  # this machine runs the executors too
    times: list[Timed] = field(default_factory=list)

    def on_iteration_end(self, trainer: Any, state: TrainState) -> None:
        if state.iteration in (self.iterations - self.iterations // 3, self.iterations):
            spent = processor_seconds() if self.everything else 0.0
            self.times.append(Timed(time.perf_counter(), spent))

    @property
    def each(self) -> Timed:
        """The times of an iteration."""
        (clock, spent), (end, total) = self.times
        count = self.iterations // 3
        return Timed((end - clock) / count, (total - spent) / count)


def timed_fit(
    trainer: TrainerSpec, data: Any, facts: SessionFacts, iterations: int, run: Run
) -> Timed:
    """Return the times of an iteration of a fit, which shows and keeps nothing."""
    watch = LastThird(iterations, is_local(facts.context))
    short = replace(
        trainer,
        stop=max_iteration(iterations),
        callbacks=[watch],
        validation=None,
        checkpoint=None,
        keep_optimizer_state=False,
        on_nan="skip",
    )
    with none_added():
        run(data, FitRequest(trainer=short), replace(facts, changes={"progress": "false"}))
    return watch.each


def tiny_trial(facts: SessionFacts, run: Run) -> Trial:
    """Return a function that times fits of the tiny model in a session."""

    def trial(choice: Choice, iterations: int) -> Timed:
        count = choice.replicas
        row = np.linspace(-1, 1, 8, dtype=np.float32)
        rows = [(row * n, row) for n in range(2 * TINY_ROWS * count)]
        trainer = TrainerSpec(
            model=tiny_model,
            loss=nn.MSELoss(),
            optimizer=functools.partial(torch.optim.SGD, lr=0.01),
            batch_size=TINY_ROWS * count,
            **choice.fields(),
        )
        return timed_fit(trainer, facts.context.parallelize(rows, count), facts, iterations, run)

    return trial


logger = logging.getLogger("sparkdl")
USUAL = PLAINNESS[0]
"""The strategy of a trainer that names none."""
ROWS = 64
"""The rows that are read to measure a model on."""
TRIED, TRIAL_ITERATIONS, START_SECONDS, TIMES_TRIALS = 3, 30, 3.0, 20
"""The choices that are tried, the iterations of each, about the seconds until the first of these, and
how many times as long as the trials a fit must be."""
SAVES = 0.85
"""The share of the planned time below which another setting of the session is named."""
MOST_RANKS = 128
"""The most ranks that measure at once."""
_profiles: dict[str, Profile] = {}


@dataclass
class Planner:
    """The planner of one fit: what it reads and measures, each at most once."""

    trainer: Any
    data: Any
    facts: SessionFacts
    run: Run
    shared: bool = field(init=False)  # what is measured, with other processes
    began: float = field(default_factory=time.monotonic)
    wholly_known: bool = True
    refusals: dict[Any, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settled: Any = self.trainer.settled()
        self.shared = self.facts.settings.plan_cache

    @functools.cached_property
    def model(self) -> PreparedModel:
        return prepare(self.settled, None)

    @functools.cached_property
    def alone(self) -> Any:
        """The trainer of a single replica in this process."""
        plain = {"strategy": USUAL, "mesh": None, "sync_batchnorm": False, "min_ranks": None}
        return replace(self.settled, engine="local", validation=None, checkpoint=None, **plain)

    @functools.cached_property
    def slots(self) -> int:
        return task_slots(self.facts.context, self.settled.resource_profile)

    @functools.cached_property
    def rows(self) -> int:
        """The rows of the data, which are counted."""
        if isinstance(self.data, PlacedSamples):
            return sum(self.data.training.counts)
        return int(self.data.count())

    @property
    def passes(self) -> int:
        """The iterations of one pass over the data."""
        return math.ceil(self.rows / (self.settled.batch_size * self.settled.options.local_steps))

    @functools.cached_property
    def iterations(self) -> int | None:
        """The iterations of the fit, if an end is known; the rows are counted only where it depends
        on them."""
        stop, ends = self.settled.stop, (1, 1 << 40)
        low, high = (stop.limit(each) for each in ends)
        if low == high:
            return low
        return stop.limit(self.passes)  # type: ignore[no-any-return]

    def whole_plan(self, trials: bool, cluster: Cluster | None) -> Plan:
        """Return the plan over all engines, and over what else the trainer does not say."""
        trainer, given = self.trainer, self.trainer.number_of_replicas
        free = trainer.strategy in (USUAL, "auto") and trainer.mesh is None
        strategies = PLAINNESS if free else ()
        return self.plan((SHUFFLE, GANG), strategies, given, given is None, trials, cluster)

    def plan(
        self,
        engines: Sequence[str],
        strategies: Sequence[str],
        given: int | None,
        searched: bool,
        trials: bool | None = False,
        cluster: Cluster | None = None,
    ) -> Plan:
        """Return the plan over these engines and strategies (none: the trainer's own).

        There are ``given`` replicas, or the usual number, or all that are worth a look if they are
        ``searched``. ``trials`` None: where the fit is much longer than they are.
        """
        facts, settled = self.facts, self.settled
        if isinstance(self.data, PlacedSamples):
            given, searched = self.data.replicas, False
        slots = self.slots if cluster is None else cluster.nodes * cluster.slots
        usual = given or (slots if cluster else replicas_of(settled, facts, None))
        counts = [usual]
        if searched and not _keeps_statistics(settled, self.model):
            most = max(1, min(slots, settled.batch_size))
            counts = sorted({*replicas_up_to(most), min(usual, most)})
        choices = [*Search(engines, counts, strategies).choices()]
        if not strategies and GANG in engines:
            with contextlib.suppress(UserError):
                on_gang = replace(settled, engine=GANG)
                choices += [follow.own_choice(on_gang, count) for count in counts]
        profile, probe = here = self._measured(counts, strategies or PLAINNESS, engines)
        if cluster is not None:
            profile, probe = _elsewhere(cluster, *here)
        iterations = self.iterations  # which may count the rows
        rows, steps = self.__dict__.get("rows"), settled.options.local_steps
        told = Facts(settled.batch_size, rows, iterations, steps)
        formulas = Formulas(told, profile, probe)
        estimates = [
            formulas.estimate(choice, self._refusal(choice, profile, cluster is None))
            for choice in choices
        ]
        key = follow.key_of(settled, self.model.layout, facts)
        if cluster is None:
            measured = (CACHE.measured(key, e.choice, self.shared) for e in estimates)
            estimates = [*map(with_measured, estimates, measured)]
        default = follow.own_choice(settled, usual)
        ways = ranked(estimates, default)
        if not ways:
            least = min(estimates, key=lambda e: e.memory)
            raise ParameterError(
                f"no way to run this fit is possible here. {least.choice}, of the least memory: "
                f"{least.refused or least.unknown}."
            )
        seconds = ways[0].seconds or 0.0
        if trials is None:
            cost = TRIED * (START_SECONDS + TRIAL_ITERATIONS * seconds)
            trials = len(ways) > 1 and (iterations or 0) * seconds > TIMES_TRIALS * cost
        where, notes = f"{facts.context.master} on {counted(probe.cores, 'core')}", list[str]()
        if cluster is not None:
            where = str(cluster)
            notes += whole_nodes(cluster, told, here, engines, seconds)
        else:
            if trials:
                ways = ranked([*map(self._tried, ways[:TRIED]), *ways[TRIED:]], default)
            for way in ways:
                CACHE.note_plan(key, way.choice, way.seconds or 0.0)
        refused = [e for e in estimates if e.seconds is None]
        others = [*self._others(formulas, ways[0].choice)]
        parameters = sum(parameter.numel() for parameter in self.model.module.parameters())
        subject = f"a model of {counted(parameters, 'parameter')}; {where}"
        spent = None if self.wholly_known else time.monotonic() - self.began
        return Plan(ways, refused, others, told, profile, probe, subject, spent, notes, settled)

    def _measured(
        self, counts: Sequence[int], strategies: Sequence[str], engines: Sequence[str]
    ) -> tuple[Profile, Probe]:
        """Return the profile of the model and the probe of the session, measured if not known."""
        facts, settled = self.facts, self.settled
        context, batch = facts.context, settled.batch_size
        session = facts.session or SparkSession.builder.getOrCreate()
        ends = sorted({math.ceil(batch / count) for count in counts})
        if len(ends) == 1:
            ends = sorted({max(min(2, batch), ends[0] // 4), ends[0]})
        with self._few_rows() as samples:
            alone = as_read(self.alone, samples)
            self.model.read_by(alone)
            preflight(alone, self.model, samples, None, True, care=False)
            rows = _first(samples)
            spec = batch_spec(settled, samples, self.model.float_dtype)
            self.fields = samples.fields
            self.inputs = to_tensors(preview_batch(spec, samples.preview).inputs)
        threads = cpus_of(context, settled.resource_profile)
        order = ProfileOrder(self.model.payload, spec, rows, (ends[0], ends[-1]), threads)
        name = digest(
            context.master, self.slots, threads, sorted({min(counts), max(counts)}),
            sorted(strategies), sorted(engines), pyspark.__version__,
        )  # fmt: skip
        probe = CACHE.probe(name, self.shared)
        profile = _profiles.get(order.key())
        if probe is not None and profile is not None:
            return profile, probe
        self.wholly_known = False
        wanted = order if profile is None else None
        try:
            ranks = min(self.slots, MOST_RANKS)
            measured = gang.run(
                measure_on_rank, wanted, SUMMED, ranks=ranks, timeout=300.0, spark=session
            )
        except (SessionError, ParameterError):  # no gang here: this process stands for a slot
            measured = [measure_on_rank(order, ())]
            profile = None
        if profile is None:
            profile = _profiles[order.key()] = profile_of(measured, order)
        if probe is None:
            trial = tiny_trial(facts, self.run)
            probe = probe_of(measured, self.slots, trial, counts, strategies, engines, profile.busy)
            CACHE.keep_probe(name, probe, self.shared and probe.busy <= BUSY)
        elif is_local(context):
            probe = replace(probe, memory=left_to_machine() / self.slots)
        return profile, probe

    @contextlib.contextmanager
    def _few_rows(self) -> Iterator[SampleSet]:
        """Yield samples in this process: a few rows of the data."""
        if isinstance(self.data, PlacedSamples):
            yield self.data.training
            return
        facts = self.facts
        if isinstance(self.data, RDD):
            few: Any = facts.context.parallelize(self.data.take(ROWS), 1)
        else:
            few = self.data.limit(ROWS)
        slab = SlabConfig.new(facts.settings.slab_dir, facts.context.applicationId)
        with FitResources(facts.context, slab, facts.settings.timeout) as resources:
            yield PlacedSamples.within(
                resources, self.alone, few, 1, self.model.float_dtype
            ).training

    def _tried(self, row: Estimate) -> Estimate:
        """Return a row with what a short fit took."""
        trainer = replace(self.settled, **row.choice.fields())
        times = timed_fit(trainer, self.data, self.facts, TRIAL_ITERATIONS, self.run)
        return with_measured(row, times.clock)

    def _others(self, formulas: Formulas, first: Choice) -> Iterator[Estimate]:
        """Yield the predictions of what would be another algorithm."""
        local = replace(first, engine=SHUFFLE, strategy=USUAL, mesh=(), micro_batches=0, own=False)
        batch = 4 * self.settled.batch_size
        larger = replace(formulas, facts=replace(formulas.facts, batch_size=batch))
        ways = [(larger, replace(first, more=(("batch_size", batch),)))]
        if first.replicas > 1:
            ways.insert(0, (formulas, replace(local, more=(("local_steps", 8),))))
        for how, choice in ways:
            with contextlib.suppress(UserError):
                replace(self.settled, **choice.fields())
                estimate = how.estimate(choice)
                if estimate.seconds is not None:
                    yield estimate

    def _refusal(self, choice: Choice, profile: Profile, here: bool) -> str:
        """Return why a choice cannot run, or an empty string: the sentence of the trainer, of the
        session's slots if it has them (``here``), or of a strategy."""
        try:
            trainer = replace(self.settled, **choice.fields())
            if choice.engine == GANG and here:
                _check_slots(trainer, self.facts)
        except UserError as error:
            return _line(error)
        if choice.engine != GANG:
            return ""
        key = choice.strategy, choice.mesh, choice.split
        if key not in self.refusals:
            try:
                self._check_strategy(trainer, choice.replicas, profile)
                self.refusals[key] = ""
            except UserError as error:
                self.refusals[key] = _line(error)
        return self.refusals[key]

    def _check_strategy(self, trainer: TrainerSpec, replicas: int, profile: Profile) -> None:
        model = self.model
        check_mesh(trainer, model, replicas)
        parallel = parallel_of(trainer.parts, trainer.mesh, replicas)
        for name, parameter in model.module.named_parameters():
            if parameter.requires_grad and name not in profile.without_gradient:
                parameter.grad = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        try:
            for part in parallel.parts.values():
                part.check_model(model.module, model.layout, model.optimizer, model.recipe.options)
                part.check_rows(model.module, self.fields)
            parallel.planned(model.module, self.inputs, model.recipe.options)
        finally:
            model.module.zero_grad()


def _check_slots(trainer: TrainerSpec, facts: SessionFacts) -> None:
    assert trainer.number_of_replicas is not None
    profile, least = trainer.resource_profile, trainer.min_ranks
    check_slots(facts.context, trainer.number_of_replicas, 0.0, profile, min_slots=least)


def _first(samples: SampleSet) -> list[Rows]:
    """Return the first rows of samples, of every field."""
    handle = next(handle for handle in samples.handles if handle.num_rows)
    try:
        return open_partition(handle).gather(np.arange(min(ROWS, handle.num_rows)))
    except (OSError, UserError):  # they lie on another node
        return samples.more or samples.preview


def _keeps_statistics(trainer: TrainerSpec, model: PreparedModel) -> bool:
    """Return whether replicas have statistics of their own rows, so that their number matters."""
    norms = torch.nn.modules.batchnorm._BatchNorm
    return not trainer.sync_batchnorm and any(
        isinstance(module, norms) and module.training for module in model.module.modules()
    )


def _elsewhere(cluster: Cluster, profile: Profile, probe: Probe) -> tuple[Profile, Probe]:
    """Return profile and probe for a cluster that is not here."""
    if cluster.gpus and cluster.speed is None and profile.device == "cpu":
        raise ParameterError(
            "Cluster(gpus=...) without speed=: this machine has no GPU, so nothing is known of their "
            "speed. Give speed=, how many times as fast as a slot here one of them computes."
        )
    quiet = replace(profile, line=replace(profile.line, spread=cluster.spread), busy=1.0)
    return scaled(quiet, 1.0 / (cluster.speed or 1.0)), cluster.probe(dict(probe.units))


def whole_nodes(
    cluster: Cluster,
    facts: Facts,
    here: tuple[Profile, Probe],
    engines: Sequence[str],
    seconds: float,
) -> Iterator[str]:
    """Yield a line if one replica a node, of all its cores, takes less than the ``seconds`` planned."""
    if cluster.slots == 1 or cluster.gpus:
        return
    speed, memory = (cluster.speed or 1.0) * cluster.slots, cluster.memory * cluster.slots
    whole = Formulas(
        facts, *_elsewhere(replace(cluster, slots=1, speed=speed, memory=memory), *here)
    )
    found = [whole.estimate(Choice(engine, cluster.nodes)) for engine in engines]
    best = min(found, key=lambda estimate: estimate.milliseconds)
    if best.milliseconds < SAVES * 1e3 * seconds:
        yield (
            f"with spark.task.cpus={cluster.slots} and replicas={cluster.nodes}, where torch's threads "
            f"share the work evenly: {best.choice.engine}, {best.milliseconds:.3g} ms"
        )


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def decided(data: Any, request: FitRequest, facts: SessionFacts, run: Run) -> FitRequest:
    """Return the request with a trainer whose fields are decided, and the record of the plan.

    A checkpoint's record counts first. Nothing is measured for a single choice or a short fit.
    """
    trainer: Any = request.trainer
    later = decided_later(trainer)
    if not later or facts.context is None:
        return request
    settled = trainer.settled()
    record, replicas = _record_of(request)
    if record is not None:
        try:
            kept = _as_recorded(settled, record, later, facts)
            return replace(request, trainer=kept, plan=record)
        except (UserError, KeyError, TypeError, ValueError) as error:
            text = "the plan of the checkpoint cannot be kept, and is made anew: %s."
            logger.warning(text, _line(error))
    settled = replace(settled, replicas=settled.replicas or replicas)
    if settled.engine == "local" or (later == ["strategy"] and settled.engine == SHUFFLE):
        return replace(request, trainer=settled)
    planner = Planner(settled, data, facts, run)
    iterations = planner.passes if request.one_pass else planner.iterations
    if iterations is not None and iterations < follow.FEW:
        short = counted(iterations, "iteration")
        log_line(f'engine="{settled.engine}": {short} are too few to measure what is faster')
        return replace(request, trainer=settled)
    engines = (SHUFFLE, GANG) if "engine" in later else (settled.engine,)
    strategies: tuple[str, ...] = PLAINNESS if "strategy" in later else ()
    if "strategy" not in later and trainer.strategy == USUAL and trainer.mesh is None:
        strategies = PLAINNESS[:2] if "engine" in later else PLAINNESS[:1]
    searched = "replicas" in later and replicas is None
    try:
        plan = planner.plan(engines, strategies, settled.replicas, searched, trials=None)
    except TrainingError as error:
        log_line(f'engine="{settled.engine}", as nothing could be measured: {_line(error)}')
        return replace(request, trainer=settled)
    first, spent = plan.rows[0], time.monotonic() - planner.began
    log_line(f"planned in {spent:.0f} s: {first.choice}; {plan.reason(first)}")
    return replace(request, trainer=plan.trainer, plan=plan.record())


def _as_recorded(
    settled: Any, record: Mapping[str, Any], later: Sequence[str], facts: SessionFacts
) -> Any:
    """Return the trainer with the recorded fields in place of those that it leaves open.

    Raises ParameterError or SessionError if this session cannot run it.
    """
    recorded = Choice.from_plain(record["fields"]).fields()
    open_fields = {*later, *(("strategy", "mesh") if {"engine", "strategy"} & {*later} else ())}
    trainer = replace(settled, **{n: value for n, value in recorded.items() if n in open_fields})
    if trainer.engine == GANG:
        _check_slots(replace(trainer, replicas=recorded["replicas"]), facts)
    return trainer


def _record_of(request: FitRequest) -> tuple[Mapping[str, Any] | None, int | None]:
    """Return the record of the run that goes on, and its replicas."""
    if request.before is not None:
        history = request.before.trained.history
        return history.plan_record or None, history.settings.get("replicas")
    if request.resume is None:
        return None, None
    found = ResumeCandidates(request.trainer.checkpoint, request.resume, request.other_data)
    return found.plan, found.replicas
