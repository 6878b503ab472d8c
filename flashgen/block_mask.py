"""Block masks of the FlexAttention drop-in: a mask function with its shape, and what torch's own BlockMask says.

Mask function or torch BlockMask -> a mask function that the compiler traces. Example: ``create_block_mask(causal, None, None, 8192, 8192)``
holds the function alone: which tiles are empty or full is derived by the kernel, so nothing of the order of Q_LEN x KV_LEN is ever made.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .capture import resolve
from .errors import VariantError
from .evaluate import evaluate
from .variant import Variant, as_mask

ABSENT, PARTIAL, FULL = 0, 1, 2  # what block lists say of a block
CHUNK = 1 << 24  # elements of a mask that are evaluated at once, where one asks for its blocks
MAX_COMPARED = 1 << 34  # elements: beyond, a torch BlockMask's lists are taken as they are and not compared with its mask_mod


class OptionError(VariantError, ValueError):
    """An argument that torch's function would refuse with a ValueError."""


class SlicedMaskError(VariantError, RuntimeError):
    """A sliced torch BlockMask whose mask_mod was not set again."""


def and_masks(*mask_mods: Callable[..., Any]) -> Callable[..., Any]:
    """A mask_mod that is the intersection of the given ones; of none, everything."""
    _callables(mask_mods)

    def and_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result = b.new_ones((), dtype=torch.bool)
        for mask_mod in mask_mods:
            result = result & mask_mod(b, h, q_idx, kv_idx)
        return result

    return and_mask


def or_masks(*mask_mods: Callable[..., Any]) -> Callable[..., Any]:
    """A mask_mod that is the union of the given ones; of none, nothing."""
    _callables(mask_mods)

    def or_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result = b.new_zeros((), dtype=torch.bool)
        for mask_mod in mask_mods:
            result = result | mask_mod(b, h, q_idx, kv_idx)
        return result

    return or_mask


def _callables(mask_mods: tuple) -> None:
    for mask_mod in mask_mods:
        if not callable(mask_mod):
            raise VariantError(f"and_masks and or_masks take functions f(b, h, q_idx, kv_idx), not {type(mask_mod).__name__}.")


def create_block_mask(
    mask_mod: Callable[..., Any], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None, BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False, separate_full_blocks: bool = True, compute_dq_write_order: bool = False, dq_kv_order: bool = True,
) -> BlockMask:  # fmt: skip
    """torch's ``create_block_mask``, without making anything: an object that carries the function and its shape.

    mask_mod ``f(b, h, q_idx, kv_idx) -> bool``; B, H: None means the same for all. BLOCK_SIZE and device serve ``sparsity``, ``to_dense``
    and printing only. The other arguments are taken for compatibility and mean nothing here. Raises VariantError.
    """
    del _compile, separate_full_blocks, compute_dq_write_order, dq_kv_order
    block_q, block_kv = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    return BlockMask(mask_mod, (1 if B is None else B, 1 if H is None else H, Q_LEN, KV_LEN), (block_q, block_kv), device)


class BlockMask:
    """A mask function with the shape ``(B, H, Q_LEN, KV_LEN)`` it is meant for; B and H of 1 serve any number."""

    def __init__(self, mask_mod: Callable[..., Any], shape: tuple[int, int, int, int], block: tuple[int, int] = (128, 128), device: Any = None):
        if not torch.compiler.is_compiling():
            as_mask(mask_mod)  # raises where it is no function of four arguments
        self.mask_mod, self.shape, self.BLOCK_SIZE, self.device = mask_mod, shape, block, device

    @property
    def seq_lengths(self) -> tuple[int, int]:
        return self.shape[2:]

    def numel(self) -> int:
        """Elements of the whole mask."""
        b, h, q, k = self.shape
        return b * h * q * k

    def to(self, device: Any) -> BlockMask:
        """The same mask; captured tensors stay where they are."""
        return BlockMask(self.mask_mod, self.shape, self.BLOCK_SIZE, device)

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The mask for other lengths: the same function."""
        return BlockMask(self.mask_mod, (*self.shape[:2], new_q_len, new_kv_len), self.BLOCK_SIZE, self.device)

    def to_dense(self) -> Tensor:
        """int32 ``(B, H, Q blocks, KV blocks)``, 1 where a block holds a visible element. Evaluates the mask, in pieces."""
        parts = [some for _, some, _ in blocks_of(self.mask_mod, self.shape, self.BLOCK_SIZE, self._device())]
        return torch.cat(parts, 2).to(torch.int32)

    def sparsity(self) -> float:
        """Percentage of the mask that lies in empty blocks; a block at an edge counts whole, as in torch."""
        dense = self.to_dense()
        return 100 * (1 - int(dense.sum()) * self.BLOCK_SIZE[0] * self.BLOCK_SIZE[1] / max(self.numel(), 1))

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """A picture per batch item and head, at most ``limit``: full, partly empty and empty cells of at most ``grid_size`` rows and columns."""
        dense = self.to_dense().float()
        most = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
        rows, columns = (max(1, n if m == -1 else -(-n // m)) if m != -1 else 1 for n, m in zip(dense.shape[2:], most))
        pictures: list[str] = []
        for b, h in itertools.product(*map(range, dense.shape[:2])):
            if len(pictures) == limit:
                pictures.append("...\nto_string(limit=N) prints more.")
                break
            lines = [f"({b}, {h})"]
            for row in dense[b, h].split(rows):
                lines.append("".join("█" * 2 if x == 1 else "  " if x == 0 else "░" * 2 for x in (float(cell.mean()) for cell in row.split(columns, 1))))
            pictures.append("\n".join(lines) + "\n")
        return "\n".join(pictures)

    def _device(self) -> torch.device:
        return torch.device(self.device if self.device is not None else _accelerator())

    def __getitem__(self, index: Any) -> BlockMask:
        raise VariantError("slices of a block mask: make one for the slice, with the offset added to q_idx inside mask_mod.")

    def __str__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%,\n{self.to_string().strip()}\n)"

    def __repr__(self) -> str:
        return f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, mask_mod={self.mask_mod})"


def _accelerator() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def blocks_of(mask_mod: Any, shape: tuple[int, int, int, int], block: tuple[int, int], device: torch.device) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Pieces (first row of blocks, some visible, all visible), bool ``(B, H, rows, KV blocks)``; past the lengths counts as visible for "all"."""
    traced = Variant(mask=mask_mod).plain
    form, captures = traced.form, resolve(traced.captures, {}, device)
    (b, h, q_len, kv_len), (block_q, block_k) = shape, block
    columns = -(-kv_len // block_k)
    axis = lambda at, n, first=0: torch.arange(first, first + n, dtype=torch.int32, device=device).view([-1 if i == at else 1 for i in range(4)])  # noqa: E731
    number = lambda n: torch.tensor(n, dtype=torch.int32, device=device)  # noqa: E731
    fixed = {"b": axis(0, b), "h": axis(1, h), "k": axis(3, kv_len), "q_len": number(q_len), "kv_len": number(kv_len), "heads": number(h)}
    step = max(1, CHUNK // max(1, b * h * block_q * kv_len))
    for first in range(0, -(-q_len // block_q), step):
        start, end = first * block_q, min((first + step) * block_q, q_len)
        seen = torch.ones((b, h, end - start, kv_len), dtype=torch.bool, device=device)
        if form.mask >= 0:
            seen &= evaluate(form, form.mask, fixed | {"q": axis(2, end - start, start)}, captures, traced.floats, traced.ints, torch.float32)
        rows = -(-(end - start) // block_q)
        padding, view = (0, columns * block_k - kv_len, 0, rows * block_q - (end - start)), (b, h, rows, block_q, columns, block_k)
        padded = lambda value: torch.nn.functional.pad(seen, padding, value=value).view(view)  # noqa: E731, B023 - used at once
        yield first, padded(False).any(5).any(3), padded(True).all(5).all(3)


# ---- torch's BlockMask


class _Said(NamedTuple):
    """What was found out of a torch BlockMask, while it and its lists stay as they are; ``table`` None: its mask_mod says it all."""

    mask_mod: Any
    seq_lengths: tuple
    lists: list[Tensor]
    versions: list[int]
    table: Tensor | None

    def holds(self, block_mask: Any, lists: list[Tensor], versions: list[int]) -> bool:
        same = len(lists) == len(self.lists) and all(a is b for a, b in zip(lists, self.lists)) and versions == self.versions
        return same and block_mask.mask_mod is self.mask_mod and tuple(block_mask.seq_lengths) == self.seq_lengths


_said: weakref.WeakKeyDictionary[Any, _Said] = weakref.WeakKeyDictionary()


def mask_of(block_mask: Any) -> Any:
    """The mask function of a block mask: its mask_mod where its lists say the same, else one that keeps to the lists."""
    if isinstance(block_mask, BlockMask):
        return block_mask.mask_mod
    if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise SlicedMaskError("the mask_mod of a sliced BlockMask is not known: set block_mask.mask_mod (with the slice's offset) and block_mask.seq_lengths.")
    if torch.compiler.is_compiling():
        return _listed(block_mask, classes(block_mask))
    lists = [t for t in (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices) if t is not None]
    versions = [0 if t.is_inference() else t._version for t in lists]
    said = _said.get(block_mask)
    if said is None or not said.holds(block_mask, lists, versions):
        table = classes(block_mask)
        if table.is_cuda and torch.cuda.is_current_stream_capturing():  # comparing reads values
            return _listed(block_mask, table)
        said = _Said(block_mask.mask_mod, tuple(block_mask.seq_lengths), lists, versions, None if _agree(block_mask, table) else table)
        _said[block_mask] = said
    return block_mask.mask_mod if said.table is None else _listed(block_mask, said.table)


def classes(block_mask: Any) -> Tensor:
    """int8 ``(B, H, Q blocks, KV blocks)``: ABSENT, PARTIAL or FULL, from the lists."""
    columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    table = _scattered(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    if block_mask.full_kv_num_blocks is not None:
        table = torch.maximum(table, FULL * _scattered(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns))
    return table[(None,) * (4 - table.dim())]


def _scattered(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """1 at the first ``counts`` entries of each row of indices; the others go to one more column, which is cut off."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    place = torch.where(listed, indices.clamp(0, columns), columns).long()
    return torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.int8, device=indices.device).scatter(-1, place, 1)[..., :columns]


def _listed(block_mask: Any, table: Tensor) -> Callable[..., Any]:
    """The mask that keeps to the lists."""
    (block_q, block_k), mask_mod = block_mask.BLOCK_SIZE, block_mask.mask_mod
    one_b, one_h = table.shape[0] == 1, table.shape[1] == 1
    present, full = table != ABSENT, table == FULL  # bools: explicit blocks, which kernels step along

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        place = (0 if one_b else b, 0 if one_h else h, q_idx // block_q, kv_idx // block_k)
        return present[place] & (full[place] | mask_mod(b, h, q_idx, kv_idx))

    def in_present(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return present[0 if one_b else b, 0 if one_h else h, q_idx // block_q, kv_idx // block_k] & mask_mod(b, h, q_idx, kv_idx)

    return in_present if block_mask.full_kv_num_blocks is None else visible


def _agree(block_mask: Any, table: Tensor) -> bool:
    """Whether the lists say what mask_mod says, by evaluating it once, in pieces: nothing visible in absent blocks, all in full ones."""
    shape = (*table.shape[:2], *block_mask.seq_lengths)
    form = Variant(mask=block_mask.mask_mod).plain.form
    depends = form.depends[form.mask] if form.mask >= 0 else frozenset()
    if any(n == 1 and axis in depends for n, axis in zip(shape, "bh")) or shape[0] * shape[1] * shape[2] * shape[3] > MAX_COMPARED:
        return False
    for first, some, every in blocks_of(block_mask.mask_mod, shape, block_mask.BLOCK_SIZE, table.device):
        said = table[:, :, first : first + some.shape[2]]
        if bool((some & (said == ABSENT)).any() | (~every & (said == FULL)).any()):
            return False
    return True
