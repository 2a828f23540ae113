"""BigDL's figures, for comparison: data only.

:data:`MEASURED`: BigDL dllib 2.4.0 on the 2-core reference machine: Spark 3.1.3, Java 11, its MKL
engine, ``local[2]`` (one JVM, two replicas of one MKL thread each), 16,384 cached random samples, SGD,
gradients compressed to fp16. Milliseconds an iteration, medians: "early" after 80 to 250 iterations,
"warm" after 450 to 1,500. "computing" is BigDL's own timer of forward and backward.

:data:`PUBLISHED`: what its authors report (Dai et al., "BigDL: A Distributed Deep Learning Framework
for Big Data", SoCC 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

EARLY = (80, 250)
WARM = (450, 1500)
"""From which iteration to which, of a fresh JVM."""


@dataclass(frozen=True)
class Figures:
    """Milliseconds of an iteration; records a second are of the warm figure."""

    early: float
    warm: float
    computing: float
    records_per_second: int
    local_1_warm: float | None


MEASURED = {
    ("mlp", 128): Figures(36.3, 26.0, 6.7, 4_930, 27.5),
    ("mlp", 256): Figures(42.8, 34.0, 10.9, 7_540, 35.2),
    ("mlp", 1024): Figures(69.5, 53.3, 25.4, 19_200, 72.8),
    ("lenet", 128): Figures(42.3, 34.6, 14.7, 3_700, 38.5),
    ("lenet", 256): Figures(53.1, 43.2, 23.1, 5_930, None),
    ("lenet", 1024): Figures(121.0, 119.0, 85.8, 8_630, None),
}

PUBLISHED = (
    ("Inception-v1, throughput", "nearly linear to 128 nodes"),
    ("Inception-v1, from 16 to 96 nodes", "5.3 times the throughput: 88 % of 6 times"),
    ("launching tasks", "above 10 % of the computing near 500 tasks an iteration"),
    ("parameter synchronization", "below 7 % of the computing at 32 nodes"),
)
