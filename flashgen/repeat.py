"""Repeat: a plain call of shapes and strides that a kernel has taken before, straight to the launch.

Repeats(q, k, v) -> out, or None for a call that has to go the long way. Plain means: eager tensors, and a variant without captures, sink or inputs. Every
check of such a call depends on what is compared here, so a call seen before has passed them.

What runs at each call is written for the host's time: the backward runs on a thread of autograd's whose caches hold none of the objects that the forward
has just used, where every further object costs about a tenth of a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import ops, runs
from .calls import Backward, Call, output_like, prepared, statistics_of
from .passes import Pass

Maker = Callable[[], Tensor]

_is_grad_enabled = torch.is_grad_enabled
_ALL = (True, True, True)  # of q, k and v, those that need a gradient


def recognizer(*tensors: Tensor) -> Callable[..., bool]:
    """A function of as many tensors: whether they have the same type, dtype, device, shape, strides and requires_grad, and torch would treat them alike: the
    same bits (negated, batched, wrapped, without memory ...) and the same modes are set (autocast, inference, dispatch modes, transforms)."""
    return torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def signature(q: Any, k: Any, v: Any) -> tuple | None:
    """What decides the checks and the arguments of a plain call; None where torch has to see the call (modes, transforms, a cast by autocast)."""
    if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor or q.is_neg() or k.is_neg() or v.is_neg():
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
    runs.forget()
    _generation += 1


class Repeats:
    """The calls that a kernel has taken, by signature; the latest one is recognized without."""

    def __init__(self) -> None:
        self._known: dict[Any, Repeat] = {}
        self._latest: tuple[Callable[..., bool], Repeat] | None = None

    def __call__(self, q: Any, k: Any, v: Any, deterministic: bool | None) -> Tensor | None:
        """The output, differentiable; None if the call has to go the long way."""
        if is_compiling():
            return None
        latest = self._latest
        if latest is not None and latest[0](q, k, v) and forward_ad._current_level < 0:
            return latest[1](q, k, v, deterministic)
        repeat = self._known.get(signature(q, k, v))
        if repeat is None:
            return None
        # Autocast's dtype is not among what a recognizer compares.
        self._latest = None if torch._C._is_any_autocast_enabled() else (recognizer(q, k, v), repeat)
        return repeat(q, k, v, deterministic)

    def remember(self, q: Tensor, k: Tensor, v: Tensor, text: str, call: Call, out: Tensor) -> None:
        """A call that went well, of the kernel called ``text``."""
        key = None if is_compiling() else signature(q, k, v)
        plain = key is not None and prepared(call) is call and call.k.shape == k.shape and call.v.shape == v.shape
        if plain and not any(t.data_ptr() % 16 or t.numel() == 0 for t in (call.q, call.k, call.v, out)):
            if len(self._known) >= runs.MAX_BOUND:
                self._known.clear()
            self._known[key], self._latest = Repeat(text, call, out), None


class Repeat:
    """One shape of a kernel: its forward, and its backward for either answer to whether that is deterministic."""

    def __init__(self, text: str, call: Call, out: Tensor):
        self._generation = _generation
        lse = statistics_of(call.q)
        self._make_out, self._make_lse = _maker(out), _maker(lse)
        bound = runs.bind(Pass(text, call, {"q": call.q, "k": call.k, "v": call.v, "out": out}, lse, {"lse": lse}))
        assert bound.given == ("q", "k", "v", "out", "lse")
        self._launch, self.current_device, self.device_number = bound.launch, bound.current_device, bound.device_number
        self._backwards = tuple([Backwards(self, text, call[3:], deterministic) for deterministic in (False, True)])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, deterministic: bool | None) -> Tensor | None:
        """The output, differentiable; None if these tensors need the long way after all."""
        if self.current_device() != self.device_number:
            with torch.cuda.device(self.device_number):
                return self(q, k, v, deterministic)
        addresses = a, b, c = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (a | b | c) % 16 or not (a and b and c) or self._generation != _generation:
            return None
        wanted = q.requires_grad, k.requires_grad, v.requires_grad
        if True in wanted and _is_grad_enabled():
            backwards = self._backwards[torch._C._get_deterministic_algorithms() if deterministic is None else deterministic]
            return _attend((backwards, addresses, wanted == _ALL), q, k, v)
        return self.run(addresses)[0]

    def run(self, addresses: tuple[int, int, int]) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """The output, its statistics, and the addresses of q, k, v and these. addresses: of q, k and v."""
        out, lse = self._make_out(), self._make_lse()
        every = *addresses, out.data_ptr(), lse.data_ptr()
        self._launch(*every)
        return out, lse, every


class _Layout(NamedTuple):
    """The backward of one set of strides and of gradients wanted: its launch, and what makes the gradients."""

    launch: Callable[..., None]
    makers: list[Maker | None]


class Backwards:
    """The backward of a Repeat, for each layout that gradients, or saved tensors that hooks have replaced, come in.

    All give what autograd takes: gradients for each of the arguments of ``_Attention``.
    """

    def __init__(self, repeat: Repeat, text: str, numbers: tuple, deterministic: bool):
        self.repeat, self._text, self._numbers, self._deterministic = repeat, text, numbers, deterministic
        self.current_device, self.device_number = repeat.current_device, repeat.device_number
        self._known: dict[Any, _Layout] = {}
        # Of a backward of all three gradients, from the tensors of the forward: what recognizes dout, makes dq, dk and dv, and launches.
        self.latest: tuple[Any, ...] | None = None

    def __call__(self, saved: tuple[Tensor, ...], dout: Tensor, needs: tuple[bool, ...], addresses: tuple[int, ...]) -> tuple[Tensor | None, ...]:
        """The gradients of a forward. saved: q, k, v, out and lse, which lay at ``addresses`` (empty unless all gradients are wanted). needs: of the arguments
        of ``_Attention``."""
        if self.current_device() != self.device_number:
            with torch.cuda.device(self.device_number):
                return self(saved, dout, needs, addresses)
        return self._repeated(*saved, dout=dout, needs=needs, addresses=addresses)

    def _repeated(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, dout: Tensor, needs: tuple[bool, ...], addresses: tuple[int, ...]
    ) -> tuple[Tensor | None, ...]:
        ops.refuse_transforms([dout])
        tensors, wanted = (q, k, v, out, lse, dout), needs[1:]
        found = tuple([t.data_ptr() for t in tensors])
        plain = dout.stride(-1) == out.stride(-1) == lse.stride(-1) == 1 and found[5] and not any(t.is_neg() for t in tensors)
        if any(found[n] % 16 for n in (0, 1, 2, 3, 5)) or not plain or not ops.direct(dout):
            gradients = self.computed((q, k, v, out, lse), dout, needs)[1:]
        else:
            key = (*[t.stride() for t in tensors], wanted)
            layout = self._known.get(key)
            if layout is None:
                layout = self._known[key] = self._bind(*tensors, wanted=wanted)
            gradients = tuple([make and make() for make in layout.makers])
            layout.launch(*found[:4], found[5], *[t.data_ptr() for t in gradients if t is not None], found[4])
            if found[:5] == addresses:
                self.latest = recognizer(dout), *layout.makers, layout.launch
        if _is_grad_enabled():  # create_graph=True
            gradients = tuple([None if g is None else ops.Once.apply(g, dout, q, k, v) for g in gradients])
        return None, *gradients

    def computed(self, saved: tuple[Tensor, ...], dout: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        """The gradients by the long way. saved: q, k, v, out and lse."""
        q, k, v, out, lse = saved
        given = Backward(dout, None, out, out.new_empty(0), lse, list(needs[1:]), [], self._deterministic)
        gradients = ops.backward(self._text, Call(q, k, v, *self._numbers), given)
        return None, *[g if w else None for g, w in zip(gradients, needs[1:])]

    def _bind(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, *, wanted: tuple[bool, ...]) -> _Layout:
        made = [output_like(t, t.shape[-1], t.dtype) for t in (q, k, v)]
        tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout} | {n: t for n, t, w in zip(("dq", "dk", "dv"), made, wanted) if w}
        given = Backward(dout, None, out, out.new_empty(0), lse, list(wanted), [], self._deterministic)
        bound = runs.bind(Pass(self._text, Call(q, k, v, *self._numbers), tensors, lse, {"lse": lse}, given=given))
        assert bound.given == (*tensors, "lse")
        return _Layout(bound.launch, [_maker(gradient) if w else None for gradient, w in zip(made, wanted)])


def _maker(example: Tensor) -> Maker:
    """Makes tensors like ``example``, with its strides, on the current device: by torch's shortest way, that of the code which its own compiler writes."""
    return _made(example.device.type, tuple(example.shape), example.stride(), example.dtype)


@lru_cache(maxsize=4096)  # one for all tensors alike, so that less has to be fetched into a thread's caches
def _made(device: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Maker:
    return partial(getattr(torch._C._dynamo.guards, f"_empty_strided_{device}"), shape, strides, dtype)


class _Attention(torch.autograd.Function):
    """ops.Attention for a Repeat: ((its backward, addresses of q, k and v, whether all of them need a gradient), q, k, v) -> out."""

    @staticmethod
    def forward(ctx: Any, origin: tuple[Backwards, tuple[int, int, int], bool], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        backwards, addresses, all_wanted = origin
        out, lse, every = backwards.repeat.run(addresses)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.origin = backwards, every if all_wanted else ()
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        (backwards, addresses), saved, needs = ctx.origin, ctx.saved_tensors, ctx.needs_input_grad
        return backwards.computed(saved, dout, needs) if is_compiling() else backwards(saved, dout, needs, addresses)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    """``_Attention.backward``, shorter for all three gradients of the tensors of the forward."""
    q, k, v, out, lse = saved = ctx.saved_tensors
    backwards, lay = ctx.origin
    latest = backwards.latest
    if latest is not None and latest[0](dout) and not _is_grad_enabled() and forward_ad._current_level < 0:
        # What a hook hands back for a saved tensor is that tensor, or lies elsewhere.
        addresses, at = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr()), dout.data_ptr()
        if addresses == lay and at and not at % 16 and backwards.current_device() == backwards.device_number:
            _, make_dq, make_dk, make_dv, launch = latest
            dq, dk, dv = make_dq(), make_dk(), make_dv()
            launch(*addresses[:4], at, dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), addresses[4])
            return None, dq, dk, dv
    return backwards(saved, dout, ctx.needs_input_grad, lay)


# Function.apply without its detour for torch.func's transforms, under which no call is a plain one.
_attend = super(torch.autograd.Function, _Attention).apply
# What autograd's engine calls, without its detour to ``backward``, which stands for what compiled autograd traces.
_Attention._backward_cls.apply = _differentiate  # type: ignore[attr-defined]
