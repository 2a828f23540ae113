"""The engines by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sparkdl.consistency.asynchronous import Asynchronous
from sparkdl.engines.delivery import EngineInputs
from sparkdl.engines.local.engine import local_engine
from sparkdl.engines.recovery import RecoveringEngine
from sparkdl.engines.shuffle.engine import ShuffleEngine
from sparkdl.engines.shuffle.groups import GroupEngine
from sparkdl.loop.engine import TrainingEngine


def build_engine(name: str, inputs: EngineInputs) -> TrainingEngine:
    """Build the engine called ``name``, which has no state yet.

    Its state is set by :meth:`sparkdl.loop.engine.Engine.load`.
    """
    return ENGINES[name](inputs)


def _local(inputs: EngineInputs) -> TrainingEngine:
    return local_engine(
        inputs.samples,
        inputs.run,
        inputs.payload,
        inputs.batch_size,
        inputs.validation,
        inputs.consistency,
        inputs.recorded,
    )


def _shuffle(inputs: EngineInputs) -> TrainingEngine:
    in_groups = isinstance(inputs.consistency, Asynchronous)
    engine = GroupEngine(inputs) if in_groups else ShuffleEngine(inputs)
    return RecoveringEngine(engine, inputs.snapshot_seconds)


def _gang(inputs: EngineInputs) -> TrainingEngine:
    from sparkdl.engines.gang.engine import GangEngine  # imports what other engines do not need

    return RecoveringEngine(GangEngine(inputs), inputs.snapshot_seconds)


ENGINES: Mapping[str, Callable[[EngineInputs], TrainingEngine]] = {
    "shuffle": _shuffle,
    "gang": _gang,
    "local": _local,
}
