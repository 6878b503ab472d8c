"""Measured: the table of one tuned pass, and the rule that picks the winner from it.

Rows -> the number of the winner. Example: ``Measured.of(record).winner`` reads a recorded table back, without a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from . import records
from .plan import Plan

CLOSE = 1.02  # a plan must be faster by more than this to replace the tiler's choice


@dataclass
class Row:
    """One candidate of a pass. Times in milliseconds, None where not predicted or measured; ``verdict`` says why a candidate fell out."""

    family: str
    fields: dict[str, int]
    predicted_ms: float | None
    cool_ms: float | None = None
    hot_ms: float | None = None
    verdict: str = ""

    def plan(self, which: str) -> Plan:
        return Plan(self.family, which, tuple(sorted(self.fields.items())))


@dataclass(frozen=True)
class Measured:
    """A pass's table, the tiler's own choice first; ``chosen`` is the number of the winner."""

    which: str
    device: str
    problem: str
    shape: str
    rows: list[Row] = field(repr=False)
    chosen: int
    seconds: float

    @property
    def winner(self) -> Plan:
        return self.rows[self.chosen].plan(self.which)

    @property
    def gain(self) -> float:
        """How many times faster the winner is than the tiler's own choice, hot."""
        first, best_ms = self.rows[0].hot_ms, self.rows[self.chosen].hot_ms
        return first / best_ms if first and best_ms else 1.0

    def __str__(self) -> str:
        varying = [n for n in self.rows[0].fields if len({row.fields.get(n) for row in self.rows}) > 1]
        head = f"{self.which} on {self.device}: {self.problem}, {self.shape}; {len(self.rows)} plans in {self.seconds:.1f} s"
        cells = [["", "family", *varying, "predicted ms", "cool ms", "hot ms", ""]]
        for number, row in enumerate(self.rows):
            mark = "chosen" if number == self.chosen else "tiler's" if number == 0 else ""
            times = ["" if t is None else f"{t:.4f}" for t in (row.predicted_ms, row.cool_ms, row.hot_ms)]
            cells.append([mark, row.family, *(str(row.fields.get(n, "")) for n in varying), *times, row.verdict])
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(line[:-1], widths)) + "  " + line[-1] for line in cells]
        gain = "the tiler's choice stands" if self.chosen == 0 else f"{self.gain:.3f} times as fast as the tiler's choice"
        return "\n".join([head, *(line.rstrip() for line in table), f"{self.which}: {gain}"])

    def record(self) -> dict[str, Any]:
        return {"winner": records.plan_entry(self.winner), **asdict(self)}

    @staticmethod
    def of(record: Mapping[str, Any]) -> Measured:
        """A recorded table, as ``record`` made it."""
        values = {name: record[name] for name in ("which", "device", "problem", "shape", "chosen", "seconds")}
        return Measured(rows=[Row(**row) for row in record["rows"]], **values)


def best(rows: Sequence[Row]) -> int:
    """The number of the plan to use, from the hot times: the fastest, or the first row (the tiler's) where it is within CLOSE of that."""
    timed = {number: row.hot_ms for number, row in enumerate(rows) if row.hot_ms is not None}
    fastest = min(timed, key=lambda number: timed[number])
    return 0 if 0 in timed and timed[0] <= timed[fastest] * CLOSE else fastest
