"""Checks of a call: every user error that the host can see without a synchronisation, raised before any launch.

Tensors are read by shape, dtype, device and stride only; values are read when they lie on the CPU (or with FLASHGEN_DEBUG >= 1).
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from . import settings
from .errors import DeviceError, DtypeError, ShapeError, VariantError
from .language import Capture, dtype_name
from .variant import MAX_HEAD_DIM, Variant

SUPPORTED = {"cpu": ("float64", "float32", "bfloat16", "float16"), "cuda": ("float32", "bfloat16", "float16")}
AUX = ("lse", "max_scores")


def tensors(variant: Variant, kind: str, named: Mapping[str, Any], ndim: int, layout: str) -> None:
    """q, k, v: rank, dtype, device, head dims. ``kind`` is "cpu" or "cuda", what the kernel is built for."""
    for name, t in named.items():
        tensor(name, t)
        if t.dim() != ndim:
            raise ShapeError(f"{name} has shape {tuple(t.shape)}: {ndim} dimensions are wanted, {layout}.")
    q, k, v = named.values()
    names = {n: dtype_name(t.dtype) for n, t in named.items()}
    if len(set(names.values())) > 1:
        raise DtypeError(f"mixed dtypes {', '.join(f'{n} {d}' for n, d in names.items())}: cast them to one dtype, or call under torch.autocast.")
    if names["q"] not in SUPPORTED[kind]:
        raise DtypeError(f"dtype {names['q']}: {kind} kernels take {', '.join(SUPPORTED[kind])}. Cast the inputs.")
    devices = {n: t.device for n, t in named.items()}
    if len(set(devices.values())) > 1:
        raise DeviceError(f"tensors on different devices: {', '.join(f'{n} on {d}' for n, d in devices.items())}. Move them to one.")
    dims = (q.shape[-1], v.shape[-1])
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(f"q has head_dim {q.shape[-1]} and k {k.shape[-1]}: they must be equal.")
    for d in dims:
        if not 1 <= d <= MAX_HEAD_DIM:
            raise ShapeError(f"head_dim={d}: the limit is 1..{MAX_HEAD_DIM} (value dim split by columns) on cpu and sm80, 256 on sm90. Split the heads.")
    if variant.head_dim is not None and dims != variant.head_dim:
        raise ShapeError(f"the variant is for head_dim (qk, v) = {variant.head_dim}, the tensors have {dims}: use Variant(head_dim=None) or matching tensors.")


def tensor(name: str, t: Any) -> None:
    """A torch tensor with ordinary strided storage."""
    if not hasattr(t, "data_ptr"):
        raise VariantError(f"{name} is a {type(t).__name__}: torch tensors are wanted.")
    if t.is_nested:
        raise VariantError(f"{name} is a nested tensor: pass packed tensors to kernel.varlen with cu_seqlens.")
    if str(t.layout) != "torch.strided":
        raise VariantError(f"{name} has the layout {str(t.layout)[6:]}: dense, strided tensors are wanted; convert it with .to_dense().")


def heads(q_heads: int, k_heads: int, v_heads: int) -> None:
    if k_heads != v_heads:
        raise ShapeError(f"k has {k_heads} heads and v {v_heads}: they must be equal.")
    if k_heads == 0 or q_heads % k_heads:
        raise ShapeError(f"{q_heads} query heads on {k_heads} kv heads: query heads must be a multiple of kv heads.")


def dense(q: Any, k: Any, v: Any) -> None:
    """Batches, heads and lengths of (B, H, L, D) tensors."""
    heads(q.shape[1], k.shape[1], v.shape[1])
    if k.shape[2] != v.shape[2]:
        raise ShapeError(f"k has length {k.shape[2]} and v {v.shape[2]}: they must be equal.")
    batch = q.shape[0]
    if k.shape[0] != v.shape[0] or k.shape[0] not in (1, batch):
        raise ShapeError(f"batch sizes q {batch}, k {k.shape[0]}, v {v.shape[0]}: k and v must have q's batch size, or both 1.")
    for name, n in (("q", q.shape[2]), ("k", k.shape[2])):
        if n >= 2**31 - 65536:
            raise ShapeError(f"{name} has length {n}: the limit is 2^31 - 65536 (indices are int32).")


def packed(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> None:
    """Packed (T, H, D) tensors and their int32 offsets."""
    heads(q.shape[1], k.shape[1], v.shape[1])
    if k.shape[0] != v.shape[0]:
        raise ShapeError(f"k has {k.shape[0]} rows and v {v.shape[0]}: they must be equal.")
    for name, cu, rows in (("cu_seqlens_q", cu_q, q.shape[0]), ("cu_seqlens_k", cu_k, k.shape[0])):
        int32_vector(name, cu, q.device)
        if cu.shape[0] < 1:
            raise ShapeError(f"{name} is empty: it holds N + 1 offsets, the first 0.")
        if readable(cu):
            offsets(name, cu, rows)
    if cu_q.shape != cu_k.shape:
        raise ShapeError(f"cu_seqlens_q holds {cu_q.shape[0] - 1} sequences and cu_seqlens_k {cu_k.shape[0] - 1}: they must be equal.")


def offsets(name: str, cu: Any, rows: int) -> None:
    values = cu.tolist()
    if values[0] != 0 or any(b < a for a, b in pairwise(values)) or values[-1] > rows:
        raise ShapeError(f"{name} = {_short(values)}: offsets start at 0, never fall, and end within the tensor's {rows} rows.")


def longest(name: str, cu: Any, given: int | None) -> int:
    """The longest sequence's length; ``given`` must reach it."""
    real = int((cu[1:] - cu[:-1]).max()) if cu.shape[0] > 1 else 0
    if given is not None and given < real:
        raise ShapeError(f"{name}={given}: the longest sequence has {real} rows.")
    return real


def int32_vector(name: str, t: Any, device: Any, length: int | None = None) -> None:
    if not hasattr(t, "data_ptr"):
        raise VariantError(f"{name} is a {type(t).__name__}: an int32 tensor is wanted.")
    if dtype_name(t.dtype) != "int32":
        raise DtypeError(f"{name} has dtype {dtype_name(t.dtype)}: int32 is wanted.")
    if t.dim() != 1 or (length is not None and t.shape[0] != length):
        raise ShapeError(f"{name} has shape {tuple(t.shape)}: ({'N' if length is None else length},) is wanted.")
    if t.device != device:
        raise DeviceError(f"{name} is on {t.device}, q on {device}: move it.")


def seqlens(t: Any, batch: int, kv_len: int, device: Any) -> None:
    int32_vector("seqlens_k", t, device, batch)
    if readable(t):
        used_lengths(t, kv_len)


def used_lengths(t: Any, kv_len: int) -> None:
    if t.numel():
        low, high = int(t.min()), int(t.max())
        if low < 0 or high > kv_len:
            raise ShapeError(f"seqlens_k holds {low if low < 0 else high}: each must lie in 0..{kv_len}, the length of k.")


def sink(variant: Variant, t: Any, q_heads: int, device: Any) -> None:
    if (t is not None) != variant.sink:
        given = (
            "a sink was given, but the variant has none: use Variant(sink=True)" if t is not None else "the variant has a sink: pass sink=tensor of shape (Hq,)"
        )
        raise VariantError(given + ".")
    if t is None:
        return
    if not hasattr(t, "data_ptr"):
        raise VariantError(f"sink is a {type(t).__name__}: a float tensor of shape (Hq,) is wanted.")
    if not t.is_floating_point():
        raise DtypeError(f"sink has dtype {dtype_name(t.dtype)}: it must be floating.")
    if tuple(t.shape) != (q_heads,):
        raise ShapeError(f"sink has shape {tuple(t.shape)}: ({q_heads},), one logit per query head, is wanted.")
    if t.device != device:
        raise DeviceError(f"sink is on {t.device}, q on {device}: move it.")


def aux(return_aux: Any) -> tuple[str, ...]:
    """Names of the statistics wanted."""
    if isinstance(return_aux, bool):
        return AUX if return_aux else ()
    if isinstance(return_aux, Sequence) and not isinstance(return_aux, str) and all(n in AUX for n in return_aux):
        return tuple(return_aux)
    raise VariantError(f"return_aux={return_aux!r}: True, False, or a tuple of {AUX}.")


def dropout(p: Any, seed: Any) -> None:
    """A probability, and a 64-bit unsigned seed or None."""
    if isinstance(p, bool) or not isinstance(p, numbers.Real) or not 0.0 <= float(p) <= 1.0:
        raise VariantError(f"dropout_p={p!r}: a probability in 0..1 is wanted.")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= int(seed) < 2**64):
        raise VariantError(f"seed={seed!r}: an integer in 0..2^64 - 1, or None.")


def given_inputs(wanted: Mapping[str, int], inputs: Any) -> dict[str, Any]:
    """The tensors for the variant's ``flashgen.input`` names."""
    inputs = {} if inputs is None else inputs
    if not isinstance(inputs, Mapping):
        raise VariantError(f"inputs is a {type(inputs).__name__}: a dict from names to tensors is wanted.")
    missing, extra = sorted(set(wanted) - set(inputs)), sorted(map(str, set(inputs) - set(wanted)))
    if missing or extra:
        lack = f"missing: {', '.join(missing)}. " if missing else ""
        more = f"not of this variant: {', '.join(extra)}. " if extra else ""
        raise VariantError(f"inputs: {lack}{more}The variant names {', '.join(sorted(wanted)) or 'none'} with flashgen.input.")
    for name, t in inputs.items():
        tensor(f"inputs[{name!r}]", t)
        if t.dim() != wanted[name]:
            raise ShapeError(f"inputs[{name!r}] has shape {tuple(t.shape)}: flashgen.input said ndim={wanted[name]}.")
    return dict(inputs)


def captures(specs: Sequence[Capture], given: Sequence[Any], sizes: Mapping[str, int], device: Any) -> None:
    """Devices, and the shapes that the catalogue knows: ``sizes`` are B, H, Q and K of this call."""
    for spec, t in zip(specs, given):
        tensor("a captured tensor", t)
        what = f"captured tensor {spec.name!r}" if spec.name else f"a captured tensor of shape {tuple(t.shape)}"
        if t.device != device and not (t.dim() == 0 and t.device.type == "cpu"):
            raise DeviceError(f"{what} is on {t.device}, q on {device}: move it (it is read at each call).")
        for d, wanted in enumerate(spec.expect or ()):
            if wanted is not None and not _fits(wanted, t.shape[d], sizes):
                raise ShapeError(f"{what}: dimension {d} is {t.shape[d]}, wanted is {_wanted(wanted, sizes)}.")
        if any(n >= 2**31 for n in t.shape):
            raise ShapeError(f"{what}: a dimension of 2^31 or more cannot be indexed.")


def spanned(dimensions: Sequence[tuple[int, int, str]], given: Sequence[Any], sizes: Mapping[str, int]) -> None:
    """Dimensions that are indexed by plain h or b, see ``Form.spanned``, hold every head or batch item."""
    for slot, d, axis in dimensions:
        n = given[slot].shape[d]
        if n < sizes[axis]:
            index, name = ("h", "query heads") if axis == "H" else ("b", "batch items")
            raise ShapeError(
                f"a captured tensor of shape {tuple(given[slot].shape)}: dimension {d} is indexed by {index} and holds {n}, there are {sizes[axis]} {name}. "
                f"Give it {sizes[axis]}, or compute the index, such as t[{index} // 2]."
            )


def _needed(wanted: str | int, sizes: Mapping[str, int]) -> int:
    if isinstance(wanted, int):
        return wanted
    if "/" in wanted:
        axis, block = wanted.split("/")
        return -(-sizes[axis] // int(block))
    return max(sizes[a] for a in wanted)


def _fits(wanted: str | int, n: int, sizes: Mapping[str, int]) -> bool:
    """Tables along q or k for both ("QK") may be longer than needed, all else is exact."""
    return n >= _needed(wanted, sizes) if wanted == "QK" else n == _needed(wanted, sizes)


def _wanted(wanted: str | int, sizes: Mapping[str, int]) -> str:
    name = {"B": "the batch size", "H": "the number of query heads", "Q": "q's length", "K": "k's length", "QK": "at least the longer of q and k"}
    return f"{_needed(wanted, sizes)} ({name.get(str(wanted), 'the number of blocks' if '/' in str(wanted) else 'fixed')})"


def readable(t: Any) -> bool:
    """Values on the CPU are always checked, in torch.compile's graph by the operator; those on a GPU only when debugging: reading them synchronises."""
    import torch

    if torch.compiler.is_compiling():
        return False
    return t.device.type == "cpu" or (t.device.type == "cuda" and settings.debug() >= 1)


def _short(values: list) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"
