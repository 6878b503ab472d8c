"""Calls: one pass run on the tensors of a call; the arguments of a shape are packed once and remembered.

Handle (a kernel's name across processes) + Call -> outputs. Example: ``run_forward(handle.text, call)``. No autograd here; see ``ops``.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import bounds, traffic, tune
from . import target as targets
from .errors import DeviceError, VariantError
from .families import Sizes
from .form import Form
from .launch import Bound, Loaded, load
from .packing import pack_group
from .pipeline import prepare
from .plan import FEW_ROWS, size_class
from .problem import Problem
from .score_bounds import static_bounds
from .tables import block_bounds


class Handle(NamedTuple):
    """What names a kernel across processes: the form and the options that are not in the tensors."""

    form: str
    layout: str = "dense"
    lse: bool = True
    max_scores: bool = False
    out_low: bool = False
    target: str | None = None
    family: str | None = None
    plan: tuple[tuple[str, int], ...] | None = None
    tune: bool | None = None  # None: a recorded winner, else the tiler's choice; True: measured where there is no record; False: records are ignored

    @property
    def text(self) -> str:
        return json.dumps(self, separators=(",", ":"))


@lru_cache(maxsize=4096)
def parse_handle(text: str) -> tuple[Handle, Form]:
    handle = Handle(*json.loads(text))
    handle = handle._replace(plan=None if handle.plan is None else tuple((name, value) for name, value in handle.plan))
    return handle, Form.parse(handle.form)


class Call(NamedTuple):
    """One call's tensors and numbers, as the operators take them."""

    q: Tensor  # dense (B, H, L, D); varlen (T, H, D)
    k: Tensor
    v: Tensor
    sink: Tensor | None
    seqlens_k: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    captures: list[Tensor]
    floats: list[float]
    ints: list[int]
    scale: float
    max_q: int  # longest query sequence (varlen); dense: Lq
    max_k: int
    seed: Tensor | None = None  # of dropout: its 64 bits as one int64 on q's device; None: no dropout
    dropout_p: float = 0.0


_executables: dict[Any, Loaded] = {}
_locks: dict[Any, threading.Lock] = {}
_lock = threading.Lock()


def resolve_target(name: str | None, device: torch.device) -> targets.Target:
    """The chip to build for; DeviceError when a forced target is not the tensors' device."""
    native = targets.detect(device.index or 0) if device.type == "cuda" else targets.detect_cpu()
    if name is not None and name != native.name:
        raise DeviceError(
            f"the kernel was compiled with target={name!r}, but the tensors are on {device} ({native.name}): use target=None, or build() and source() only."
        )
    return native


@lru_cache(maxsize=64)
def _target(name: str | None, device: torch.device) -> targets.Target:
    return resolve_target(name, device)


def forget() -> None:
    """Drop the passes that calls have loaded, so that the next call of each looks for a record again."""
    _executables.clear()
    _bound.clear()


def loaded(handle: Handle, form: Form, problem: Problem, device: torch.device, trial: Callable[[], tune.Trial]) -> Loaded:
    """The loaded pass of a problem, prepared once per device; threads that ask at once wait for one build. ``trial`` is what a tuner would run."""
    key = (handle.form, handle.target, handle.family, handle.plan, handle.tune, problem, device)
    found = _executables.get(key)
    if found is None:
        with _lock:
            lock = _locks.setdefault(key, threading.Lock())
        with lock:
            found = _executables.get(key)
            if found is None:
                if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    raise VariantError(
                        "this kernel is not built yet and a CUDA graph is being captured: make one warm-up call of the same kind before capturing."
                    )
                chip = _target(handle.target, device)
                if handle.tune:
                    tune.ensure(trial())
                forced = dict(handle.plan) if handle.plan else None
                executable = prepare(form, problem, chip, family=handle.family, forced=forced, use_records=handle.tune is not False)
                found = _executables[key] = load(executable, device)
    return found


def _rows(t: Tensor) -> Tensor:
    """Rows whose elements are adjacent; anything else is copied."""
    return t if t.stride(-1) == 1 else t.contiguous()


def strides_aligned(tensors: Iterable[Tensor]) -> bool:
    """Every row starts on 16 bytes if the first one does, and none is another one's: TMA knows no stride of 0 from row to row."""
    return all(
        (s * t.element_size() % 16 == 0 and (s > 0 or axis != t.dim() - 2)) or n <= 1
        for t in tensors
        for axis, (s, n) in enumerate(zip(t.stride()[:-1], t.shape[:-1]))
    )


def _starts_aligned(tensors: dict[str, Tensor], addresses: dict[str, int]) -> bool:
    bits = 0
    for name in tensors:
        bits |= addresses[name]
    return bits % 16 == 0


def output_like(t: Tensor, last: int, dtype: torch.dtype) -> Tensor:
    """An output with t's shape but ``last`` columns, its dimensions in t's memory order, rows adjacent."""
    shape = (*t.shape[:-1], last)
    if t.dim() == 4 and t.stride(1) < t.stride(2) and t.shape[1] > 1:
        return torch.empty((shape[0], shape[2], shape[1], last), dtype=dtype, device=t.device).transpose(1, 2)
    return torch.empty(shape, dtype=dtype, device=t.device)


def statistics_of(q: Tensor) -> Tensor:
    """An lse-shaped tensor: (B, H, L), or (H, T) for packed sequences."""
    shape = q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0])
    return torch.empty(shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)


def _sizes(c: Call) -> Sizes:
    if c.q.dim() == 4:
        return Sizes(c.q.shape[0], c.q.shape[1], c.k.shape[1], c.q.shape[2], c.k.shape[2], c.q.shape[2], c.k.shape[2])
    assert c.cu_seqlens_q is not None
    return Sizes(c.cu_seqlens_q.shape[0] - 1, c.q.shape[1], c.k.shape[1], c.max_q, c.max_k, c.q.shape[0], c.k.shape[0])


def _strides(name: str, t: Tensor) -> dict[str, int]:
    if t.dim() == 4:
        b, h, l = t.stride()[:3]  # noqa: E741 - the axis names of the argument struct
    else:
        b, (l, h) = 0, t.stride()[:2]  # noqa: E741
    return {f"{name}_stride_b": b, f"{name}_stride_h": h, f"{name}_stride_l": l}


def _numbers(c: Call, sizes: Sizes, tensors: dict[str, Tensor], stat: Tensor) -> dict[str, Any]:
    """Every Params field that is no address."""
    values: dict[str, Any] = {
        "batch": sizes.batch,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "q_len": sizes.q_len,
        "kv_len": sizes.kv_len,
        "total_q": sizes.total_q,
        "total_k": sizes.total_k,
    }
    for name, t in tensors.items():
        values |= _strides(name, t)
    values |= {"lse_stride_b": stat.stride(0) if stat.dim() == 3 else 0, "lse_stride_h": stat.stride(-2)}
    for n, t in enumerate(c.captures):
        for d in range(t.dim()):
            values[f"capture_{n}_stride_{d}"], values[f"capture_{n}_size_{d}"] = t.stride(d), t.shape[d]
    largest = torch.finfo(stat.dtype).max  # a number beyond float32 is an infinity there, as in torch
    fit = lambda x: x if -largest <= x <= largest else math.copysign(math.inf, x)  # noqa: E731
    values |= {"scale": fit(c.scale), **{f"float_{n}": fit(x) for n, x in enumerate(c.floats)}}
    values |= {f"int_{n}": x for n, x in enumerate(c.ints)}
    if c.seed is not None:  # a 32-bit word w keeps its entry iff w >= ceil(p * 2^32), that is w > drop_most; where p rounds to 1 none does
        values |= {"drop_most": math.ceil(c.dropout_p * 2.0**32) - 1, "keep_scale": 1 / (1 - c.dropout_p) if c.dropout_p < 1 else 0.0}
    return values


def _addresses(c: Call, tensors: dict[str, Tensor]) -> dict[str, int]:
    found = {name: t.data_ptr() for name, t in tensors.items()}
    for name, t in tensors.items():
        if not found[name] and t.numel():
            raise DeviceError(f"{name} has no memory (its storage was freed, or it is a tensor without one): pass a tensor that holds its values.")
    for name in ("sink", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k", "seed"):
        t = getattr(c, name)
        if t is not None:
            found[name] = t.data_ptr()
    for n, t in enumerate(c.captures):
        found[f"capture_{n}"] = t.data_ptr()
    return found


_bound: dict[Any, Bound] = {}
MAX_BOUND = 4096  # shapes remembered before the memo starts anew


def _key(text: str, c: Call, tensors: dict[str, Tensor], *static: Any) -> tuple:
    """What decides a Bound: the kernel, every shape and stride, every number."""
    shapes = tuple((t.shape, t.stride()) for t in (*tensors.values(), *c.captures))
    sequences = c.cu_seqlens_q is None or c.cu_seqlens_q.shape[0]
    given = (c.sink is None, c.seqlens_k is None, sequences, c.seed is None, c.dropout_p)
    floats = [x if x else str(x) for x in c.floats]  # 0.0 and -0.0 are equal, and are two numbers
    return (text, shapes, c.q.dtype, c.q.device, given, c.scale, c.max_q, c.max_k, *floats, None, *c.ints, *static)


def _bind(key: tuple, make: Callable[[], Bound]) -> Bound:
    found = _bound.get(key)
    if found is None:
        if len(_bound) >= MAX_BOUND:
            _bound.clear()
        found = _bound[key] = make()
    return found


def _problem(handle: Handle, c: Call, aligned: bool, **fields: Any) -> Problem:
    return Problem(
        dtype=str(c.q.dtype)[6:], head_dim_qk=c.q.shape[-1], head_dim_v=c.v.shape[-1], group=c.q.shape[1] // c.k.shape[1], layout=handle.layout,
        sink=c.sink is not None, seqlens_k=c.seqlens_k is not None, dropout=c.seed is not None, scale_sign=(c.scale > 0) - (c.scale < 0), aligned=aligned,
        size=_size_class(c), **fields,
    )  # fmt: skip


def _size_class(c: Call) -> str:
    return size_class(*((c.q.shape[2], c.k.shape[2]) if c.q.dim() == 4 else (c.max_q, c.max_k)))


_access = lru_cache(maxsize=4096)(bounds.access)


def _tables(form: Form, c: Call, addresses: dict[str, int]) -> list[Tensor]:
    """The tables that this call's tiles are classified by, entered into the addresses; to be held until the launch is queued."""
    held: list[Tensor] = []
    tabled = [(slot, blocked) for slot, blocked in _access(form).items() if blocked] if _size_class(c) == "long" else []
    for slot, blocked in tabled:
        least, most = block_bounds(c.captures[slot], blocked)
        addresses[f"least_{slot}"], addresses[f"most_{slot}"] = least.data_ptr(), most.data_ptr()
        held += [least, most]
    return held


def stored(t: Tensor) -> Tensor:
    """A tensor whose memory holds its values: torch also has views that negate what they read, and zeros without memory."""
    if t.is_neg():
        return t.resolve_neg()
    return torch.zeros(t.shape, dtype=t.dtype, device=t.device) if t._is_zerotensor() else t


def prepared(c: Call) -> Call:
    """Rows adjacent, the sink and the integer tensors as the kernels read them, no capture without an element."""
    plain = c.sink is None and c.seqlens_k is None and c.cu_seqlens_q is None and not c.captures
    q, k, v = stored(c.q), stored(c.k), stored(c.v)
    if plain and q is c.q and k is c.k and v is c.v and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return c
    real = torch.float64 if c.q.dtype == torch.float64 else torch.float32
    integers: dict[str, Any] = {n: stored(t).contiguous() for n in ("seqlens_k", "cu_seqlens_q", "cu_seqlens_k") if (t := getattr(c, n)) is not None}
    captures = [stored(t) if t.numel() else t.new_zeros([max(n, 1) for n in t.shape]) for t in c.captures]
    captures = [t if t.dim() == 0 or t.stride(-1) < 1 << 28 else t.contiguous() for t in captures]  # kernels take it as an int, in bytes
    sink = None if c.sink is None else stored(c.sink.detach()).to(real).contiguous()
    return c._replace(q=_rows(q), k=_rows(k), v=_rows(v), sink=sink, captures=captures, **integers)


def run_forward(text: str, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse, max_scores, out_low; those not wanted are empty."""
    handle, form = parse_handle(text)
    c = prepared(call)
    out = output_like(c.q, c.v.shape[-1], c.q.dtype)
    stat = statistics_of(c.q)
    top = torch.empty_like(stat) if handle.max_scores else stat.new_empty(0)
    low = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device) if keeps_low(handle, c.q) else out.new_empty(0)
    if out.numel() == 0 and stat.numel() == 0:
        return out, stat, top, low
    tensors = {"q": c.q, "k": c.k, "v": c.v, "out": out}
    addresses = _addresses(c, tensors)
    addresses |= {"lse": stat.data_ptr(), "max_scores": top.data_ptr(), "out_low": low.data_ptr()}
    held = _tables(*packed_heads(form, c)[:2], addresses) if c.captures else []
    bound = bound_forward(text, c, tensors, stat, aligned=_starts_aligned(tensors, addresses))
    if handle.layout == "varlen" and not bound.clears:  # rows that belong to no sequence
        out.zero_(), low.zero_(), stat.fill_(float("-inf"))
        if handle.max_scores:
            top.fill_(float("-inf"))
    bound.start(addresses)
    del held
    return out, stat, top, low


def packed_heads(form: Form, c: Call) -> tuple[Form, Call, Callable[[Tensor], Tensor]]:
    """A decoding step of grouped heads as one row per head of a kv head: its form and call, and the view that makes rows of heads in q, out or lse."""
    group = c.q.shape[1] // c.k.shape[1] if c.q.dim() == 4 and c.k.shape[1] else 1
    if c.q.dim() != 4 or c.q.shape[2] != 1 or not 1 < group <= FEW_ROWS or c.sink is not None or c.seed is not None:  # which count heads
        return form, c, lambda t: t
    rows: Callable[[Tensor], Tensor] = lambda t: t.squeeze(2).unflatten(1, (c.k.shape[1], group))  # noqa: E731
    return pack_group(form, group), c._replace(q=rows(c.q), max_q=group), rows


def bound_forward(text: str, c: Call, tensors: dict[str, Tensor], stat: Tensor, *, aligned: bool) -> Bound:
    """The packed arguments of a forward on these tensors, ``q``, ``k``, ``v`` and ``out``. aligned: each starts on 16 bytes."""

    def make() -> Bound:
        handle, form = parse_handle(text)
        form, call, rows = packed_heads(form, c)
        problem = forward_problem(handle, call, aligned and strides_aligned(tensors.values()))
        sizes, numbers = _sizes(call), _numbers(call, _sizes(call), {name: rows(t) if name in ("q", "out") else t for name, t in tensors.items()}, rows(stat))
        return loaded(handle._replace(form=form.text), form, problem, c.q.device, lambda: forward_trial(text, c)).bind(numbers, sizes)

    return _bind(_key(text, c, tensors, aligned), make)


class Backward(NamedTuple):
    """What a backward takes beside the Call. ``slots`` are the captures whose gradient is wanted."""

    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    out_low: Tensor  # empty when not kept
    lse: Tensor
    wanted: list[bool]  # dq, dk, dv
    slots: list[int]
    deterministic: bool


def backward_problem(handle: Handle, c: Call, b: Backward, aligned: bool) -> Problem:
    return _problem(
        handle, c, aligned, which="backward", deterministic=b.deterministic, dlse=b.dlse is not None, dq=b.wanted[0], dk=b.wanted[1], dv=b.wanted[2],
        capture_grads=tuple(b.slots), out_low=b.out_low is not None and b.out_low.numel() > 0,
    )  # fmt: skip


def forward_problem(handle: Handle, c: Call, aligned: bool) -> Problem:
    form = parse_handle(handle.text)[1]
    proved = static_bounds(form, c.floats, c.scale) if c.q.element_size() == 2 else {}  # only kernels of 16-bit types ask
    return _problem(handle, c, aligned, which="forward", lse=True, max_scores=handle.max_scores, out_low=keeps_low(handle, c.q), **proved)


def keeps_low(handle: Handle, q: Tensor) -> bool:
    return handle.out_low and q.element_size() == 2


def grad_dtype(lse: Tensor) -> torch.dtype:
    """Of a captured tensor's gradient: float64 on a CPU, where summing in it costs nothing, else the statistics' own."""
    return torch.float64 if lse.device.type == "cpu" else lse.dtype


def captured_sums(capture: Tensor, lse: Tensor, deterministic: bool) -> Tensor:
    """Zeros for the kernel to add a captured gradient to, as Family.grad_type says: on a GPU, when deterministic, an fg::ExactSum per entry."""
    if deterministic and lse.device.type == "cuda":
        return torch.zeros((*capture.shape, 4), dtype=torch.int64, device=lse.device)
    return torch.zeros(capture.shape, dtype=grad_dtype(lse), device=lse.device)


def _finished(sums: Tensor, lse: Tensor) -> Tensor:
    """The gradient that the kernel's sums stand for: three integer parts of quanta 2^-8, 2^-38, 2^-68 and a double (fg/sm80/grad.cuh)."""
    if sums.dtype != torch.int64:
        return sums
    first, second, third = (sums[..., i].double() * 2.0**exponent for i, exponent in enumerate((-8, -38, -68)))
    return (first + second + third + sums.view(torch.float64)[..., 3]).to(grad_dtype(lse))


def run_backward(text: str, call: Call, b: Backward) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """dq, dk, dv, delta and the captured gradients; those not wanted are empty."""
    handle, form = parse_handle(text)
    c = prepared(call)
    lse = _rows(stored(b.lse))
    b = b._replace(lse=lse)
    dq, dk, dv = (output_like(t, t.shape[-1], t.dtype) if w else t.new_empty(0) for t, w in zip((c.q, c.k, c.v), b.wanted))
    delta = torch.empty_like(lse)
    sums = [captured_sums(c.captures[n], lse, b.deterministic) for n in b.slots]
    gradients = {n: t for n, t, w in zip(("dq", "dk", "dv"), (dq, dk, dv), b.wanted) if w}
    if lse.numel() == 0:
        for t in (*gradients.values(), delta):
            t.zero_()
        return dq, dk, dv, delta, [_finished(g, lse) for g in sums]
    tensors = {"q": c.q, "k": c.k, "v": c.v, "out": _rows(stored(b.out)), "dout": _rows(stored(b.dout)), **gradients}
    dlse = None if b.dlse is None else stored(b.dlse).to(lse.dtype).contiguous()
    addresses = _addresses(c, tensors)
    addresses |= {"lse": lse.data_ptr(), "delta": delta.data_ptr(), "out_low": b.out_low.data_ptr()}
    if dlse is not None:
        addresses["dlse"] = dlse.data_ptr()
    for n, g in zip(b.slots, sums):
        addresses[f"grad_{n}"] = g.data_ptr()
    held = _tables(form, c, addresses) if c.captures else []
    bound = bound_backward(text, c, b, tensors, aligned=_starts_aligned(tensors, addresses))
    if handle.layout == "varlen" and not bound.clears:  # rows and keys that belong to no sequence
        for t in (*gradients.values(), delta):
            t.zero_()
    bound.start(addresses)
    del held
    return dq, dk, dv, delta, [_finished(g, lse) for g in sums]


def bound_backward(text: str, c: Call, b: Backward, tensors: dict[str, Tensor], *, aligned: bool, own_delta: bool = False) -> Bound:
    """The packed arguments of a backward on these tensors: ``q``, ``k``, ``v``, ``out``, ``dout`` and the gradients wanted of q, k and v.

    own_delta: the caller needs no delta, each launch allocates it.
    """

    def make() -> Bound:
        sizes, (handle, form) = _sizes(c), parse_handle(text)
        problem = backward_problem(handle, c, b, aligned and strides_aligned(tensors.values()))
        scratch = [("delta", b.lse.numel() * b.lse.element_size())] if own_delta else []
        trial = lambda: backward_trial(text, c, b)  # noqa: E731
        return loaded(handle, form, problem, c.q.device, trial).bind(_numbers(c, sizes, tensors, b.lse), sizes, scratch)

    return _bind(_key(text, c, tensors, aligned, own_delta, b.lse.stride(), b.dlse is None, b.out_low.numel() > 0, *b.wanted, *b.slots, b.deterministic), make)


# ---- what the tuner runs: a pass on the tensors of a call, with outputs of its own -----------------------------------------------------------------


def forward_trial(text: str, call: Call) -> tune.Trial:
    """The forward of a call."""
    handle, form = parse_handle(text)
    c = prepared(call)
    out, stat = output_like(c.q, c.v.shape[-1], c.q.dtype), statistics_of(c.q)
    written = {"out": out, "lse": stat}
    if handle.max_scores:
        written["max_scores"] = torch.empty_like(stat)
    if keeps_low(handle, c.q):
        written["out_low"] = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
    tensors = {"q": c.q, "k": c.k, "v": c.v, "out": out}
    addresses = {"max_scores": 0, "out_low": 0} | _addresses(c, tensors) | {name: t.data_ptr() for name, t in written.items()}
    aligned = _starts_aligned(tensors, addresses) and strides_aligned(tensors.values())
    form, c, rows = packed_heads(form, c)
    tensors |= {"q": c.q, "out": rows(out)}
    keep = tuple(_tables(form, c, addresses))
    numbers = _numbers(c, _sizes(c), tensors, rows(stat))
    return _trial(handle, form, forward_problem(handle, c, aligned), c, numbers, addresses, written, lambda: written, (), keep)


def backward_trial(text: str, call: Call, b: Backward) -> tune.Trial:
    """The backward of a call; sums of captured gradients start from zeros."""
    handle, form = parse_handle(text)
    c = prepared(call)
    gradients = {n: output_like(t, t.shape[-1], t.dtype) for n, t, w in zip(("dq", "dk", "dv"), (c.q, c.k, c.v), b.wanted) if w}
    written = gradients | {"delta": torch.empty_like(b.lse)}
    sums = {n: captured_sums(c.captures[n], b.lse, b.deterministic) for n in b.slots}
    tensors = {"q": c.q, "k": c.k, "v": c.v, "out": _rows(b.out), "dout": _rows(stored(b.dout)), **gradients}
    dlse = None if b.dlse is None else stored(b.dlse).to(b.lse.dtype).contiguous()
    held = {"lse": b.lse, "out_low": b.out_low, "delta": written["delta"], **({} if dlse is None else {"dlse": dlse})}
    held |= {f"grad_{n}": t for n, t in sums.items()}
    addresses = _addresses(c, tensors) | {name: t.data_ptr() for name, t in held.items()}
    problem = backward_problem(handle, c, b, _starts_aligned(tensors, addresses) and strides_aligned(tensors.values()))

    def results() -> dict[str, Tensor]:
        return written | {f"gradient of capture {n}": _finished(t, b.lse) for n, t in sums.items()}

    keep = (*tensors.values(), *held.values(), *_tables(form, c, addresses))
    return _trial(handle, form, problem, c, _numbers(c, _sizes(c), tensors, b.lse), addresses, written, results, tuple(sums.values()), keep)


def _trial(
    handle: Handle, form: Form, problem: Problem, c: Call, numbers: dict[str, Any], addresses: dict[str, int], written: dict[str, Tensor],
    results: Callable[[], dict[str, Tensor]], sums: tuple[Tensor, ...], keep: tuple[Tensor, ...],
) -> tune.Trial:  # fmt: skip
    sizes = _sizes(c)
    return tune.Trial(
        form, problem, _target(handle.target, c.q.device), c.q.device, handle.family, dict(handle.plan) if handle.plan else None, sizes, numbers,
        addresses, written, results, sums, lambda: _pairs(form, problem, c, sizes), (c, *keep),
    )  # fmt: skip


def _pairs(form: Form, problem: Problem, c: Call, sizes: Sizes) -> float:
    """Visible (query, key) pairs of all heads; the share that is visible is that of head 0 at the longest lengths."""
    shape = traffic.Shape(sizes.batch, sizes.heads, sizes.kv_heads, sizes.q_len, sizes.kv_len)
    share = traffic.visible_share(form, problem, shape, c.captures, c.floats, c.ints)
    if c.cu_seqlens_q is None or c.cu_seqlens_k is None:
        return share * sizes.batch * sizes.heads * sizes.q_len * sizes.kv_len
    return share * sizes.heads * float((c.cu_seqlens_q.diff().double() * c.cu_seqlens_k.diff().double()).sum())
