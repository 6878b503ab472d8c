"""Peers: other implementations of the same attention, as callables of q, k, v.

Case -> {name: callable}. Example: ``peers(case, "cuda")["sdpa_flash"](q, k, v)``. A peer that is not installed or has no such variant is left out; one
that fails on a case is reported with its error.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashgen

WINDOW = 1024  # keys of the window case


@dataclass(frozen=True)
class Case:
    """One cell of a benchmark. ``variant`` is "full", "causal", "softcap" (causal, 30), "alibi" (causal) or "window" (causal, WINDOW keys)."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    dtype: str
    variant: str = "full"

    @property
    def name(self) -> str:
        return f"B{self.batch} H{self.heads}/{self.kv_heads} N{self.length} D{self.head_dim} {self.dtype} {self.variant}"

    def bytes(self) -> float:
        """Of a forward: q, k, v read once and the output written once."""
        return 2.0 * self.batch * (self.heads + self.kv_heads) * self.length * self.head_dim * getattr(torch, self.dtype).itemsize

    def flops(self) -> float:
        """Of a forward: multiply-adds on exact (query, key) pairs, counted as 2."""
        n = self.length
        match self.variant:
            case "full":
                pairs = n * n
            case "window":
                pairs = sum(min(i + 1, WINDOW) for i in range(n))
            case _:
                pairs = n * (n + 1) // 2
        return 4.0 * self.batch * self.heads * pairs * self.head_dim


def make_variant(case: Case) -> flashgen.Variant:
    match case.variant:
        case "full":
            return flashgen.Variant(head_dim=case.head_dim)
        case "causal":
            return flashgen.Variant(head_dim=case.head_dim, mask=flashgen.causal)
        case "softcap":
            return flashgen.Variant(head_dim=case.head_dim, mask=flashgen.causal, score=flashgen.softcap(30.0))
        case "alibi":
            return flashgen.Variant(head_dim=case.head_dim, mask=flashgen.causal, score=flashgen.alibi())
        case "window":
            return flashgen.Variant(head_dim=case.head_dim, mask=flashgen.causal & flashgen.sliding_window(WINDOW - 1, 0))
    raise flashgen.VariantError(f"variant={case.variant!r}: full, causal, softcap, alibi or window.")


def _sdpa(case: Case, backend: SDPBackend | None) -> Callable[..., Any]:
    call = functools.partial(scaled_dot_product_attention, is_causal=case.variant == "causal", enable_gqa=case.heads != case.kv_heads)
    if backend is None:
        return call

    def forced(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return call(q, k, v)

    return forced


MATH_LENGTH = 4096  # beyond it the peer that makes the whole matrix of scores is left out


def _flex(case: Case) -> Callable[..., Any]:
    """torch's FlexAttention, compiled once per process and shape."""
    from torch.nn.attention import flex_attention as flex

    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / case.heads) for h in range(case.heads)], device="cuda")
    scores = {
        "softcap": lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0),
        "alibi": lambda s, b, h, i, j: s - slopes[h] * (i - j),
    }
    masks = {"full": None, "window": lambda b, h, i, j: (i >= j) & (i - j < WINDOW)}
    mask = masks.get(case.variant, lambda b, h, i, j: i >= j)
    blocks = None if mask is None else flex.create_block_mask(mask, None, None, case.length, case.length, device="cuda")
    return functools.partial(_compiled_flex(), score_mod=scores.get(case.variant), block_mask=blocks, enable_gqa=case.heads != case.kv_heads)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


FLASH_MODULES = {"fa2": "flash_attn", "fa3": "flash_attn_interface", "fa4": "flash_attn.cute.interface"}


def _flash_attention(case: Case, module: str) -> Callable[..., Any] | None:
    """Dao-AILab's packages, where they are installed; they take ``(batch, length, heads, head_dim)``."""
    try:
        function = importlib.import_module(module).flash_attn_func
    except (ImportError, AttributeError):
        return None
    options: dict[str, Any] = {"causal": case.variant != "full"}
    options |= {"softcap": 30.0} if case.variant == "softcap" else {}
    options |= {"window_size": (WINDOW - 1, 0)} if case.variant == "window" else {}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = function(*(t.transpose(1, 2) for t in (q, k, v)), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


def peers(case: Case, device: str, family: str | None = None, only: Sequence[str] = ()) -> dict[str, Callable[..., Any]]:
    """This project first, then whoever can run the case (``only``: those of these names)."""
    makers: dict[str, Callable[[], Callable[..., Any] | None]] = {}
    if case.variant in ("full", "causal"):
        if device == "cuda":
            makers |= {"sdpa_flash": lambda: _sdpa(case, SDPBackend.FLASH_ATTENTION), "sdpa_cudnn": lambda: _sdpa(case, SDPBackend.CUDNN_ATTENTION)}
            makers |= {"sdpa_math": lambda: _sdpa(case, SDPBackend.MATH)} if case.length <= MATH_LENGTH else {}
        else:
            makers["sdpa"] = lambda: _sdpa(case, None)
    if device == "cuda":
        makers["flex"] = lambda: _flex(case)
        if case.variant != "alibi":
            makers |= {name: functools.partial(_flash_attention, case, module) for name, module in FLASH_MODULES.items()}
    found: dict[str, Callable[..., Any]] = {"flashgen": flashgen.compile(make_variant(case), family=family)}
    made = {name: _made(make) for name, make in makers.items() if not only or name in only}
    return found | {name: call for name, call in made.items() if call is not None}


def _made(make: Callable[[], Callable[..., Any] | None]) -> Callable[..., Any] | None:
    """What ``make`` returns; where it fails, a call that fails likewise, to be reported with the case."""
    try:
        return make()
    except Exception as error:
        failure = error

        def fail(*_: Any) -> None:
            raise failure

        return fail
