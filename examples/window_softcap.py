"""Sliding window and soft-cap together, as in Gemma 2, with grouped-query heads; what was proved of it, and which tiles are visited.

    python examples/window_softcap.py

Ends with an error if a result is off.
"""

import torch

import flashgen

WINDOW, CAP = 256, 50.0
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32

variant = flashgen.Variant(mask=flashgen.causal & flashgen.sliding_window(left=WINDOW - 1, right=0), score=flashgen.softcap(CAP))
kernel = flashgen.compile(variant)
q = torch.randn(1, 8, 1024, 64, device=device, dtype=dtype)
k, v = (torch.randn(1, 4, 1024, 64, device=device, dtype=dtype) for _ in range(2))  # two query heads per key head
out = kernel(q, k, v)

row, col = torch.arange(1024, device=device)[:, None], torch.arange(1024, device=device)[None, :]
wide_k, wide_v = (t.double().repeat_interleave(2, dim=1) for t in (k, v))
scores = CAP * torch.tanh(q.double() @ wide_k.mT * 64**-0.5 / CAP)
scores = scores.masked_fill((col > row) | (row - col >= WINDOW), float("-inf"))
error = (out - torch.softmax(scores, -1) @ wide_v).abs().max().item()
print(f"largest error against float64: {error:.1e}")
assert error < (2e-2 if dtype == torch.bfloat16 else 1e-5)

print(kernel.explain(q, k, v))
print(flashgen.mask_text(kernel, 1024, 1024))
