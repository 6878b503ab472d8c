"""Hugging Face transformers: ``attn_implementation="flashgen"`` for every model that looks its attention up in transformers' AttentionInterface.

``import flashgen.hf`` registers one attention function and one mask function. Example::

    import flashgen.hf
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flashgen")

transformers describes a mask as a function of (batch, head, query, key), composed of causal, sliding window, chunked, packed and further parts; it is
traced like any mask function, so no matrix is made and empty tiles are skipped. Rows that see no key (left padding) give zeros; eager attention gives
them the mean of the values, which nothing reads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function
from transformers.utils import generic

from . import catalogue
from .errors import FlashgenError, VariantError
from .kernel import Kernel, compile
from .variant import Score, Variant

NAME = "flashgen"


class TracedMask(BlockMask):
    """What the mask function hands the layers of a model: the mask, and the kernels that were made with it, one per scale, soft-cap and kind of sink.

    Of torch's BlockMask it has the name alone: transformers hands on a BlockMask of four dimensions that was made ahead of a step (static caches).
    """

    shape = torch.Size((1, 1, 0, 0))

    def __init__(self, mask: Any) -> None:
        self.mask = mask
        self._kernels: dict[Any, Kernel] = {}

    def __repr__(self) -> str:
        return f"TracedMask({self.mask})"

    __str__ = __repr__

    def kernel(self, scale: float | None, softcap: float | None, sink: bool) -> Kernel:
        key = (scale, softcap, sink)
        if key not in self._kernels:
            score = None if softcap is None else catalogue.softcap(softcap)
            self._kernels[key] = compile(Variant(mask=self.mask, score=score, scale=scale, sink=sink))
        return self._kernels[key]


CAUSAL, FULL = TracedMask(catalogue.causal), TracedMask(None)  # kept, so that the steps of a generation share their kernels


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None, **_: Any,
) -> TracedMask:  # fmt: skip
    """The mask function: transformers' own, moved to the indices of this call, and the padding of a bool ``(batch, length)`` attention_mask."""
    visible = None
    if attention_mask is not None and not bool(attention_mask.all()):
        visible = attention_mask[:, kv_offset : kv_offset + kv_length]
        visible = nn.functional.pad(visible, (0, kv_length - visible.shape[1]))  # keys of a static cache that are not filled yet
    aligned = isinstance(q_offset, int) and isinstance(kv_offset, int) and q_offset + q_length == kv_offset + kv_length
    if visible is None and mask_function is causal_mask_function and aligned:
        return CAUSAL

    def moved(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = mask_function(b, h, q_idx + q_offset, kv_idx + kv_offset)
        return seen if visible is None else seen & visible[b, kv_idx]

    return TracedMask(moved)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: TracedMask | Tensor | None, scaling: float | None = None,
    dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None, position_bias: Tensor | None = None, is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function: query ``(batch, heads, length, head_dim)``, key and value with their own heads -> ``(batch, length, heads, head_dim)``.

    attention_mask: what ``mask`` made, or a dense mask ``(batch or 1, heads or 1, length, keys)`` that the user prepared, bool or additive. s_aux: sinks,
    one per head. position_bias: added to the scores, broadcastable to them.
    """
    if options.get("output_attentions"):
        raise VariantError("output_attentions=True: the weights are never stored. Load the model with attn_implementation='eager'.")
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = CAUSAL if causal and query.shape[2] > 1 else FULL
    if isinstance(attention_mask, Tensor) or position_bias is not None:
        kernel = _dense(attention_mask, position_bias, key.shape[2], scaling, softcap, s_aux is not None)
    else:
        kernel = attention_mask.kernel(scaling, softcap, s_aux is not None)
    out = kernel(query, key, value, sink=s_aux, dropout_p=dropout)
    return out.transpose(1, 2).contiguous(), None


def _dense(given: TracedMask | Tensor, position_bias: Tensor | None, keys: int, scale: float | None, softcap: float | None, sink: bool) -> Kernel:
    """A kernel with a tensor that belongs to this call or layer: a prepared mask, a bias of positions."""
    mask, scores = None, [] if softcap is None else [catalogue.softcap(softcap)]
    if position_bias is not None:
        scores.append(catalogue.bias(position_bias[..., :keys]))
    if isinstance(given, TracedMask):
        mask = given.mask
    elif given.dtype == torch.bool:
        mask = catalogue.from_dense(given[..., :keys])
    else:
        scores.append(catalogue.bias(given[..., :keys]))
    score: Score | None = None
    for part in scores:
        score = part if score is None else score >> part
    return compile(Variant(mask=mask, score=score, scale=scale, sink=sink))


def _asked_for_flash_attention(config: Any = None, requested_attention_implementation: str | None = None, version: Any = None) -> bool:
    """transformers' test, with its one mistake about us corrected."""
    name = requested_attention_implementation if config is None else config._attn_implementation
    return name != NAME and _original(config, requested_attention_implementation, version)


def register() -> None:
    """Enter both functions under NAME; importing this module does it.

    transformers takes every name with "flash" in it for Dao-AILab's package: it would look for that on its hub, or quietly take another implementation
    (gpt-oss), and refuse chunked masks. So its test is replaced, in the modules that have imported it and for those that will.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("is_flash_attention_requested") is _original:
            module.is_flash_attention_requested = _asked_for_flash_attention  # type: ignore[attr-defined]


try:
    _current = generic.is_flash_attention_requested
    _original = getattr(_current, "replaced", _current)  # this module may be loaded again
    _asked_for_flash_attention.replaced = _original  # type: ignore[attr-defined]
except AttributeError:
    raise FlashgenError(f"transformers {transformers.__version__} is too old for flashgen.hf: pip install 'transformers>=5.17'.") from None
register()
