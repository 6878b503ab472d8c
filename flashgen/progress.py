"""Progress: bars of what the tuner does, on a terminal.

Example: ``with Bars("forward") as progress: progress("compiling", 3, 24)``.
"""

from __future__ import annotations

from typing import Any


class Bars:
    """tqdm's bars, one for each thing that is done; a function of (what, done, total). Silent where stderr is no terminal."""

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
            self.what, self.bar = what, tqdm(total=total, desc=f"{self.title}: {what}", unit="plan", disable=None if self.shown else True)
        self.bar.update(done - self.bar.n)
