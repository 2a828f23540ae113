"""The figures of an iteration by name, as the trackers show them."""

from __future__ import annotations

from collections.abc import Iterator

from sparkdl.loop.state import TrainState


def scalars(before: TrainState, state: TrainState) -> Iterator[tuple[str, float]]:
    """What to show of an iteration; ``before`` is the state that was shown last."""
    yield "loss", state.loss
    several = len(state.learning_rates) > 1
    for i, rate in enumerate(state.learning_rates):
        yield (f"learning_rate/{i}" if several else "learning_rate"), rate
    seconds = state.seconds - before.seconds
    if seconds > 0:
        yield "samples_per_second", (state.samples - before.samples) / seconds
    if state.gradient_norm is not None:
        yield "gradient_norm", state.gradient_norm
    yield "loss_scale", state.loss_scale
    if state.bytes_sent:
        yield "bytes_sent", state.bytes_sent
    for activity, taken in state.timings.items():
        yield f"timings/{activity}", taken
