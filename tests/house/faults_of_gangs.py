"""Deliberate faults in rooms of the gang, and in what a run goes on from: see ``faults.py``."""

from __future__ import annotations

OF_GANGS = {
    "a rank without rows adds those it keeps company with": (
        "engines/gang/strategies/ddp.py",
        "if not self._share:",
        "if self._share is None:",
        "gang/test_engine.py",
    ),
    "ranks that share shards sum half": (
        "engines/gang/strategies/fsdp.py",
        "cut.set_gradient_divide_factor(1.0)",
        "cut.set_gradient_divide_factor(2.0)",
        "gang/test_strategies.py",
    ),
    "what all parts of a layer have counts for each": (
        "engines/gang/strategies/tensor.py",
        'if build.mesh.place(rank, "tensor") != 0:',
        'if build.mesh.place(rank, "tensor") < 0:',
        "gang/test_strategies.py",
    ),
    "micro-batches of a pipeline count alike": (
        "engines/gang/strategies/pipeline.py",
        "return value * (weight * self._scale)",
        "return value * (len(part) * self._scale)",
        "gang/test_strategies.py",
    ),
    "a schedule drops the gradients of the one before": (
        "engines/gang/strategies/pipeline.py",
        "parameter.grad = gradient if more is None else gradient + more",
        "parameter.grad = gradient if more is None else more",
        "gang/test_copies.py",
    ),
    "every copy of a model adds to the norm": (
        "engines/gang/rank.py",
        "mine = squares if held.first else [0.0] * len(squares)",
        "mine = squares",
        "gang/test_copies.py",
    ),
    "a plan may change the model": (
        "engines/gang/strategies/tensor.py",
        "if not isinstance(found, torch.Tensor) or right.shape != found.shape:",
        "if not isinstance(found, torch.Tensor):",
        "gang/test_strategy_trials.py",
    ),
    "rows of a rank that keeps company are normalised with": (
        "engines/gang/model_group.py",
        "own, each = 0.0 if idle() else 1.0, input.numel() // input.shape[1]",
        "own, each = 1.0, input.numel() // input.shape[1]",
        "gang/test_batchnorm.py",
    ),
    "a checkpoint in the background has later states": (
        "engines/gang/snapshots.py",
        "functools.partial(use, n, plans[n], copied(state))",
        "functools.partial(use, n, plans[n], state)",
        "gang/test_background.py",
    ),
    "ranks build a model at once": (
        "engines/gang/model_group.py",
        "fcntl.flock(self._file, fcntl.LOCK_EX)",
        "fcntl.flock(self._file, fcntl.LOCK_SH)",
        "gang/test_turn.py",
    ),
    "a message may come twice": (
        "gang/channel.py",
        'digest.update(direction + number.to_bytes(8, "little"))',
        "digest.update(direction)",
        "gang/test_channel.py",
    ),
    "a driver's words are taken on any connection": (
        "gang/channel.py",
        "digest = hashlib.blake2b(self._nonce, key=self._key, digest_size=_DIGEST_BYTES)",
        "digest = hashlib.blake2b(key=self._key, digest_size=_DIGEST_BYTES)",
        "gang/test_channel.py",
    ),
    "a length is believed before its digest": (
        "gang/channel.py",
        "self._check(digests[:_DIGEST_BYTES], self._in.lower(), length)",
        "pass",
        "gang/test_channel.py",
    ),
    "a rank that was dropped does not come again": (
        "gang/channel.py",
        "tries = TRIES if patience is None else 1",
        "tries = 1",
        "gang/test_channel.py",
    ),
    "an earlier task of a rank counts": (
        "gang/rank_group.py",
        "known[1].task > hello.task",
        "known[1].task < hello.task",
        "gang/test_arrivals.py",
    ),
    "what is repeated begins an iteration late": (
        "engines/recovery.py",
        "for asked in self._log.since(done):",
        "for asked in self._log.since(done + 1):",
        "unit/engines/test_recovery.py",
    ),
}
"""Module, text, what is put in its place, and tests, by name."""
