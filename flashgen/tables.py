"""Tables of the least and largest entries of captured tensors, made by torch on the tensors' device: no synchronisation, a CUDA graph captures it.

Tensor, blocked trailing dimensions -> (least, most). Example: for int32 ids ``(B, 1048576)`` two tensors ``(B, 32768)``, 256 KiB in all for B = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .bounds import BLOCK


def block_bounds(t: Tensor, dimensions: int) -> tuple[Tensor, Tensor]:
    """Least and largest entry of every BLOCK neighbours along each of the last ``dimensions`` axes, contiguous, in t's dtype."""
    first = t.dim() - dimensions
    for d in range(first, t.dim()):
        missing = -t.shape[d] % BLOCK
        if missing:  # the last block is filled up with its last entries
            last = t.narrow(d, t.shape[d] - 1, 1)
            t = torch.cat([t, last.expand([missing if e == d else n for e, n in enumerate(t.shape)])], d)
    blocks = t.reshape([*t.shape[:first], *(n for size in t.shape[first:] for n in (size // BLOCK, BLOCK))])
    inner = [first + 2 * d + 1 for d in range(dimensions)]
    if not blocks.is_cuda:
        return blocks.amin(inner), blocks.amax(inner)
    least, most = blocks.aminmax(dim=-1)  # one kernel, which reads the tensor once; on a CPU it is slower than two
    return (least.amin(inner[:-1]), most.amax(inner[:-1])) if dimensions > 1 else (least, most)
