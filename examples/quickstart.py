"""A variant with a score and a mask function of one's own, forward and backward, checked against eager attention.

    python examples/quickstart.py

Runs on the GPU in bfloat16 where there is one, else as emitted C++ on the CPU in float32. Exits 1 if a result is off.
"""

from __future__ import annotations

import sys
import time

import torch

import flashgen

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 512, 8, 2, 64
BUCKETS = 32
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32

torch.manual_seed(0)
bias = torch.randn(HEADS, BUCKETS, device=device, requires_grad=True)  # learned: a bias per head and bucket of distance


def score(score, b, h, q_idx, kv_idx):
    """Soft-capped, plus a learned bias of the distance in steps of 16."""
    bucket = torch.clamp((q_idx - kv_idx) // 16, 0, BUCKETS - 1)
    return 20.0 * torch.tanh(score / 20.0) + bias[h, bucket]


def mask(b, h, q_idx, kv_idx):
    """Causal; the first four keys are always visible, others within 200."""
    return (kv_idx <= q_idx) & ((kv_idx < 4) | (q_idx - kv_idx < 200))


def eager(q, k, v, table):
    """The same attention with the whole matrix of scores, in the dtype of its inputs."""
    q_idx, kv_idx = torch.arange(LENGTH, device=device)[:, None], torch.arange(LENGTH, device=device)[None, :]
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * HEAD_DIM**-0.5
    bucket = torch.clamp((q_idx - kv_idx) // 16, 0, BUCKETS - 1)
    scores = 20.0 * torch.tanh(scores / 20.0) + table[:, bucket]
    visible = (kv_idx <= q_idx) & ((kv_idx < 4) | (q_idx - kv_idx < 200))
    return torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1) @ v


def run(attention, table, inputs, weight):
    """Output and the gradients of q, k, v and the table, as float64."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = attention(*leaves)
    gradients = torch.autograd.grad(out, [*leaves, table], weight.to(out.dtype))
    return [t.double() for t in (out, *gradients)]


def main() -> int:
    shapes = [(2, HEADS, LENGTH, HEAD_DIM), (2, KV_HEADS, LENGTH, HEAD_DIM), (2, KV_HEADS, LENGTH, HEAD_DIM)]
    inputs = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    weight = torch.randn(shapes[0], device=device, dtype=dtype)

    kernel = flashgen.compile(flashgen.Variant(score=score, mask=mask))
    print(f"flashgen {flashgen.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, {dtype}")
    print("q, k, v:", *map(tuple, shapes))
    for attempt in ("first call (plans, emits and compiles unless cached)", "second call"):
        started = time.perf_counter()
        ours = run(kernel, bias, inputs, weight)
        print(f"{attempt}, forward and backward: {time.perf_counter() - started:.3f} s")

    def eager_in(to):
        table = bias.detach().to(to).requires_grad_()
        return run(lambda q, k, v: eager(q, k, v, table), table, [t.to(to) for t in inputs], weight)

    exact, plain = eager_in(torch.float64), eager_in(dtype)
    print(f"\nLargest error against float64{'':11}flashgen     eager in {dtype}")
    passed = True
    for name, a, e, p in zip(("out", "dq", "dk", "dv", "d bias"), ours, exact, plain, strict=True):
        error, eager_error = (a - e).abs().max().item(), (p - e).abs().max().item()
        # no worse than three times eager arithmetic in the same type; float32 sums may differ by their order alone
        good = error <= 3 * eager_error + 1e-5 * e.abs().max().item()
        passed = passed and good
        print(f"  {name:8} (largest value {e.abs().max().item():8.3g})  {error:11.2e}  {eager_error:15.2e}  {'ok' if good else 'OFF'}")

    print("\n" + kernel.explain(*inputs))
    print("\nThe emitted source: kernel.source(), or python -m flashgen emit.", "All agree." if passed else "SOME RESULTS ARE OFF.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
