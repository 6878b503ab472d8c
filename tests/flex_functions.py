"""Score and mask functions of FlexAttention's users, written from their formulas: PyTorch's own tests and attention-gym.

Each is made for batch B, heads H and length N (queries and keys), with its captured tensors; LEARNED ones return the tensors that want gradients too.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import sys

import torch
import torch.nn.functional as F

B, H, N = 2, 4, 48
INF = float("-inf")
G = torch.Generator().manual_seed(3)


def table(*shape):
    return torch.randn(*shape, generator=G)


def integers(low, high, *shape):
    return torch.randint(low, high, shape, generator=G, dtype=torch.int32)


IDS = integers(0, 4, N).sort().values
STARTS = torch.tensor([int((n > IDS).sum()) for n in range(5)], dtype=torch.int32)
LENGTHS, SCALAR, ORDER = torch.tensor([31, 40]), torch.tensor(3), torch.randperm(N, generator=G)
POINTS, SLOPES, WIDE = table(N, 3), table(H).abs(), table(H, 3)
DISTANCE, RANDOM = integers(0, 6, B, N, N), torch.rand(B, N, generator=G) < 0.3
PER_HEAD, DENSE = torch.tensor([True, False, True, True]), torch.rand(N, B, N, generator=G) < 0.5
LOGICAL = torch.stack([torch.randperm(3, generator=G), torch.randperm(3, generator=G)])
T = {name: table(*shape) for name, shape in {
    "h": (H,), "b": (B,), "q": (N,), "k": (N,), "qk": (N, N), "bqk": (B, N, N), "bhqk": (B, H, N, N), "rel": (2 * N,), "bq": (B, N), "cbhq": (1, B, H, N),
    "bhwq": (B, H, 2, N), "rh": (B, H, N, 6), "rw": (B, H, N, 8), "cpb": (49, H), "kr": (B, 1, N, 8), "qr": (B, H, N, 8), "sp": (H, 6), "n": (3, H, 6),
    "bh": (B, H),
}.items()}  # fmt: skip
LEFT, RIGHT, SHARE = T["rel"][:N], T["rel"][N:], 0.37  # two views of one tensor, and a number
ITEM_IDS, DENSE_4D = torch.stack([IDS, IDS.flip(0)]), torch.rand(B, 1, N, N, generator=G) < 0.6
CHOSEN, IMAGES = torch.rand(B, H, N // 8, N // 8, generator=G) < 0.4, torch.tensor([[0, 1], [1, 3], [2, 6], [0, 0], [5, 6], [3, 4]], dtype=torch.int32)
EDGES, PLACES = integers(0, 6, B, N, N, 3), integers(0, 49, N, N)


class Callable5:
    """A callable object, with a window of its own."""

    def __init__(self, window):
        self.window = window

    def __call__(self, s, b, h, q, k):
        return torch.where((q - k).abs() <= self.window, s, INF)


def inner(s, b, h, q, k):
    return s + (q - k)


def offset(s, b, h, q, k, by):
    return s + by * k


class Doubled(torch.autograd.Function):
    """An operation with a derivative of its own, as a function of the score may call it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def many_buffers(s, b, h, q, k):
    for n in range(6):
        s = s + T["sp"][h, n] + T["rh"][b, h, q, n] * 0.1
    return s + T["k"][k] + T["q"][q] + T["bq"][b, k]


def graph_edges(s, b, h, q, k):
    total = s * 0.0
    for n in range(3):
        total = total + T["n"][n, h, EDGES[b, q, k, n]]
    return s + total / 3


SCORES = {
    "identity": lambda s, b, h, q, k: s,
    "times two": lambda s, b, h, q, k: s * 2,
    "squared": lambda s, b, h, q, k: s * s,
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, INF),
    "inverse causal": lambda s, b, h, q, k: torch.where(q <= k, s, INF),
    "relative": lambda s, b, h, q, k: s + (q - k),
    "relative causal": lambda s, b, h, q, k: torch.where(q >= k, s + (q - k), INF),
    "alibi": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / H)),
    "trigonometric": lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.tan(b),
    "trigonometric 2": lambda s, b, h, q, k: torch.cos(s) * torch.sin(s) + torch.tan(b),
    "silu": lambda s, b, h, q, k: F.silu(s),
    "skip odd": lambda s, b, h, q, k: torch.where(k % 2 == 0, s, INF),
    "composed": lambda s, b, h, q, k: torch.where(q <= k, inner(s, b, h, q, k), INF),
    "floor division": lambda s, b, h, q, k: s - q // (1 + k),
    "log of the positive": lambda s, b, h, q, k: torch.where(s > 0, torch.log(s), s),
    "softcap": lambda s, b, h, q, k: 50 * torch.tanh(s / 50),
    "head shift": lambda s, b, h, q, k: s + 0.1 * h,
    "distance decay": lambda s, b, h, q, k: s / (1 + 1e-4 * (q - k) * (q - k)),
    "gelu for softmax": lambda s, b, h, q, k: torch.log(F.gelu(s) + 1.0),
    "callable": Callable5(7),
    "partial": functools.partial(offset, by=0.125),
    "head offset": lambda s, b, h, q, k: s * T["h"][h],
    "all axes": lambda s, b, h, q, k: s + T["q"][q] + T["b"][b] + T["h"][h],
    "bias qk": lambda s, b, h, q, k: s + T["qk"][q, k],
    "bias bqk": lambda s, b, h, q, k: s + T["bqk"][b, q, k],
    "bias bhqk": lambda s, b, h, q, k: s + T["bhqk"][b, h, q, k],
    "relative table": lambda s, b, h, q, k: s + T["rel"][q - k + N],
    "chain": lambda s, b, h, q, k: s + T["bq"][b][q],
    "chain of four": lambda s, b, h, q, k: s + T["cbhq"][0][b, h][q],
    "partly indexed": lambda s, b, h, q, k: s + T["bhwq"][b][h][0, q],
    "0-d integer": lambda s, b, h, q, k: s + SCALAR,
    "bool added": lambda s, b, h, q, k: s + DENSE[q, b, k],
    "decomposed": lambda s, b, h, q, k: s + T["rh"][b, h, q, k // 8] + T["rw"][b, h, q, k % 8],
    "documents": lambda s, b, h, q, k: torch.where(IDS[q] == IDS[k], s, INF),
    "padded": lambda s, b, h, q, k: torch.where(k <= LENGTHS[b], s, INF),
    "packed causal": lambda s, b, h, q, k: torch.where(q - STARTS[IDS[q]] >= k - STARTS[IDS[k]], s, INF),
    "position MLP": lambda s, b, h, q, k: s + T["cpb"][PLACES[q, k], h] * torch.sigmoid(T["h"][h]) * (T["q"][q] + T["k"][k]),
    "euclidean": lambda s, b, h, q, k: torch.exp(-torch.sqrt((POINTS[q] - POINTS[k]).square().sum(-1) + 1e-6) / (SLOPES[h] + 0.5)) * s,
    "view": lambda s, b, h, q, k: s + WIDE[:, 1][h],
    "key blocks": lambda s, b, h, q, k: s + T["k"][k % 4] + T["k"][k // 2] + T["q"][q % 4] + T["qk"][q, k],
    "dequantised": lambda s, b, h, q, k: s * T["bh"][b, h // 2],
    "MLA": lambda s, b, h, q, k: s + 0.25 * (T["qr"][b, h, q] * T["kr"][b, h // H, k]).sum(-1),
    "graph distance": lambda s, b, h, q, k: s + T["sp"][h, DISTANCE[b, q, k]],
    "graph edges": graph_edges,
    "permuted": lambda s, b, h, q, k: s + T["q"][ORDER[q]],
    "own derivative": lambda s, b, h, q, k: Doubled.apply(s),
    "reciprocal": lambda s, b, h, q, k: 1 / s,
    "window with an offset": lambda s, b, h, q, k: torch.where(q + SCALAR >= k, s, INF),
    "captured number": lambda s, b, h, q, k: s * SHARE,
    "log of an entry": lambda s, b, h, q, k: s + torch.log(SLOPES[0]),
    "bias of items": lambda s, b, h, q, k: s + T["b"][b],
    "bias of items and heads": lambda s, b, h, q, k: s + T["b"][b] * T["h"][h],
    "many buffers": many_buffers,
    "two views": lambda s, b, h, q, k: s + LEFT[q] - RIGHT[k],
    "of keys alone": lambda s, b, h, q, k: s + T["k"][k],
    "of rows alone": lambda s, b, h, q, k: s * T["q"][q],
    "shifted table": lambda s, b, h, q, k: s + T["rel"][k - q + N - 1] / (8 * (h + 1)),
    "causal or prefix": lambda s, b, h, q, k: torch.where((k < LENGTHS[b] // 4) | (q >= k), s, INF),
    "neighbours by division": lambda s, b, h, q, k: torch.where(((q / 8 - k / 8).abs() <= 1) | (q % 8 == k % 8), s, INF),
}  # fmt: skip


def chunk(i, size=16):
    return i // size


def natten(b, h, q, k, width=8, kernel=3):
    x, y = (q // width).clamp(1, N // width - 2), (q % width).clamp(1, width - 2)
    return ((x - k // width).abs() <= kernel // 2) & ((y - k % width).abs() <= kernel // 2)


def prefix_tree(b, h, q, k):
    return (k < 16) | (DENSE[q, 0, k] & (k <= q)) | (q == k)


def document_of(inner):
    """attention-gym's wrapper: a mask of positions within each document."""

    def mask(b, h, q, k):
        return (IDS[q] == IDS[k]) & inner(b, h, q - STARTS[IDS[q]], k - STARTS[IDS[k]])

    return mask


def batchified(inner, n=3):
    """attention-gym's: n sequences in one."""
    return lambda b, h, q, k: (q // (N // n) == k // (N // n)) & inner(b, h, q % (N // n), k % (N // n))


def morton(i):
    """The two coordinates whose bits alternate in i."""
    return (i & 1) | ((i >> 1) & 2) | ((i >> 2) & 4), ((i >> 1) & 1) | ((i >> 2) & 2) | ((i >> 3) & 4)


def morton_neighborhood(b, h, q, k):
    (qx, qy), (kx, ky) = morton(q), morton(k)
    return ((qx - kx).abs() <= 1) & ((qy - ky).abs() <= 1)


def sliding_tiles(b, h, q, k, canvas=(2, 4, 6), tile=(1, 2, 3), kernel=(1, 1, 1)):
    """Sliding-tile attention over three axes: the window of tiles is clamped into the canvas."""
    near = None
    for axis in range(3):
        inner = math.prod(canvas[axis + 1 :])
        tiles = canvas[axis] // tile[axis]
        q_tile, k_tile = (q // inner) % canvas[axis] // tile[axis], (k // inner) % canvas[axis] // tile[axis]
        centre = q_tile.clamp(kernel[axis] // 2, tiles - 1 - kernel[axis] // 2)
        close = (centre - k_tile).abs() <= kernel[axis] // 2
        near = close if near is None else near & close
    return near


def cross_attention(b, h, q, k):
    """Rows of text see the images of their interval; an image is 8 keys."""
    return (k // 8 >= IMAGES[q // 8, 0]) & (k // 8 < IMAGES[q // 8, 1])


def paged(b, h, q, k):
    return q >= LOGICAL[b, k // 16] * 16 + k % 16


def block_diffusion(b, h, q, k, half=N // 2, block=4):
    q_clean, k_clean = q >= half, k >= half
    q_block, k_block = (q % half) // block, (k % half) // block
    return ((q_block == k_block) & (q_clean == k_clean)) | ((q_block > k_block) & k_clean & ~q_clean) | ((q_block >= k_block) & k_clean & q_clean)


MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "inverse": lambda b, h, q, k: q <= k,
    "causal window": lambda b, h, q, k: (q >= k) & (q - k <= 9),
    "window of a 0-d tensor": lambda b, h, q, k: (q - k).abs() < SCALAR,
    "two ends": lambda b, h, q, k: (k < 8) | (k >= 40),
    "empty rows": lambda b, h, q, k: q < 30,
    "documents": lambda b, h, q, k: IDS[q] == IDS[k],
    "document of halves": lambda b, h, q, k: (IDS[q // 2] == IDS[k // 2]) & (q >= k),
    "offset per item": lambda b, h, q, k: q + LENGTHS[b] // 16 >= k,
    "random rows": lambda b, h, q, k: ~RANDOM[b, q],
    "lengths": lambda b, h, q, k: (q < LENGTHS[b]) & (k < LENGTHS[b]),
    "even items": lambda b, h, q, k: b % 2 == 0,
    "quotients": lambda b, h, q, k: q // 7 == k // 7,
    "frames": lambda b, h, q, k: k < (q // 6 + k * 0 + 1) * 6,
    "dense": lambda b, h, q, k: DENSE[q, b, k],
    "head types": lambda b, h, q, k: PER_HEAD[h] | (q >= k),
    "signs": lambda b, h, q, k: (q >= k) | (T["h"][h] > 0),
    "sum of b and h": lambda b, h, q, k: h + b > 0,
    "prefix": lambda b, h, q, k: (k < LENGTHS[b] // 4) | (q >= k),
    "dilated": lambda b, h, q, k: ((q - k).abs() <= 12) & ((q - k) % 3 == 0),
    "global": lambda b, h, q, k: ((q - k).abs() <= 3) | RANDOM[0, q] | RANDOM[0, k],
    "interval": lambda b, h, q, k: (k >= STARTS[IDS[q]]) & (k <= q),
    "neighborhood": natten,
    "tile": lambda b, h, q, k: (chunk(q) - chunk(k)).abs() <= 1,
    "text and video": lambda b, h, q, k: (k < 8) | (q < 8) | ((q - 8) // 10 == (k - 8) // 10) | ((q - 8) % 10 == (k - 8) % 10),
    "tree": prefix_tree,
    "documents per item": lambda b, h, q, k: ITEM_IDS[b, q] == ITEM_IDS[b, k],
    "documents but one": lambda b, h, q, k: (IDS[q] == IDS[k]) & (IDS[q] != 3),
    "dense with one head": lambda b, h, q, k: DENSE_4D[b, 0, q, k],
    "offset tensor": lambda b, h, q, k: k >= q + SCALAR,
    "causal documents": document_of(lambda b, h, q, k: q >= k),
    "shared prefix": lambda b, h, q, k: (k < 8) | ((IDS[q] == IDS[k]) & (q >= k)),
    "batchified": batchified(lambda b, h, q, k: (q >= k) & (q - k < 5)),
    "morton neighborhood": morton_neighborhood,
    "sliding tiles": sliding_tiles,
    "spatial": lambda b, h, q, k: (k < 8) | (q < 8) | (((q - 8) // 10 - (k - 8) // 10).abs() <= 1),
    "temporal": lambda b, h, q, k: (k < 8) | (q < 8) | (((q - 8) % 10 - (k - 8) % 10).abs() <= 1),
    "cross attention": cross_attention,
    "chosen tiles": lambda b, h, q, k: CHOSEN[b, h, q // 8, k // 8] & (k < LENGTHS[b]),
    "paged": paged,
    "block diffusion": block_diffusion,
}  # fmt: skip


def parameter(*shape):
    return table(*shape).to(IDS.device).requires_grad_()


def learned():
    """name -> (score function, its parameters); new parameters at each call."""
    rel, qk, hqk, bhqk, gate, clamped = parameter(2 * N), parameter(N, N), parameter(H, N, N), parameter(B, H, N, N), parameter(N), parameter(17)
    twice, chained, heads, scalar, weight, half = parameter(N), parameter(N, N), parameter(H), parameter(()), parameter(2 * N), parameter(H)
    return {
        "relative": (lambda s, b, h, q, k: s + rel[(q - k).abs()], [rel]),
        "qk": (lambda s, b, h, q, k: s + qk[q, k], [qk]),
        "hqk": (lambda s, b, h, q, k: s + hqk[h, q, k], [hqk]),
        "bhqk": (lambda s, b, h, q, k: s + bhqk[b, h, q, k], [bhqk]),
        "gate": (lambda s, b, h, q, k: s * gate[q], [gate]),
        "clamped window": (lambda s, b, h, q, k: s + clamped[(q - k).clamp(-8, 8) + 8], [clamped]),
        "indexed twice": (lambda s, b, h, q, k: s + twice[q] + twice[k], [twice]),
        "permuted": (lambda s, b, h, q, k: s + twice[ORDER[q]], [twice]),
        "chained": (lambda s, b, h, q, k: s + chained[q][k], [chained]),
        "sigmoid of heads": (lambda s, b, h, q, k: s * torch.sigmoid(heads[h]), [heads]),
        "0-d": (lambda s, b, h, q, k: s * scalar, [scalar]),
        "sum of q and k": (lambda s, b, h, q, k: s + weight[q + k], [weight]),
        "two tensors": (lambda s, b, h, q, k: s * half[h] + twice[k], [half, twice]),
        "derived": (lambda s, b, h, q, k: s + (heads * math.pi)[h], [heads]),
    }  # fmt: skip


@functools.cache
def on(device):
    """A copy of this module whose captured tensors are on the device."""
    spec = importlib.util.spec_from_file_location(f"{__name__}_{device}", __file__)
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where torch.compile looks its functions up
    spec.loader.exec_module(found)
    for names in (vars(found), found.T):
        names.update({name: value.to(device) for name, value in names.items() if isinstance(value, torch.Tensor)})
    return found
