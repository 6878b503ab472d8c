"""The FlexAttention drop-in: ``torch.nn.attention.flex_attention``'s functions on flashgen's kernels, eager or under ``torch.compile``.

Example: ``from flashgen import flex_attention, create_block_mask`` in place of torch's import; nothing else changes.
Beyond torch's: works outside of torch.compile at full speed, on the CPU also backward, and gives lse and max_scores everywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks, closures, dynamo, ops
from .block_mask import BlockMask, OptionError, and_masks, create_block_mask, mask_of, or_masks
from .calls import Call, Handle
from .capture import resolve
from .errors import ShapeError, VariantError
from .kernel import _autocast
from .variant import Variant

try:  # torch 2.9 and later
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
except ImportError:

    class AuxRequest(NamedTuple):  # type: ignore[no-redef]
        """The statistics that flex_attention is asked for."""

        lse: bool = False
        max_scores: bool = False

    class AuxOutput(NamedTuple):  # type: ignore[no-redef]
        """The statistics it gives; None where not asked for."""

        lse: Tensor | None = None
        max_scores: Tensor | None = None


_ANY = Variant()  # checks of tensors alone


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any] | None = None, block_mask: Any = None, scale: float | None = None,
    enable_gqa: bool = False, return_lse: bool = False, kernel_options: Mapping[str, Any] | None = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    """Attention with a score function and a block mask, as torch's ``flex_attention``.

    query ``(B, Hq, L, E)``, key ``(B or 1, Hkv, S, E)``, value ``(B or 1, Hkv, S, Ev)`` -> ``(B, Hq, L, Ev)`` in query's dtype.
    score_mod ``f(score, b, h, q_idx, kv_idx) -> score``. block_mask: of ``flashgen.create_block_mask``, or torch's BlockMask. scale: default E ** -0.5.
    return_lse: ``(out, lse)``. return_aux=AuxRequest(lse, max_scores): ``(out, AuxOutput)``; both ``(B, Hq, L)``, float32, natural log.
    A row without a visible key: out 0, lse -inf. key and value of a narrower dtype are converted to query's. kernel_options are ignored.
    Raises ShapeError (a ValueError), DtypeError, DeviceError, VariantError before any launch.
    """
    if kernel_options:
        _warn_options(tuple(sorted(kernel_options)))
    if return_lse and return_aux is not None:
        raise OptionError("return_lse and return_aux are both given: use return_aux=AuxRequest(lse=True) alone.")
    q, k, v = _checked(query, key, value, enable_gqa)
    if block_mask is not None:
        _check_block_mask(block_mask, q, k)
    mask = None if block_mask is None else mask_of(block_mask)
    want_max = return_aux is not None and bool(return_aux.max_scores)
    form: str
    if torch.compiler.is_compiling():
        trace = dynamo.inlined(score_mod, mask)
        given: dict[str, Tensor] = {}
        form = trace.form
    else:
        trace, given = closures.traced(score_mod, mask)  # type: ignore[assignment]
        form = trace.form.text  # type: ignore[attr-defined]
    captures = resolve(tuple(trace.captures), given, q.device)
    sizes = {"B": q.shape[0], "H": q.shape[1], "Q": q.shape[2], "K": k.shape[2]}
    checks.captures(trace.captures, captures, sizes, q.device)
    checks.spanned(trace.spanned, captures, sizes)
    factor = float(q.shape[-1]) ** -0.5 if scale is None else scale
    call = Call(q, k, v, None, None, None, None, captures, list(trace.floats), list(trace.ints), factor, q.shape[2], k.shape[2])
    deterministic = torch.are_deterministic_algorithms_enabled()
    out, lse, top = ops.attend(call, trace.score_slots, lambda learned: _handle(form, want_max, learned), deterministic)
    if return_aux is not None:
        return out, AuxOutput(lse if return_aux.lse else None, top if want_max else None)
    return (out, lse) if return_lse else out


@dynamo.constant
def _handle(form: str, max_scores: bool, learned: bool) -> str:
    return _handle_text(form, max_scores, learned)


@lru_cache(maxsize=1024)
def _handle_text(form: str, max_scores: bool, learned: bool) -> str:
    return Handle(form, "dense", True, max_scores, learned).text


_warned: set[str] = set()


@dynamo.constant
def _warn_options(names: tuple[str, ...]) -> None:
    if not _warned:
        _warned.add("kernel_options")
        warnings.warn(f"kernel_options ({', '.join(names)}) mean nothing to flashgen and are ignored: its plans are chosen per problem.", stacklevel=3)


def _checked(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's function refuses; autocast, narrower keys and values, and keys of one batch item made as the kernels take them."""
    for name, t in (("query", q), ("key", k), ("value", v)):
        if not isinstance(t, Tensor):
            raise VariantError(f"{name} is a {type(t).__name__}: torch tensors are wanted.")
    q, k, v = _autocast(q, k, v)
    k, v = (t.to(q.dtype) if t.is_floating_point() and q.is_floating_point() and t.element_size() < q.element_size() else t for t in (k, v))
    kind = q.device.type
    if kind not in checks.SUPPORTED:
        raise checks.DeviceError(f"query is on {q.device}: CPU and CUDA tensors are supported.")
    checks.tensors(_ANY, kind, {"q": q, "k": k, "v": v}, 4, "(batch, heads, length, head_dim)")
    if not enable_gqa and q.shape[1] != k.shape[1]:
        raise ShapeError(f"query has {q.shape[1]} heads and key {k.shape[1]}: pass enable_gqa=True for grouped heads.")
    checks.dense(q, k, v)
    if k.shape[0] != q.shape[0]:
        k, v = k.expand(q.shape[0], -1, -1, -1), v.expand(q.shape[0], -1, -1, -1)
    return q, k, v


def _check_block_mask(block_mask: Any, q: Tensor, k: Tensor) -> None:
    if not hasattr(block_mask, "mask_mod") or not hasattr(block_mask, "seq_lengths"):
        raise VariantError(f"block_mask is a {type(block_mask).__name__}: use flashgen.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN), or torch's.")
    shape, lengths = tuple(block_mask.shape), (q.shape[2], k.shape[2])
    if tuple(shape[-2:]) != lengths:
        raise ShapeError(
            f"block_mask has shape {shape}, the tensors have lengths {lengths}: create one for these lengths, or crop it to its upper left corner "
            f"with block_mask._adjust{lengths}."
        )
    batch, heads = (1, 1, *shape)[-4:-2]
    for name, n, full in (("batch size", batch, q.shape[0]), ("heads", heads, q.shape[1])):
        if n not in (1, full):
            raise ShapeError(f"block_mask has shape {shape}, query {tuple(q.shape)}: the mask's {name} must be 1 or {full}.")
    lists = getattr(block_mask, "kv_num_blocks", None)
    if lists is not None and lists.device != q.device:
        raise checks.DeviceError(f"block_mask is on {lists.device}, query on {q.device}: use block_mask.to({str(q.device)!r}).")


__all__ = ["AuxOutput", "AuxRequest", "BlockMask", "and_masks", "create_block_mask", "flex_attention", "or_masks"]
