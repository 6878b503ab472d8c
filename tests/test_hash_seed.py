"""Is the emitted text the same in every process, whatever the seed of Python's string hashes?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROGRAM = """
import hashlib, sys, torch
sys.path.insert(0, {root!r})
import flashgen as fg

torch.manual_seed(0)
table, ids, gate = torch.randn(4, 21, requires_grad=True), torch.arange(64).int() // 9, torch.randn(4, requires_grad=True)
variants = {{
    "window": fg.Variant(64, mask=fg.causal & fg.sliding_window(100, 3), score=fg.softcap(30.0) >> fg.alibi()),
    "document": fg.Variant(64, mask=(fg.document(ids) & fg.causal) | fg.prefix_lm(5) | fg.global_tokens(ids > 5), sink=True),
    "learned": fg.Variant((64, 32), score=lambda s, b, h, q, k: s * torch.sigmoid(gate[h]) + table[h, (q - k).clamp(-10, 10) + 10] + gate[(h + 1) % 4]),
    "grid": fg.Variant(64, mask=fg.neighborhood((4, 4, 4), (3, 2, 3), (1, 2, 1)), score=fg.t5_bias(torch.zeros(32, 4))),
}}
for name, variant in variants.items():
    for target in ("cpu", "sm80"):
        for which in ("forward", "backward") if name == "learned" else ("forward",):
            text = fg.compile(variant, target=target).source(which=which)
            print(name, target, which, hashlib.sha256(text.encode()).hexdigest(), hashlib.sha256(variant.trace({{}}).form.text.encode()).hexdigest())
"""


def test_two_hash_seeds_give_one_text():
    program, pipe = PROGRAM.format(root=str(ROOT)), subprocess.PIPE
    command = [sys.executable, "-c", program]
    running = [subprocess.Popen(command, env=os.environ | {"PYTHONHASHSEED": seed}, stdout=pipe, stderr=pipe, text=True) for seed in ("1", "4242")]
    (first, error), (second, _) = (process.communicate() for process in running)
    assert len(first.splitlines()) == 10, error
    assert first == second
