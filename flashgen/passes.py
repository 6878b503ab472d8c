"""Passes: one pass of a call, with all that its kernels are run with: the tensors, their addresses, the numbers.

Handle's text + Call -> Pass. Example: ``forward_pass(text, call).addresses()``. Ordinary calls and the tuner's trials run the same Pass; see ``runs``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import bounds, calls, traffic
from .calls import Backward, Call, Handle, output_like, packed_heads, parse_handle, rows_adjacent, stored
from .errors import DeviceError
from .form import Form
from .problem import Problem
from .tables import block_bounds


@dataclass
class Pass:
    """One pass on the tensors of a call.

    call: as ``prepared`` gives it. tensors: those whose strides are arguments: q, k, v, out, of a backward also dout and the gradients wanted. others: those
    given by their address alone. written: what the kernels overwrite. sums: what they add captured gradients to, by slot. given: None of a forward.
    """

    text: str
    call: Call
    tensors: dict[str, Tensor]
    lse: Tensor
    others: dict[str, Tensor] = field(default_factory=dict)
    written: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[int, Tensor] = field(default_factory=dict)
    given: Backward | None = None

    @property
    def handle(self) -> Handle:
        return parse_handle(self.text)[0]

    @property
    def form(self) -> Form:
        return self._rows()[0]

    @property
    def packed_call(self) -> Call:
        return self._rows()[1]

    def _rows(self) -> tuple[Form, Call, Any]:
        """Form and call, of a decoding step with a group's heads as rows, and the view that makes them so."""
        form = parse_handle(self.text)[1]
        return packed_heads(form, self.call) if self.given is None else (form, self.call, lambda t: t)

    def aligned(self) -> bool:
        """Whether every row starts on 16 bytes."""
        return not any(t.data_ptr() % 16 for t in self.tensors.values()) and calls.strides_aligned(self.tensors.values())

    def problem(self) -> Problem:
        call = self._rows()[1]
        return (
            calls.forward_problem(self.handle, call, self.aligned())
            if self.given is None
            else calls.backward_problem(self.handle, call, self.given, self.aligned())
        )

    def key(self) -> tuple:
        """What decides the arguments except for the addresses: the kernel, every shape and stride, every number."""
        c, b = self.call, self.given
        tensors = tuple((t.shape, t.stride()) for t in (*self.tensors.values(), self.lse, *c.captures))
        misaligned = any(t.data_ptr() % 16 for t in self.tensors.values())
        sequences = c.cu_seqlens_q is None or c.cu_seqlens_q.shape[0]
        present = (*self.others, misaligned, c.sink is None, c.seqlens_k is None, sequences, c.seed is None, c.dropout_p)
        backward = None if b is None else (*b.wanted, *b.slots, b.out_low.numel() > 0, b.deterministic)
        floats = [x if x else str(x) for x in c.floats]  # 0.0 and -0.0 are equal, and are two numbers
        return (self.text, tensors, c.q.dtype, c.q.device, present, backward, c.scale, c.max_q, c.max_k, *floats, None, *c.ints)

    def numbers(self) -> dict[str, Any]:
        """Every Params field that is no address."""
        _, c, rows = self._rows()
        sizes = calls.sizes_of(c)
        lse = rows(self.lse)
        values: dict[str, Any] = {
            "batch": sizes.batch, "heads": sizes.heads, "kv_heads": sizes.kv_heads, "q_len": sizes.q_len, "kv_len": sizes.kv_len,
            "total_q": sizes.total_q, "total_k": sizes.total_k,
        }  # fmt: skip
        for name, t in self.tensors.items():
            values |= _strides(name, rows(t) if name in ("q", "out") else t)
        values |= {"lse_stride_b": lse.stride(0) if lse.dim() == 3 else 0, "lse_stride_h": lse.stride(-2)}
        for n, t in enumerate(c.captures):
            for d in range(t.dim()):
                values[f"capture_{n}_stride_{d}"], values[f"capture_{n}_size_{d}"] = t.stride(d), t.shape[d]
        largest = torch.finfo(lse.dtype).max  # a number beyond float32 is an infinity there, as in torch
        fit = lambda x: x if -largest <= x <= largest else math.copysign(math.inf, x)  # noqa: E731
        values |= {"scale": fit(c.scale), **{f"float_{n}": fit(x) for n, x in enumerate(c.floats)}}
        values |= {f"int_{n}": x for n, x in enumerate(c.ints)}
        if c.seed is not None:  # a 32-bit word w keeps its entry iff w >= ceil(p * 2^32), that is w > drop_most; where p rounds to 1 none does
            values |= {"drop_most": math.ceil(c.dropout_p * 2.0**32) - 1, "keep_scale": 1 / (1 - c.dropout_p) if c.dropout_p < 1 else 0.0}
        return values

    def addresses(self) -> tuple[dict[str, int], list[Tensor]]:
        """Every address, and what has to be held until the launch is queued."""
        c = self.call
        for name, t in self.tensors.items():
            if not t.data_ptr() and t.numel():
                raise DeviceError(f"{name} has no memory (its storage was freed, or it is a tensor without one): pass a tensor that holds its values.")
        held = self.tables()
        given = {n: t for n in ("sink", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k", "seed") if (t := getattr(c, n)) is not None}
        given |= {f"capture_{n}": t for n, t in enumerate(c.captures)} | {f"grad_{n}": t for n, t in self.sums.items()}
        return {name: t.data_ptr() for name, t in (self.tensors | self.others | given | held).items()}, list(held.values())

    def tables(self) -> dict[str, Tensor]:
        """The tables that this call's tiles are classified by, made from the captured tensors as they are now."""
        if not self.call.captures:
            return {}
        form, c, _ = self._rows()
        tabled = [(slot, blocked) for slot, blocked in _access(form).items() if blocked] if calls.size_class_of(c) == "long" else []
        found: dict[str, Tensor] = {}
        for slot, blocked in tabled:
            found[f"least_{slot}"], found[f"most_{slot}"] = block_bounds(c.captures[slot], blocked)
        return found

    def results(self) -> dict[str, Tensor]:
        """What the pass has computed, by name: out with what its rounding left over, which plans that round differently have together."""
        found = dict(self.written)
        low = found.pop("out_low", None)
        if low is not None:
            found["out"] = found["out"].float() + low.float()
        return found | {f"gradient of capture {n}": finished(t, self.lse) for n, t in self.sums.items()}

    def pairs(self) -> float:
        """Visible (query, key) pairs of all heads; the share that is visible is that of head 0 at the longest lengths."""
        form, c, _ = self._rows()
        sizes = calls.sizes_of(c)
        shape = traffic.Shape(sizes.batch, sizes.heads, sizes.kv_heads, sizes.q_len, sizes.kv_len)
        share = traffic.visible_share(form, self.problem(), shape, c.captures, c.floats, c.ints)
        if c.cu_seqlens_q is None or c.cu_seqlens_k is None:
            return share * sizes.batch * sizes.heads * sizes.q_len * sizes.kv_len
        return share * sizes.heads * float((c.cu_seqlens_q.diff().double() * c.cu_seqlens_k.diff().double()).sum())


_access = lru_cache(maxsize=4096)(bounds.access)


def _strides(name: str, t: Tensor) -> dict[str, int]:
    if t.dim() == 4:
        b, h, l = t.stride()[:3]  # noqa: E741 - the axis names of the argument struct
    else:
        b, (l, h) = 0, t.stride()[:2]  # noqa: E741
    return {f"{name}_stride_b": b, f"{name}_stride_h": h, f"{name}_stride_l": l}


def forward_pass(text: str, call: Call) -> Pass:
    """The forward of a call, with outputs of its own: out, lse, max_scores and out_low, the latter two if they are wanted."""
    handle = parse_handle(text)[0]
    c = calls.prepared(call)
    out, lse = output_like(c.q, c.v.shape[-1], c.q.dtype), calls.statistics_of(c.q)
    written = {"out": out, "lse": lse}
    if handle.max_scores:
        written["max_scores"] = torch.empty_like(lse)
    if calls.keeps_low(handle, c.q):
        written["out_low"] = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
    return Pass(text, c, {"q": c.q, "k": c.k, "v": c.v, "out": out}, lse, {n: t for n, t in written.items() if n != "out"}, written)


def backward_pass(text: str, call: Call, b: Backward) -> Pass:
    """The backward of a call, with outputs of its own: the gradients wanted of q, k and v, delta, and sums of captured gradients, which start from zeros."""
    c = calls.prepared(call)
    lse = rows_adjacent(stored(b.lse))
    gradients = {n: output_like(t, t.shape[-1], t.dtype) for n, t, w in zip(("dq", "dk", "dv"), (c.q, c.k, c.v), b.wanted) if w}
    tensors = {"q": c.q, "k": c.k, "v": c.v, "out": rows_adjacent(stored(b.out)), "dout": rows_adjacent(stored(b.dout)), **gradients}
    others = {"lse": lse, "delta": torch.empty_like(lse)}
    if b.out_low.numel():
        others["out_low"] = b.out_low
    if b.dlse is not None:
        others["dlse"] = stored(b.dlse).to(lse.dtype).contiguous()
    sums = {n: captured_sums(c.captures[n], lse, b.deterministic) for n in b.slots}
    return Pass(text, c, tensors, lse, others, gradients | {"delta": others["delta"]}, sums, b)


# ---- gradients of captured tensors


def grad_dtype(lse: Tensor) -> torch.dtype:
    """Of a captured tensor's gradient: float64 on a CPU, where summing in it costs nothing, else the statistics' own."""
    return torch.float64 if lse.device.type == "cpu" else lse.dtype


def captured_sums(capture: Tensor, lse: Tensor, deterministic: bool) -> Tensor:
    """Zeros for the kernel to add a captured gradient to, as Family.grad_type says: on a GPU, when deterministic, an fg::ExactSum per entry."""
    if deterministic and lse.device.type == "cuda":
        return torch.zeros((*capture.shape, 4), dtype=torch.int64, device=lse.device)
    return torch.zeros(capture.shape, dtype=grad_dtype(lse), device=lse.device)


def finished(sums: Tensor, lse: Tensor) -> Tensor:
    """The gradient that the kernel's sums stand for: three integer parts of quanta 2^-8, 2^-38, 2^-68 and a double (fg/sm80/grad.cuh)."""
    if sums.dtype != torch.int64:
        return sums
    first, second, third = (sums[..., i].double() * 2.0**exponent for i, exponent in enumerate((-8, -38, -68)))
    return (first + second + third + sums.view(torch.float64)[..., 3]).to(grad_dtype(lse))
