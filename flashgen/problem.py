"""Problem: the static facts of one call, those that decide the emitted text.

Static: dtypes, head dims, heads per kv head, layout, pass, outputs wanted, alignment, dropout, sink, determinism, sign of scale, size class.
Dynamic (kernel arguments): batch, heads, lengths, strides, scale and the captured numbers that are added, multiplied or compared.
Example: ``Problem(dtype="bfloat16", head_dim_qk=128, head_dim_v=128, group=4, which="forward")``.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # name -> bytes


@dataclass(frozen=True)
class Problem:
    """Static facts of a call; equal Problems share one kernel per Form, plan and target."""

    dtype: str  # of q, k, v and out: a key of DTYPES
    head_dim_qk: int
    head_dim_v: int
    group: int = 1  # query heads per kv head
    which: str = "forward"  # "forward" | "backward"
    layout: str = "dense"  # "dense" | "varlen"
    lse: bool = True  # forward: store the log-sum-exp
    out_low: bool = False  # 16-bit inputs with learned captures: what rounding out left over is kept too, so that delta is exact to float32
    max_scores: bool = False  # forward: store the largest visible score of each row
    sink: bool = False
    dropout: bool = False
    seqlens_k: bool = False  # dense: lengths in use per batch item are given
    deterministic: bool = False  # backward: bitwise repeatable
    scale_sign: int = 1  # -1, 0, 1
    aligned: bool = True  # every row of q, k, v, out (and their gradients) starts on 16 bytes, and no two rows of a head are one
    dq: bool = True  # backward: gradients wanted
    dk: bool = True
    dv: bool = True
    dlse: bool = False  # backward: a gradient of lse comes in
    capture_grads: tuple[int, ...] = ()  # backward: capture slots whose gradient is wanted
    size: str = "long"  # "few" | "short" | "long": size class, see plan.size_class

    @property
    def dtype_bytes(self) -> int:
        return DTYPES[self.dtype]

    @property
    def real(self) -> str:
        """C type of scores, statistics and captured floats: float, double for float64 inputs."""
        return "double" if self.dtype == "float64" else "float"
