"""Plots: the roofline of a recorded run, and predicted bytes over the length, as matplotlib figures.

Run (a dict, as in its JSON) -> Figure. Example: ``roofline(json.loads(path.read_text())).savefig("roofline.png")``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import FlashgenError
from ..kernel import Kernel

MARKERS = "os^vDPX*"


def pyplot() -> Any:
    """matplotlib's pyplot. Raises FlashgenError where that is not installed."""
    try:
        from matplotlib import pyplot as found
    except ImportError as error:
        raise FlashgenError("plots need matplotlib: pip install matplotlib.") from error
    return found


def roofline(result: Mapping[str, Any]) -> Any:
    """TFLOP/s against operations per compulsory byte, a point for each case and implementation, under the chip's two ceilings (its datasheet's, 16 bit)."""
    if "roof" not in result["environment"] or any("bytes" not in row for row in result["rows"]):
        raise FlashgenError("this run was recorded before its bytes were: measure again, python -m flashgen bench --record FILE.")
    draw = pyplot()
    roof, rows = result["environment"]["roof"], result["rows"]
    peak, gbs = roof["tflops"]["bfloat16"], roof["gbs"]
    figure, axes = draw.subplots(figsize=(7.5, 5), layout="constrained")
    names = list(dict.fromkeys(name for row in rows for name in row["tflops"]))
    for name, marker in zip(names, MARKERS * len(names)):
        for what, filled in (("forward", True), ("backward", False), ("both", False)):
            points = [(row["flops"] / row["bytes"], row["tflops"][name]) for row in rows if row["what"] == what and name in row["tflops"]]
            if points:
                colour = f"C{names.index(name)}"
                axes.plot(*zip(*points), marker, color=colour, markerfacecolor=colour if filled else "none", alpha=0.8, label=f"{name}, {what}")
    low, high = (f(row["flops"] / row["bytes"] for row in rows) for f in (min, max))
    span = [min(low, peak * 1e3 / gbs) / 2, max(high, peak * 1e3 / gbs) * 2]
    bend = peak * 1e3 / gbs
    axes.plot([span[0], bend, span[1]], [span[0] * gbs / 1e3, peak, peak], "k-", linewidth=1, label=f"{peak:.4g} TFLOP/s, {gbs:.4g} GB/s")
    axes.set(xscale="log", yscale="log", xlabel="operations per compulsory byte", ylabel="TFLOP/s", title=roof["chip"])
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3, which="both")
    return figure


def bytes_over_length(
    kernel: Kernel, lengths: Sequence[int], *, heads: int = 16, kv_heads: int = 16, head_dim: int = 128, dtype: str = "bfloat16", which: str = "forward"
) -> Any:  # fmt: skip
    """Predicted bytes of one pass over the sequence length: this plan, the FlashAttention bound, and the standard algorithm that stores its scores."""
    found = []
    for length in lengths:
        rows = [torch.empty(1, 1, length, head_dim, dtype=getattr(torch, dtype)).expand(1, h, length, head_dim) for h in (heads, kv_heads, kv_heads)]
        found.append(kernel.traffic(*rows, which=which))
    figure, axes = pyplot().subplots(figsize=(6.5, 4.5), layout="constrained")
    lines = {
        "standard algorithm, 4 N\u00b2 + 4 N d": [t.standard_bytes for t in found],
        "this plan, between memory levels": [t.plan_bytes for t in found],
        "FlashAttention bound N\u00b2 d\u00b2 / M": [t.bound_bytes for t in found],
        "compulsory, main memory": [t.compulsory_bytes for t in found],
    }
    for name, values in lines.items():
        axes.plot(lengths, values, "o-", markersize=3, label=name)
    axes.set(xscale="log", yscale="log", xlabel="sequence length N", ylabel="bytes", title=f"{which}, {dtype}, head dim {head_dim}, {heads} heads")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, which="both")
    return figure
