"""A learned bias of the distance, per head: the kernel's backward gives the gradient of the captured table. Here it learns a given table back.

    python examples/learned_bias.py

Ends with an error if a result is off.
"""

import torch

import flashgen

HEADS, REACH, LENGTH = 4, 8, 128  # distances beyond REACH share an entry
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
true_table = torch.randn(HEADS, 2 * REACH + 1, device=device)
table = torch.zeros_like(true_table, requires_grad=True)

# One compiled kernel serves both: the tables are its arguments.
teacher, student = (flashgen.compile(flashgen.Variant(score=flashgen.relative_bias(t))) for t in (true_table, table))
optimizer = torch.optim.Adam([table], lr=0.1)
for step in range(201):
    q, k, v = (torch.randn(2, HEADS, LENGTH, 32, device=device) for _ in range(3))
    loss = (student(q, k, v) - teacher(q, k, v)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.2e}")

# A softmax does not see a constant: compare the tables without their means.
difference = (table - table.mean(1, keepdim=True)) - (true_table - true_table.mean(1, keepdim=True))
print(f"the tables differ by {difference.abs().max().item():.3f} of values up to {true_table.abs().max().item():.1f}")
assert difference.abs().max() < 0.1
