"""The loss scale of fp16 training, as ``torch.amp.GradScaler`` moves it (Micikevicius et al., 2018).

fp16 gradients underflow below 6e-8. The loss is multiplied by a large power of two and the gradients
divided by it again; where one overflows on any replica, nobody updates and the scale is halved.
"""

from __future__ import annotations

FIRST_SCALE = 2.0**16
GROWTH_ITERATIONS = 2000


def next_scale(scale: float, age: int, skipped: bool) -> tuple[float, int]:
    """The scale of the next iteration and its age: halved after an overflow, doubled after 2,000
    iterations without one."""
    if skipped:
        return max(1.0, scale / 2), 0
    if age + 1 >= GROWTH_ITERATIONS:
        return scale * 2, 0
    return scale, age + 1
