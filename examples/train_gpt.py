"""Train a GPT-2-shaped model on bytes of real text, once with flashgen and once with torch's SDPA from the same seed, and plot both loss curves.

    python examples/train_gpt.py                            a small model, one to two minutes on two cores
    python examples/train_gpt.py --preset 124m              GPT-2's own shape, for a GPU (bfloat16 autocast); 1.3b likewise
    python examples/train_gpt.py --attention all            beside SDPA's choice, its cuDNN and FlashAttention-2 backends, and compiled FlexAttention
    python examples/train_gpt.py --attention all --rounds 3 the same three times, each round beginning with another one: to compare speeds on a GPU, whose
                                                            first run is the slowest, whichever it is; tokens/s are medians, losses those of the first round
    python examples/train_gpt.py --variant window-alibi     sliding window + ALiBi: SDPA has no kernel for it and is given the bias as a dense tensor

The text is the source of Python's standard library, which every machine has. Writes losses.json and, with matplotlib, losses.png into --out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import sysconfig
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashgen
from flashgen.turns import in_turn

WINDOW = 128  # keys that a row of the window-alibi variant sees, itself included


@dataclass(frozen=True)
class Preset:
    layers: int
    heads: int
    width: int
    vocabulary: int  # bytes use the first 256 entries; GPT-2's own number keeps its parameter count
    length: int
    batch: int
    steps: int
    learning_rate: float


PRESETS = {
    "small": Preset(layers=4, heads=4, width=160, vocabulary=256, length=256, batch=8, steps=300, learning_rate=2e-3),
    "124m": Preset(layers=12, heads=12, width=768, vocabulary=50257, length=1024, batch=16, steps=300, learning_rate=6e-4),
    "1.3b": Preset(layers=24, heads=16, width=2048, vocabulary=50257, length=2048, batch=8, steps=100, learning_rate=2e-4),
}
VARIANTS = {
    "causal": flashgen.Variant(mask=flashgen.causal),
    "window-alibi": flashgen.Variant(mask=flashgen.causal & flashgen.sliding_window(left=WINDOW - 1, right=0), score=flashgen.alibi()),
}


class FlashgenAttention:
    """q, k, v ``(batch, length, heads, head_dim)`` -> the same shape."""

    def __init__(self, variant: str) -> None:
        self.kernel = flashgen.compile(VARIANTS[variant])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.kernel(q, k, v, layout="blhd")


class SdpaAttention:
    """The same through torch's scaled_dot_product_attention: the backend that it chooses, or one of its own."""

    def __init__(self, variant: str, *backends: SDPBackend) -> None:
        self.causal, self.dense, self.backends = variant == "causal", None, list(backends)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.causal and self.dense is None:
            self.dense = window_alibi_bias(q.shape[1], q.shape[2]).to(q.device, q.dtype)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(self.backends) if self.backends else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.dense, is_causal=self.causal).transpose(1, 2)


class FlexAttention:
    """The same through torch's compiled flex_attention."""

    def __init__(self, variant: str) -> None:
        from torch.nn.attention import flex_attention

        torch._dynamo.reset()  # in a later round it would be compiled once more, until a limit
        self.causal, self.make_mask, self.attend = variant == "causal", flex_attention.create_block_mask, torch.compile(flex_attention.flex_attention)
        self.mask = self.score = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.mask is None:
            seen = (lambda b, h, q, k: q >= k) if self.causal else (lambda b, h, q, k: (q >= k) & (q - k < WINDOW))
            self.mask = self.make_mask(seen, None, None, q.shape[1], q.shape[1], device=q.device)
            slopes = torch.tensor(alibi_slopes(q.shape[2]), device=q.device)
            self.score = None if self.causal else lambda s, b, h, q, k: s - slopes[h] * (q - k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.attend(q, k, v, score_mod=self.score, block_mask=self.mask).transpose(1, 2)


ATTENTIONS = {
    "flashgen": FlashgenAttention,
    "sdpa": SdpaAttention,
    "cudnn": lambda variant: SdpaAttention(variant, SDPBackend.CUDNN_ATTENTION),
    "flash": lambda variant: SdpaAttention(variant, SDPBackend.FLASH_ATTENTION),
    "flex": FlexAttention,
}
SETS = {"both": ("flashgen", "sdpa"), "all": tuple(ATTENTIONS)}


def alibi_slopes(heads: int) -> list[float]:
    """Of ALiBi (Press et al. 2022)."""
    power = 2 ** math.floor(math.log2(heads))
    return [2 ** (-8 * (h + 1) / power) if h < power else 2 ** (-4 * (2 * (h - power) + 1) / power) for h in range(heads)]


def window_alibi_bias(length: int, heads: int) -> Tensor:
    """The ``(heads, length, length)`` matrix of ALiBi's penalties, -inf outside the causal window."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    bias = -torch.tensor(alibi_slopes(heads))[:, None, None] * distance
    return bias.masked_fill((distance < 0) | (distance >= WINDOW), -math.inf)


class Block(nn.Module):
    def __init__(self, preset: Preset, attention) -> None:
        super().__init__()
        self.heads, self.attention = preset.heads, attention
        self.norm_1, self.norm_2 = nn.LayerNorm(preset.width), nn.LayerNorm(preset.width)
        self.qkv, self.project = nn.Linear(preset.width, 3 * preset.width), nn.Linear(preset.width, preset.width)
        self.up, self.down = nn.Linear(preset.width, 4 * preset.width), nn.Linear(4 * preset.width, preset.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.project(self.attention(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2: learned positions (none with ALiBi, whose penalties tell distances), pre-norm blocks, tied output weights."""

    def __init__(self, preset: Preset, length: int, variant: str, attention) -> None:
        super().__init__()
        self.tokens = nn.Embedding(preset.vocabulary, preset.width)
        self.positions = nn.Embedding(length, preset.width) if variant == "causal" else None
        self.blocks = nn.ModuleList(Block(preset, attention) for _ in range(preset.layers))
        self.norm = nn.LayerNorm(preset.width)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * preset.layers) if name.endswith(("project.weight", "down.weight")) else 1))

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


def library_text(limit: int) -> Tensor:
    """Bytes of the standard library's Python files in the order of their names, at most ``limit``."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts and "dist-packages" not in path.parts:
            text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def train(name: str, options: argparse.Namespace, preset: Preset, text: Tensor) -> dict:
    """One run from the seed: the loss of each step, the mean of the last tenth, tokens per second of the later half."""
    torch.manual_seed(options.seed)
    attention = ATTENTIONS[name](options.variant)
    with torch.device(options.device):
        model = GPT(preset, options.length, options.variant, attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=preset.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = max(1, options.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * s / options.steps))))
    batches = torch.Generator().manual_seed(options.seed)  # the same batches in every run
    window = torch.arange(options.length + 1)
    gpu = options.device == "cuda"
    losses: list[Tensor] = []
    skipped = options.steps // 2  # compilation, warm-up, and until the clock of a GPU at its power limit has settled
    started = time.perf_counter()
    for step in range(options.steps):
        if step == skipped:
            if gpu:
                torch.cuda.synchronize()
            started = time.perf_counter()
        starts = torch.randint(len(text) - options.length - 1, (options.batch, 1), generator=batches)
        rows = text[starts + window].long().to(options.device)
        with torch.autocast("cuda", torch.bfloat16, enabled=gpu):
            loss = model(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step % max(1, options.steps // 5) == 0 or step == options.steps - 1:
            print(f"  {name} step {step}: loss {loss.item():.4f}", flush=True)
    values = torch.stack(losses).tolist()
    seconds = time.perf_counter() - started
    last = values[-max(1, options.steps // 10) :]
    return {
        "losses": values,
        "final": sum(last) / len(last),
        "tokens_per_second": (options.steps - skipped) * options.batch * options.length / seconds,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def plot(runs: dict[str, dict], title: str, path: Path) -> bool:
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for (name, run), style in zip(runs.items(), ("-", "--", "-.", ":", (0, (1, 5)))):
        axes.plot(run["losses"], linestyle=style, label=f"{name}: {run['final']:.4f}")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.legend(title="mean of the last tenth")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


def parse(arguments: list[str] | None) -> argparse.Namespace:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tuple(PRESETS), default="small")
    parser.add_argument("--variant", choices=tuple(VARIANTS), default="causal")
    parser.add_argument("--attention", choices=(*ATTENTIONS, *SETS), default="both")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--out", type=Path, default=Path("train_gpt_out"))
    options = parser.parse_args(arguments)
    for name in ("steps", "batch", "length"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(PRESETS[options.preset], name))
    for name in ("steps", "batch", "length", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: a positive integer is wanted")
    chosen = SETS.get(options.attention, (options.attention,))
    if options.device == "cpu" and not set(chosen) <= {"flashgen", "sdpa"}:
        parser.error(f"--attention {options.attention}: cudnn, flash and flex need a GPU to train")
    if options.variant != "causal" and "flash" in chosen:
        parser.error(f"--attention {options.attention} --variant {options.variant}: SDPA's FlashAttention backend takes no bias")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    preset = PRESETS[options.preset]
    text = library_text(4_000_000 if options.preset == "small" else 40_000_000)
    size = f"{options.steps} steps of {options.batch} x {options.length} bytes"
    print(f"{len(text) / 1e6:.1f} MB of Python source; {size} on {options.device}, {options.variant}")
    names = SETS.get(options.attention, (options.attention,))
    runs: dict[str, dict] = {}
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for name in in_turn(names, options.rounds):
        run = train(name, options, preset, text)
        speeds[name].append(run["tokens_per_second"])
        runs.setdefault(name, run)
        print(f"{name:9} {run['parameters'] / 1e6:.1f} M parameters, final loss {run['final']:.4f}, {run['tokens_per_second']:.0f} tokens/s", flush=True)
    for name, run in runs.items():
        run["rounds"], run["tokens_per_second"] = speeds[name], statistics.median(speeds[name])
    if options.rounds > 1:
        print("medians of tokens/s: " + ", ".join(f"{name} {run['tokens_per_second']:.0f}" for name, run in runs.items()))
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"runs": runs, "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}}
    if {"flashgen", "sdpa"} <= runs.keys():
        ours, theirs = runs["flashgen"], runs["sdpa"]
        report["relative_difference"] = abs(ours["final"] - theirs["final"]) / theirs["final"]
        report["largest_step_difference"] = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"]))
        print(f"final losses differ by {report['relative_difference']:.3%}; the largest difference of a step is {report['largest_step_difference']:.4f}")
    (options.out / "losses.json").write_text(json.dumps(report, indent=1))
    drawn = plot(runs, f"{options.preset}, {options.variant}", options.out / "losses.png")
    print(f"wrote {options.out}/losses.json" + (" and losses.png" if drawn else " (no plot: matplotlib is not installed)"))
    return 0 if all(math.isfinite(run["final"]) for run in runs.values()) and report.get("relative_difference", 0) < 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
