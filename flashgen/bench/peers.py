"""Peers: other implementations of the same attention, as callables of q, k, v.

Case -> {name: callable}. Example: ``peers(case, "cuda")["sdpa_flash"](q, k, v)``. A peer that cannot run a case is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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


def peers(case: Case, device: str, family: str | None = None) -> dict[str, Callable[..., Any]]:
    """This project first, then whoever can run the case."""
    found: dict[str, Callable[..., Any]] = {"flashgen": flashgen.compile(make_variant(case), family=family)}
    if case.variant in ("full", "causal"):
        if device == "cuda":
            found |= {"sdpa_flash": _sdpa(case, SDPBackend.FLASH_ATTENTION), "sdpa_cudnn": _sdpa(case, SDPBackend.CUDNN_ATTENTION)}
        else:
            found["sdpa"] = _sdpa(case, None)
    return found
