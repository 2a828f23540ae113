"""The fault harness: clusters of real processes, and faults that strike in their tasks.

``cluster`` starts a Spark master and workers as processes of their own, ``hosts`` makes two hosts
of this machine. ``inject`` says what happens where; ``faulty`` is a model and an optimizer in which it
happens. The product knows nothing of all this.
"""
