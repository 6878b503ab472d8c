"""Several documents in one row: as a mask on document numbers, and as packed sequences (varlen). Both give the same rows.

    python examples/documents.py

Ends with an error if a result is off.
"""

import torch

import flashgen

LENGTHS = [100, 7, 257, 36]
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32

total = sum(LENGTHS)
q, k, v = (torch.randn(1, 4, total, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

# One row of 400 tokens, and the number of the document that each belongs to. Tiles between documents are skipped.
ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(device, torch.int32)
masked = flashgen.compile(flashgen.Variant(mask=flashgen.causal & flashgen.document(ids)))(q, k, v)

# The same as packed sequences: (tokens, heads, head_dim) and the offsets where sequences begin; positions count within each.
offsets = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=device)
rows = [t[0].transpose(0, 1) for t in (q, k, v)]
packed = flashgen.compile(flashgen.Variant(mask=flashgen.causal)).varlen(*rows, cu_seqlens_q=offsets, cu_seqlens_k=offsets)

# Each document alone, by torch.
alone = [
    torch.nn.functional.scaled_dot_product_attention(*(t[:, :, first : first + n].double() for t in (q, k, v)), is_causal=True)
    for first, n in zip(offsets.tolist(), LENGTHS)
]
expected = torch.cat(alone, dim=2)
limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
for name, out in (("document mask", masked), ("packed sequences", packed.transpose(0, 1)[None])):
    error = (out - expected).abs().max().item()
    print(f"{name}: largest error against float64 {error:.1e}")
    assert error < limit

gradients = [torch.autograd.grad(out.double().square().sum(), q, retain_graph=True)[0].double() for out in (masked, packed, expected)]
errors = [((g - gradients[2]).norm() / gradients[2].norm()).item() for g in gradients[:2]]
print("gradient of q, relative errors: {:.1e}, {:.1e}".format(*errors))
assert max(errors) < limit
