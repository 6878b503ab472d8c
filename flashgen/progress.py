"""Progress: bars of what the tuner does, on a terminal; elsewhere a line for each pass.

Example: ``with Bars("forward") as progress: progress("compiling", 3, 24)``.
"""

from __future__ import annotations

import sys
from typing import Any


class Bars:
    """tqdm's bars, one for each thing that is done; a function of (what, done, total). Where stderr is no terminal it gets one line, that tuning began."""

    def __init__(self, title: str, *, shown: bool = True) -> None:
        self.title, self.shown, self.what = title, shown, ""
        self.bar: Any = None

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def __call__(self, what: str, done: int, total: int) -> None:
        from tqdm.auto import tqdm

        if what != self.what:
            if self.bar is not None:
                self.bar.close()
            if self.shown and not self.what and not sys.stderr.isatty():
                print(f"flashgen: tuning the {self.title}, {total} plans", file=sys.stderr, flush=True)
            self.what, self.bar = what, tqdm(total=total, desc=f"{self.title}: {what}", unit="plan", disable=None if self.shown else True)
        self.bar.update(done - self.bar.n)
