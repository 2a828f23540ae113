"""The training run: trainer, loop, triggers, callbacks, history, engines."""
