"""A score and a mask function of one's own: scores that fade with distance, at a rate per head, and a prefix that every row sees.

    python examples/custom_score.py

Ends with an error if a result is off.
"""

import torch

import flashgen

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
rate = torch.linspace(0.1, 1.0, 8, device=device)  # one per head; read at each call, a new value needs no recompilation


def fading(score, b, h, q_idx, kv_idx):
    return score - rate[h] * torch.log1p(torch.abs(q_idx - kv_idx).float())


def causal_with_prefix(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) | (kv_idx < 16)


kernel = flashgen.compile(flashgen.Variant(score=fading, mask=causal_with_prefix))
q, k, v = (torch.randn(2, 8, 300, 64, device=device, dtype=dtype) for _ in range(3))
out = kernel(q, k, v)

# The same with the whole matrix of scores.
row, col = torch.arange(300, device=device)[:, None], torch.arange(300, device=device)[None, :]
scores = q.double() @ k.double().mT * 64**-0.5 - rate[:, None, None].double() * torch.log1p((row - col).abs().double())
scores = scores.masked_fill(~((col <= row) | (col < 16)), float("-inf"))
expected = torch.softmax(scores, -1) @ v.double()

error = (out - expected).abs().max().item()
print(f"largest error against float64: {error:.1e}")
assert error < (2e-2 if dtype == torch.bfloat16 else 1e-5)
print(flashgen.mask_text(kernel, 300, 300))
