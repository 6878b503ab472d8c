"""Masks to analyse: named ones, and a generator of random combinations."""

from __future__ import annotations

import random
import re

import torch

import flashgen as fg

G = torch.Generator().manual_seed(7)
N = 24  # tables cover every length below
SORTED = torch.randint(0, 4, (N,), generator=G, dtype=torch.int32).sort().values
SORTED_LONG, RANDOM = SORTED.long(), torch.randint(0, 4, (N,), generator=G, dtype=torch.int32)
PER_ITEM = torch.stack([SORTED, RANDOM])
STARTS = torch.tensor([int((n > SORTED).sum()) for n in range(5)], dtype=torch.int32)
COUNTS, FLAGS = torch.tensor([7, 15], dtype=torch.int32), torch.rand(N, generator=G) < 0.15
CUBE = torch.rand(2, 2, 4, 4, generator=G) < 0.5
WEIGHTS = torch.randn(N, generator=G)

# masks whose every tile interval evaluation must classify exactly
EXACT = {
    "causal": fg.causal, "causal_top_left": fg.causal_top_left, "window": fg.causal & fg.sliding_window(5, 0), "open window": fg.sliding_window(-1, 3),
    "left window": fg.sliding_window(2, -1), "prefix": fg.prefix_lm(6), "prefix per item": fg.prefix_lm(COUNTS), "padding": fg.padding(COUNTS),
    "chunked": fg.chunked(4), "causal and padding": fg.causal & fg.padding(COUNTS), "rows only": lambda b, h, q, k: q < 9,
    "heads": lambda b, h, q, k: (h == 0) | (k <= q),
    "nothing": lambda b, h, q, k: (k <= q) & (k > q + 30), "everything": lambda b, h, q, k: k >= 0, "constant": lambda b, h, q, k: False,
    "batch": lambda b, h, q, k: b % 2 == 0,
}  # fmt: skip
# exact as well where a tile's ids are one run, which sorted ids give up only at document borders
SOUND = {
    "document": fg.document(SORTED), "document int64": fg.document(SORTED_LONG), "document per item": fg.document(PER_ITEM), "random ids": fg.document(RANDOM),
    "causal document": fg.causal & fg.document(SORTED), "starts": lambda b, h, q, k: (k >= STARTS[SORTED[q]]) & (k <= q),
    "symmetric": lambda b, h, q, k: (q - k).abs() < 4,
    "dilated": fg.dilated(3), "global": fg.sliding_window(3, 0) | fg.global_tokens(FLAGS), "neighborhood": fg.neighborhood((4, 5), (3, 3)),
    "neighborhood dilated": fg.neighborhood((19,), 3, 2), "blocks": fg.block_sparse(CUBE, 6), "dense": lambda b, h, q, k: CUBE[b, h, q // 6, k // 6],
    "float division": lambda b, h, q, k: ((q / 4 - k / 4).abs() <= 1) | (q % 4 == k % 4), "float number": lambda b, h, q, k: q - k < 2.5,
    "weights": lambda b, h, q, k: WEIGHTS[k] > 0,
    "shift": lambda b, h, q, k: (q >> 2 == k >> 2) | (k & 3 == 0), "where": lambda b, h, q, k: torch.where(q < 8, k < 4, k >= q),
    "xor": lambda b, h, q, k: (k <= q) ^ (k < 5),
    "negated": ~(fg.causal & ~fg.chunked(3)), "nested floor division": lambda b, h, q, k: (q // 2) // 3 >= k // 5 - 1,
    "scaled": lambda b, h, q, k: 3 * k - 2 * q <= 7,
    "clamped": lambda b, h, q, k: (q.clamp(3, 15) - k).abs() <= 2, "maximum": lambda b, h, q, k: torch.maximum(q - 5, k) < 9,
    "minimum": lambda b, h, q, k: torch.minimum(q, k) > 2,
    "bool comparison": lambda b, h, q, k: (q > 4) == (k > 4), "counted": lambda b, h, q, k: (q > 4).int() + (k > 4).int() + (k > q).int() >= 2,
    "ne": lambda b, h, q, k: q != k,
    "two windows": lambda b, h, q, k: ((q - k >= 0) & (q - k < 3)) | ((q - k > 8) & (q - k < 12)), "integer condition": lambda b, h, q, k: (q - k) & 6,
    "infinite": lambda b, h, q, k: q * 1.0 < float("inf"), "traced divisor": lambda b, h, q, k: q % (k + 1) == 0,
    "negative divisor": lambda b, h, q, k: q // -3 == -(k // 3),
    "large": lambda b, h, q, k: (q.long() + 2**60) * 4 > k, "bits": lambda b, h, q, k: (q ^ k) < 8, "power": lambda b, h, q, k: (q - k) ** 2 < 20,
    "modulo of a shifted": lambda b, h, q, k: (k + 1) % 7 < 3,
}  # fmt: skip
INDICES = (
    "q", "k", "q - k", "k - q", "q + off", "q + off - k", "q // D", "k // D", "(q + off) // D", "k % D", "q % D",
    "q // D - k // D", "abs(q - k)", "abs(q + off - k)",
    "2 * k - q", "min(q, N)", "max(k, N)", "q.clamp(3, 11)", "-k", "ids[q]", "ids[k]", "starts[ids[q]]", "counts[b]", "3 * k", "q - D * k", "k * (h + 1)",
)  # fmt: skip


def generated(seed):
    """A random mask over & | ^ ~ of comparisons of index expressions, as text and as the function."""
    r = random.Random(seed)

    def tree(depth):
        if depth == 0 or r.random() < 0.2:
            return f"({r.choice(INDICES)} {r.choice(['<=', '<', '>=', '>', '==', '!='])} {r.choice(['N', 'N', r.choice(INDICES)])})"
        op = r.choice("&&||^~")
        return f"(~{tree(depth - 1)})" if op == "~" else f"({tree(depth - 1)} {op} {tree(depth - 1)})"

    text = re.sub(r"\b[ND]\b", lambda m: str(r.choice((2, 3, 4, 7)) if m[0] == "D" else r.randrange(-4, 20)), tree(3))
    names = {"ids": r.choice([SORTED, RANDOM]), "starts": STARTS, "counts": COUNTS, "off": fg.kv_len - fg.q_len}
    return text, eval(f"lambda b, h, q, k: {text}", names)
