"""Turns: who is timed when, so that nobody is always first after a rest, or always at the clock of the same other kernel.

Names, rounds -> an order. Example: ``list(in_turn(["a", "b"], 2)) == ["a", "b", "b", "a"]``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

Name = TypeVar("Name")


def in_turn(names: Sequence[Name], rounds: int) -> Iterator[Name]:
    """All names in each round, from another one on each time."""
    for n in range(rounds):
        first = n % max(1, len(names))
        yield from names[first:]
        yield from names[:first]


def run_for(seconds: float, run: Callable[[], Any]) -> None:
    """Again and again until the time is over; never for 0 seconds."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        run()
