"""Peers: other implementations of the same attention, as callables of q, k, v.

Case -> {name: callable}. Example: ``peers(case, "cuda")["sdpa_flash"](q, k, v)``. A peer that is not installed or has no such variant is left out; one
that fails on a case is reported with its error.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashgen

from .cases import CAP, SCORES, WINDOW, Case


def _sdpa(case: Case, backend: SDPBackend | None) -> Callable[..., Any]:
    call = functools.partial(scaled_dot_product_attention, is_causal=case.variant == "causal", enable_gqa=case.heads != case.kv_heads)
    if backend is None:
        return call

    def forced(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return call(q, k, v)

    return forced


PLAIN = "plain"  # this project's own kernel of the same mask without the score function: what the function costs
MATH_LENGTH = 4096  # beyond it the peer that makes the whole matrix of scores is left out


def _flex(case: Case) -> Callable[..., Any]:
    """torch's FlexAttention, compiled once per process and shape."""
    from torch.nn.attention import flex_attention as flex

    torch._dynamo.reset()  # else the ninth variant would exceed the limit of recompilations and run uncompiled
    made = case.made("cuda")
    blocks = None if made.mask is None else flex.create_block_mask(made.mask, None, None, case.length, case.length, device="cuda")
    return functools.partial(_compiled_flex(), score_mod=made.score, block_mask=blocks, enable_gqa=case.heads != case.kv_heads)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


FLASH_MODULES = {"fa2": ("flash_attn",), "fa3": ("flash_attn_interface", "fa3_fwd_interface"), "fa4": ("flash_attn.cute.interface",)}
NAMES = ("sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_math", "flex", *FLASH_MODULES, PLAIN)
FLASH_VARIANTS = ("full", "causal", "softcap", "window")  # that those packages have


def _flash_attention(case: Case, modules: Sequence[str]) -> Callable[..., Any] | None:
    """Dao-AILab's packages, where one of these modules is installed; they take ``(batch, length, heads, head_dim)``."""
    function = next(filter(None, map(_flash_attn_func, modules)), None)
    if function is None:
        return None
    options: dict[str, Any] = {"causal": case.variant != "full"}
    options |= {"softcap": CAP} if case.variant == "softcap" else {}
    options |= {"window_size": (WINDOW - 1, 0)} if case.variant == "window" else {}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = function(*(t.transpose(1, 2) for t in (q, k, v)), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


def _flash_attn_func(module: str) -> Callable[..., Any] | None:
    try:
        return importlib.import_module(module).flash_attn_func
    except (ImportError, AttributeError):
        return None


def peers(case: Case, device: str, family: str | None = None, only: Sequence[str] = ()) -> dict[str, Callable[..., Any]]:
    """This project first, then whoever can run the case (``only``: those of these names), its own plain kernel among them."""
    makers: dict[str, Callable[[], Callable[..., Any] | None]] = {}
    if case.variant in ("full", "causal"):
        if device == "cuda":
            makers |= {"sdpa_flash": lambda: _sdpa(case, SDPBackend.FLASH_ATTENTION), "sdpa_cudnn": lambda: _sdpa(case, SDPBackend.CUDNN_ATTENTION)}
            makers |= {"sdpa_math": lambda: _sdpa(case, SDPBackend.MATH)} if case.length <= MATH_LENGTH else {}
        else:
            makers["sdpa"] = lambda: _sdpa(case, None)
    if device == "cuda":
        makers["flex"] = lambda: _flex(case)
        if case.variant in FLASH_VARIANTS:
            makers |= {name: functools.partial(_flash_attention, case, modules) for name, modules in FLASH_MODULES.items()}
    if case.variant in SCORES:
        makers[PLAIN] = lambda: flashgen.compile(case.plain.made(device).variant, family=family)
    found: dict[str, Callable[..., Any]] = {"flashgen": flashgen.compile(case.made(device).variant, family=family)}
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
