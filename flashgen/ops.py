"""Torch operators and autograd: one family of operators without autograd formulas under an old-style autograd.Function.

A string names the kernel in the operators' arguments: a Handle's JSON, resolvable in any process. In eager mode the Function calls
the launcher directly; under torch.compile, functorch or a dispatch mode it goes through the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import checks
from .calls import Backward, Call, keeps_low, output_like, parse_handle, statistics_of
from .errors import VariantError
from .passes import grad_dtype
from .runs import run_backward, run_forward

_COMMON = (
    "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? seqlens_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor[] captures, "
    "float[] floats, SymInt[] ints, float scale, SymInt max_q, SymInt max_k, Tensor? seed, float dropout_p"
)
FIELDS = len(Call._fields)  # arguments that both operators begin with
_library = torch.library.Library("flashgen", "DEF")
_library.define(f"forward(str handle, {_COMMON}) -> (Tensor, Tensor, Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    f"backward(str handle, {_COMMON}, Tensor dout, Tensor? dlse, Tensor out, Tensor out_low, Tensor lse, bool[] wanted, int[] slots, "
    "bool deterministic) -> (Tensor, Tensor, Tensor, Tensor, Tensor[])",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _values_checked(c: Call) -> Call:
    """What a call under torch.compile could not read when it was traced."""
    if c.seqlens_k is not None and checks.readable(c.seqlens_k):
        checks.used_lengths(c.seqlens_k, c.k.shape[2])
    for name, cu, t, most in (("q", c.cu_seqlens_q, c.q, c.max_q), ("k", c.cu_seqlens_k, c.k, c.max_k)):
        if cu is not None and checks.readable(cu):
            checks.offsets(f"cu_seqlens_{name}", cu, t.shape[0])
            checks.longest(f"max_seqlen_{name}", cu, most)
    return c


for _dispatch in ("CPU", "CUDA"):
    _library.impl("forward", lambda handle, *a: run_forward(handle, _values_checked(Call(*a))), _dispatch)
    _library.impl("backward", lambda handle, *a: run_backward(handle, Call(*a[:FIELDS]), Backward(*a[FIELDS:])), _dispatch)


def _fake_forward(handle: str, *a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    c, parsed = Call(*a), parse_handle(handle)[0]
    q = c.q if c.q.stride(-1) == 1 else c.q.contiguous()
    stat = statistics_of(q)
    out = output_like(q, c.v.shape[-1], q.dtype)
    low = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device) if keeps_low(parsed, q) else out.new_empty(0)
    return out, stat, torch.empty_like(stat) if parsed.max_scores else stat.new_empty(0), low


def _fake_backward(handle: str, *a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    c, b = Call(*a[:FIELDS]), Backward(*a[FIELDS:])
    rows = [t if t.stride(-1) == 1 else t.contiguous() for t in (c.q, c.k, c.v)]
    dq, dk, dv = (output_like(t, t.shape[-1], t.dtype) if w else t.new_empty(0) for t, w in zip(rows, b.wanted))
    return dq, dk, dv, torch.empty_like(b.lse), [b.lse.new_empty(c.captures[n].shape, dtype=grad_dtype(b.lse)) for n in b.slots]


torch.library.register_fake("flashgen::forward", _fake_forward, lib=_library)
torch.library.register_fake("flashgen::backward", _fake_backward, lib=_library)


def direct(*tensors: Tensor | None) -> bool:
    """Eager, plain tensors: the operators' dispatch can be skipped."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack()) and all(
        t is None or type(t) in (Tensor, torch.nn.Parameter) for t in tensors
    )


def forward(text: str, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Without autograd: the launcher in eager mode, else the operator."""
    return run_forward(text, call) if direct(call.q, call.k, call.v) else torch.ops.flashgen.forward(text, *call)


def backward(text: str, call: Call, b: Backward) -> Any:
    return run_backward(text, call, b) if direct(call.q, b.dout) else torch.ops.flashgen.backward(text, *call, *b)


def refuse_transforms(tensors: list[Tensor]) -> None:
    """Forward-mode derivatives and torch.func's transforms would get lost at a kernel, or fail deep inside torch."""
    wrapped = torch._C._are_functorch_transforms_active() and any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)
    if wrapped or any(torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors):  # the latter by torch.autograd.grad(is_grads_batched=True)
        raise VariantError(
            "torch.func transforms (vmap, grad, jvp ...) of attention are not supported: fold a mapped dimension into the batch, and differentiate "
            "with torch.autograd.grad, or transform flashgen.reference.reference."
        )
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise VariantError("forward-mode derivatives of attention are not supported: use torch.autograd.grad, or flashgen.reference.reference.")


class Once(torch.autograd.Function):
    """Ties a gradient to all it depends on, so that a second derivative raises flashgen's own error rather than going missing."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *depends: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise VariantError("a second derivative of attention is not supported: take one derivative only, or differentiate flashgen.reference.reference twice.")


BEFORE_CAPTURES = 11  # arguments of Attention


class Attention(torch.autograd.Function):
    """forward(q, k, v, sink, handle, backward options, numbers ..., captures) -> out, lse, max_scores."""

    @staticmethod
    def forward(
        ctx: Any, text: str, options: tuple, numbers: tuple, q: Tensor, k: Tensor, v: Tensor, sink: Any, seqlens_k: Any, cu_q: Any, cu_k: Any, seed: Any,
        *captures: Tensor,
    ) -> Any:  # fmt: skip
        floats, ints, scale, max_q, max_k, dropout_p = numbers
        call = Call(q, k, v, sink, seqlens_k, cu_q, cu_k, list(captures), list(floats), list(ints), scale, max_q, max_k, seed, dropout_p)
        out, lse, top, low = forward(text, call)
        ctx.save_for_backward(q, k, v, sink, seqlens_k, cu_q, cu_k, seed, out, low, lse, *captures)
        ctx.text, ctx.options, ctx.numbers = text, options, numbers
        ctx.mark_non_differentiable(top)
        ctx.set_materialize_grads(False)
        return out, lse, top

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> Any:
        q, k, v, sink, seqlens_k, cu_q, cu_k, seed, out, low, lse, *captures = ctx.saved_tensors
        if not torch.compiler.is_compiling():
            refuse_transforms([t for t in (dout, dlse) if t is not None])
        if dout is None and dlse is None:
            return (None,) * (BEFORE_CAPTURES + len(captures))
        floats, ints, scale, max_q, max_k, dropout_p = ctx.numbers
        deterministic, score_slots = ctx.options
        needs = ctx.needs_input_grad
        slots = [n for n in score_slots if needs[BEFORE_CAPTURES + n]]
        call = Call(q, k, v, sink, seqlens_k, cu_q, cu_k, captures, list(floats), list(ints), scale, max_q, max_k, seed, dropout_p)
        if dout is None:
            dout = torch.zeros_like(out)
        wanted = [bool(needs[3]), bool(needs[4]), bool(needs[5])]
        dq, dk, dv, delta, grads = backward(ctx.text, call, Backward(dout, dlse, out, low, lse, wanted, slots, deterministic))
        dsink = None
        if sink is not None and needs[6]:
            # the sink's column of P, exp(sink - lse), has no value row: its dS is -P * delta, where delta already holds -dlse
            logit = sink.detach().to(lse.dtype).view(-1, 1)
            p = torch.where(torch.isneginf(lse), torch.zeros_like(lse), torch.exp(logit - lse))
            rows = -(p * delta)
            dsink = (rows.sum((0, 2)) if lse.dim() == 3 else rows.sum(1)).to(sink.dtype)
        found: list[Tensor | None] = [dq if needs[3] else None, dk if needs[4] else None, dv if needs[5] else None, dsink, None, None, None, None]
        per_slot: list[Tensor | None] = [None] * len(captures)
        for n, g in zip(slots, grads):
            per_slot[n] = g.reshape(captures[n].shape).to(captures[n].dtype) if captures[n].numel() else torch.zeros_like(captures[n])
        result = [*found, *per_slot]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            result = [None if g is None else Once.apply(g, dout, dlse, q, k, v, sink, *captures) for g in result]
        return (None, None, None, *result)


def attend(call: Call, slots: tuple[int, ...], handle: Callable[[bool], str], deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, max_scores of one call, differentiable. ``slots`` are the captures through which a gradient of the score can flow;
    ``handle`` names the kernel, given whether it must keep what rounding left of the output, which gradients of captures need."""
    differentiable = [call.q, call.k, call.v, *(call.captures[n] for n in slots)]
    if call.sink is not None:
        differentiable.append(call.sink)
    if not torch.compiler.is_compiling():
        refuse_transforms(differentiable)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in differentiable)):
        return forward(handle(False), call)[:3]
    learned = any(call.captures[n].requires_grad for n in slots)
    numbers = (tuple(call.floats), tuple(call.ints), call.scale, call.max_q, call.max_k, call.dropout_p)
    captures = [t if n in slots else t.detach() for n, t in enumerate(call.captures)]
    tensors = [*call[:7], call.seed, *captures]
    return Attention.apply(handle(learned), (deterministic, slots), numbers, *(_distinct(tensors) if torch.compiler.is_compiling() else tensors))


def _distinct(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """A view in place of a tensor that came before (``kernel(q, k, k)``): Dynamo refuses an autograd.Function that is given one twice."""
    found: list[Tensor | None] = []
    for t in tensors:
        found.append(t.view_as(t) if t is not None and any(t is other for other in found) else t)
    return found
