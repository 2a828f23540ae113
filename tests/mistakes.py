"""A helper that returns what a user is told: the message of the error that a call raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def message_of(
    error: type[Exception], call: Callable[..., object], /, *args: object, **kwargs: object
) -> str:
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    return str(caught.value)
