"""Tuned: how good the tiler's first choice is, over a list of cases; ``python -m flashgen tune --preset gpu``.

Cases, device -> a table of the untuned and the tuned time of each pass, from ``flashgen.autotune``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import flashgen

from ..measured import Measured
from .cases import Case
from .record import Kept, environment

GOOD = 1.05  # the tiler's choice is good where it is at most this much slower than the tuned best


def run(cases: Iterable[Case], device: str, family: str | None = None, path: Path | None = None) -> dict[str, Any]:
    """Tune every case, forward and backward, printing a line for each pass; the rows come with the environment and the number of good choices.

    path: where to keep them, see ``record.Kept``.
    """
    kept = Kept(path)
    result: dict[str, Any] = {"environment": environment(device), "family": family, "rows": [], "good": 0}
    rows: list[dict[str, Any]] = result["rows"]
    for case in cases:
        shapes = [(case.batch, heads, case.length, case.head_dim) for heads in (case.heads, case.kv_heads, case.kv_heads)]
        q, k, v = (torch.randn(shape, device=device).to(getattr(torch, case.dtype)) for shape in shapes)
        report = flashgen.autotune(flashgen.compile(case.made(device).variant, family=family), q, k, v)
        for measured in report.passes:
            first, best = measured.rows[0].hot_ms, measured.rows[measured.chosen].hot_ms
            row = {"case": case.name, "what": measured.which, "tiler_ms": first, "tuned_ms": best, "ratio": round(measured.gain, 4)}
            rows.append(row | {"plans": len(measured.rows), "seconds": measured.seconds, "changes": _changes(measured)})
            times = f"tiler {first:9.4f} ms  tuned {best:9.4f} ms  {measured.gain:.3f}x"
            print(f"{case.name:48s} {measured.which:9s} {times}  {measured.seconds:5.1f} s", flush=True)
        result["good"] = sum(row["ratio"] <= GOOD for row in rows)
        kept.save(result)
    kept.finish()
    print(f"The tiler's choice is within {GOOD - 1:.0%} of the tuned best in {result['good']} of {len(rows)} passes.")
    return result


def _changes(measured: Measured) -> dict[str, list[Any]]:
    """The plan fields in which the winner differs from the tiler's choice: their values there and here."""
    first, best = ({"family": row.family, **row.fields} for row in (measured.rows[0], measured.rows[measured.chosen]))
    return {name: [first.get(name), best.get(name)] for name in {**first, **best} if first.get(name) != best.get(name)}
