"""Repeat: a plain call of shapes and strides that a kernel has taken before, straight to the launch.

signature(q, k, v) -> key of a Kernel's memo; Repeat(q, k, v) -> out. Plain means: eager tensors, and a variant without captures, sink or inputs. Every
check of such a call depends on what the signature holds, so a call seen before has passed them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import calls, ops
from .calls import Backward, Call, bound_backward, bound_forward, output_like, prepared

Maker = Callable[[Tensor], Tensor]


def signature(q: Any, k: Any, v: Any) -> tuple | None:
    """What decides the checks and the arguments of a plain call; None where torch has to see the call (modes, transforms, a cast by autocast)."""
    if torch.compiler.is_compiling() or type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
        return None
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() or forward_ad._current_level >= 0:
        return None
    device = q.device
    try:
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device.type) and not _is_cast(q, k, v):
            return None
        return (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype, device, k.device, v.device)
    except RuntimeError:  # sparse and nested tensors have no strides, some devices no autocast: the checks tell
        return None


def _is_cast(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.dtype == k.dtype == v.dtype == torch.get_autocast_dtype(q.device.type)


_generation = 0  # of what is remembered


def forget() -> None:
    """Drop what calls remember of passes they loaded, so that the next call of each looks for a tuning record again."""
    global _generation
    calls.forget()
    _generation += 1


class Repeat:
    """One shape of a kernel: the packed arguments of its forward and of each kind of backward."""

    @staticmethod
    def of(text: str, call: Call, out: Tensor) -> Repeat | None:
        """The Repeat of a call that went well; None if its tensors were copied or start off 16 bytes."""
        plain = prepared(call) is call and not any(t.data_ptr() % 16 or t.numel() == 0 for t in (call.q, call.k, call.v, out))
        return Repeat(text, call, out) if plain else None

    def __init__(self, text: str, call: Call, out: Tensor):
        self._text, self._numbers, self._generation = text, call[3:], _generation
        # Statistics are made like this one, which has their shape and dtype and no memory of its own.
        self._lse = torch.empty((), dtype=torch.float64 if out.dtype == torch.float64 else torch.float32, device=out.device).expand(out.shape[:3])
        self._make_out = _maker(call.q, out)
        tensors = {"q": call.q, "k": call.k, "v": call.v, "out": out}
        self._forward = bound_forward(text, call, tensors, torch.empty_like(self._lse), aligned=True)
        self._backward: dict[Any, tuple[Any, list[Maker | None]]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, deterministic: bool | None) -> Tensor | None:
        """The output, differentiable; None if these tensors need the long way after all."""
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (addresses[0] | addresses[1] | addresses[2]) % 16 or 0 in addresses or self._generation != _generation:
            return None
        if q.is_neg() or k.is_neg() or v.is_neg():
            return None
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _Attention.apply(self, torch._C._get_deterministic_algorithms() if deterministic is None else deterministic, q, k, v)
        return self.run(q, k, v)[0]

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self._make_out(q), torch.empty_like(self._lse)
        self._forward.start(
            {"q": q.data_ptr(), "k": k.data_ptr(), "v": v.data_ptr(), "out": out.data_ptr(), "lse": lse.data_ptr(), "max_scores": 0, "out_low": 0}
        )
        return out, lse

    def differentiate(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, wanted: tuple[bool, ...], deterministic: bool
    ) -> list[Tensor | None]:
        """dq, dk and dv, None where not wanted."""
        if not torch.compiler.is_compiling():
            ops.refuse_transforms([dout])
        addresses = {"q": q.data_ptr(), "k": k.data_ptr(), "v": v.data_ptr(), "out": out.data_ptr(), "dout": dout.data_ptr()}
        bits = addresses["q"] | addresses["k"] | addresses["v"] | addresses["out"] | addresses["dout"]
        plain = dout.stride(-1) == out.stride(-1) == lse.stride(-1) == 1 and addresses["dout"] and not any(t.is_neg() for t in (q, k, v, out, lse, dout))
        if bits % 16 or not plain or not ops.direct(dout):
            given = Backward(dout, None, out, out.new_empty(0), lse, list(wanted), [], deterministic)
            dq, dk, dv, *_ = ops.backward(self._text, Call(q, k, v, *self._numbers), given)
            return [g if w else None for g, w in zip((dq, dk, dv), wanted)]
        # Hooks on saved tensors may hand back other strides than they were given.
        key = (q.stride(), k.stride(), v.stride(), out.stride(), lse.stride(), dout.stride(), wanted, deterministic)
        known = self._backward.get(key)
        if known is None:
            known = self._backward[key] = self._bind_backward(q, k, v, out, lse, dout, wanted, deterministic)
        bound, makers = known
        gradients = [make and make(t) for make, t in zip(makers, (q, k, v))]
        for name, gradient in zip(("dq", "dk", "dv"), gradients):
            if gradient is not None:
                addresses[name] = gradient.data_ptr()
        addresses["lse"], addresses["out_low"] = lse.data_ptr(), 0
        bound.start(addresses)
        return gradients

    def _bind_backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, wanted: tuple[bool, ...], deterministic: bool
    ) -> tuple[Any, list[Maker | None]]:
        gradients = [output_like(t, t.shape[-1], t.dtype) for t in (q, k, v)]
        tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout} | {n: t for n, t, w in zip(("dq", "dk", "dv"), gradients, wanted) if w}
        given = Backward(dout, None, out, out.new_empty(0), lse, list(wanted), [], deterministic)
        bound = bound_backward(self._text, Call(q, k, v, *self._numbers), given, tensors, aligned=True, own_delta=True)
        return bound, [_maker(t, gradient) if w else None for t, gradient, w in zip((q, k, v), gradients, wanted)]


def _maker(source: Tensor, example: Tensor) -> Maker:
    """Makes tensors with the shape and strides of ``example``: from ``source`` where torch's shortest call does."""
    like = torch.empty_like(source)
    if like.shape == example.shape and like.stride() == example.stride():
        return torch.empty_like
    shape, strides, dtype, device = example.shape, example.stride(), example.dtype, example.device
    return lambda _: torch.empty_strided(shape, strides, dtype=dtype, device=device)


class _Attention(torch.autograd.Function):
    """ops.Attention for a Repeat: (repeat, deterministic, q, k, v) -> out."""

    @staticmethod
    def forward(ctx: Any, repeat: Repeat, deterministic: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = repeat.run(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.repeat, ctx.deterministic = repeat, deterministic
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = ctx.repeat.differentiate(q, k, v, out, lse, dout, ctx.needs_input_grad[2:], ctx.deterministic)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            gradients = [None if g is None else ops.Once.apply(g, dout, q, k, v) for g in gradients]
        return (None, None, *gradients)
