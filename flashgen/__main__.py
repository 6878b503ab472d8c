"""The command line: ``flashgen`` or ``python -m flashgen``, with the commands emit, explain, tune, mask, bench, generated, info and cache.

A variant is named as ``module:attribute`` or written as an expression of the catalogue. Example::

    python -m flashgen emit --variant "Variant(mask=causal, score=softcap(30))" --target sm80 --head-dim 128 --which backward
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

import flashgen

from . import cache, info
from . import target as targets
from .errors import DeviceError, FlashgenError, VariantError
from .problem import DTYPES
from .variant import Mask, Score, Variant


def find_variant(text: str) -> Variant:
    """``module:attribute`` (looked for in the current folder too; a function there is called, without arguments) or an expression of flashgen's names.

    A mask or a score alone stands for the Variant that has nothing else.
    """
    named = re.fullmatch(r"[\w.]+:[\w.]+", text) is not None
    if named:
        module, _, path = text.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            found: Any = importlib.import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
        except FlashgenError:
            raise
        except Exception as error:  # the module is the user's: its import may raise anything
            remedy = "The module is looked for in the current folder and where Python imports from."
            raise VariantError(f"--variant {text}: {type(error).__name__}: {error}. {remedy}") from error
    else:
        names = {name: getattr(flashgen, name) for name in flashgen.__all__} | {"torch": torch}
        try:
            found = eval(text, names)
        except FlashgenError:
            raise
        except Exception as error:
            remedy = "Write module:attribute, or an expression such as causal & sliding_window(1023, 0)."
            raise VariantError(f"--variant {text!r}: {type(error).__name__}: {error}. {remedy}") from error
    if isinstance(found, flashgen.Kernel):
        found = found.variant
    elif callable(found) and not isinstance(found, Mask | Score):
        found = _called(text, found) if named else _uncalled(text, found)
    if isinstance(found, Mask):
        found = Variant(mask=found)
    elif isinstance(found, Score):
        found = Variant(score=found)
    if not isinstance(found, Variant):
        raise VariantError(f"--variant {text}: a Variant, Kernel, mask or score is wanted, not {type(found).__name__}.")
    return found


def _called(text: str, function: Any) -> Any:
    try:
        return function()
    except FlashgenError:
        raise
    except Exception as error:
        raise VariantError(f"--variant {text}: calling it raised {type(error).__name__}: {error}. Such a function takes no argument.") from error


def _uncalled(text: str, function: Any) -> NoReturn:
    """An expression that gives a function: ``sliding_window`` without its parentheses would otherwise stand for its defaults, no window at all."""
    parameters = ", ".join(inspect.signature(function).parameters)
    remedy = f"call it, {text}({parameters})" if text.isidentifier() else "write mask(...) or score(...) around it"
    raise VariantError(f"--variant {text!r} is a function, not a mask, score or Variant: {remedy}.")


def describe(options: argparse.Namespace) -> tuple[flashgen.Kernel, tuple[torch.Tensor, ...], dict[str, Any]]:
    """The kernel, and arguments of the call that the options describe: tensors without memory of their own."""
    variant = find_variant(options.variant)
    default = variant.head_dim or (options.head_dim or 128,) * 2
    dim_qk = options.head_dim or default[0]
    dim_v = options.head_dim_v or (options.head_dim or default[1])
    kv_heads = options.kv_heads or options.heads
    kv_length = options.kv_length or options.length

    def rows(heads: int, length: int, dim: int) -> torch.Tensor:
        return torch.empty(1, 1, length, dim, dtype=getattr(torch, options.dtype)).expand(options.batch, heads, length, dim)

    tensors = rows(options.heads, options.length, dim_qk), rows(kv_heads, kv_length, dim_qk), rows(kv_heads, kv_length, dim_v)
    call: dict[str, Any] = {"which": options.which} | ({"sink": torch.zeros(options.heads)} if variant.sink else {})
    return flashgen.compile(variant, target=options.target, family=options.family), tensors, call


def emit(options: argparse.Namespace) -> None:
    kernel, tensors, call = describe(options)
    text = kernel.source(*tensors, **call)
    if options.standalone:
        from .emit import include_closure, standalone
        from .source import Source

        text = standalone(Source(text, "", include_closure(text)))
    if options.output is None:
        sys.stdout.write(text)
    else:
        options.output.write_text(text)
        print(f"{options.output}: {text.count(chr(10))} lines")


def explain(options: argparse.Namespace) -> None:
    _prepare_plot(options)
    kernel, tensors, call = describe(options)
    print(kernel.explain(*tensors, **call))
    if options.plot is not None:
        from .bench.plots import bytes_over_length

        lengths = [1 << n for n in range(8, 18)]
        shape = {"heads": options.heads, "kv_heads": options.kv_heads or options.heads, "head_dim": tensors[0].shape[-1], "dtype": options.dtype}
        _save(bytes_over_length(kernel, lengths, which=options.which, **shape), options.plot)


def tune(options: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.preset is not None:
        from .bench import tuned

        cases, device = _preset(options.preset)
        tuned.run(dict.fromkeys(case for case, _ in cases), device, options.family, options.record)
        return
    if options.record is not None:
        raise FlashgenError(f"--record {options.record} is the table of a --preset; what one variant's plans measured is kept in the cache and printed.")
    kernel, shapes, call = describe(options)
    q, k, v = (torch.randn(t.shape, device=device).to(t.dtype) for t in shapes)
    sink = {"sink": call["sink"].to(device)} if "sink" in call else {}
    report = flashgen.autotune(kernel, q, k, v, backward=options.backward, **sink)
    print(report)
    print(f"Recorded in {cache.current().info()['directory']}.")


def mask(options: argparse.Namespace) -> None:
    _prepare_plot(options)
    variant, q_len, kv_len = find_variant(options.variant), options.length, options.kv_length or options.length
    size = {"block_q": options.block, "block_kv": options.block} if options.block else {}
    print(flashgen.mask_text(variant, q_len, kv_len, head=options.head, heads=options.heads, **size))
    if options.plot is not None:
        figure = flashgen.plot_mask(variant, q_len, kv_len, head=options.head, heads=options.heads, **size)
        _save(figure, options.plot)


def _prepare_plot(options: argparse.Namespace) -> None:
    """Fail now and not when all is measured."""
    if options.plot is not None:
        from .bench.plots import pyplot

        pyplot()
        options.plot.parent.mkdir(parents=True, exist_ok=True)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)
    print(f"{path}: written")


def _preset(name: str) -> tuple[list[Any], str]:
    """The cases of a preset, and the device that they run on."""
    from .bench import record

    presets = record.presets()
    if name not in presets:
        raise FlashgenError(f"--preset {name}: the presets are {', '.join(presets)}.")
    device = "cpu" if name == "cpu" else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"--preset {name} measures a GPU, and there is none. Choose --preset cpu.")
    return presets[name], device


def _peers(text: str | None) -> tuple[str, ...]:
    from .bench.peers import NAMES

    only = tuple(text.split(",")) if text else ()
    unknown = [name for name in only if name not in (*NAMES, "none")]
    if unknown:
        raise FlashgenError(f"--peers {','.join(unknown)}: the peers are {', '.join(NAMES)}; none for no peer at all.")
    return only


def bench(options: argparse.Namespace) -> None:
    from .bench import record

    cases, device = _preset(options.preset)
    only = _peers(options.peers)
    _prepare_plot(options)
    result = record.run(cases, device, rounds=options.rounds, family=options.family, only=only, path=options.record)
    for name, figures in result["summary"].items():
        print(f"{name}: geometric mean {figures['geometric_mean']:.2f}x, least {figures['min']:.2f}x of {figures['cells']} cells")
    if options.plot is not None:
        from .bench.plots import roofline

        _save(roofline(result), options.plot)


def generated(options: argparse.Namespace) -> None:
    from . import generated as kept

    directory = options.directory or kept.DIRECTORY
    if not directory.is_dir():
        raise FlashgenError(f"{directory} is no folder: run in a checkout of flashgen, or name one with --directory.")
    if options.update:
        changed = kept.update(directory)
        print(f"{len(kept.GOLDENS)} kernels, {len(changed)} files changed" + "".join(f"\n  {name}" for name in changed))
    else:
        stale = kept.differences(directory)
        if stale:
            raise FlashgenError(f"{len(stale)} of {directory} differ from what is emitted now: {', '.join(stale)}. Update with: {kept.UPDATE}")
        print(f"{len(kept.GOLDENS)} kernels, all as emitted now")


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: a positive integer is wanted")
    return value


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="flashgen", description="Attention variants to flash-attention kernels.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, action, help_text in (
        ("emit", emit, "print the source of a kernel"),
        ("explain", explain, "what was proved, the plan, and what bounds it"),
        ("tune", tune, "measure the best plans on this device and record the winners: seconds on a GPU, a minute or more on a CPU"),
        ("mask", mask, "which tiles of the mask are full, partial and empty"),
    ):
        command = commands.add_parser(name, help=help_text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.set_defaults(action=action, target=None, which="forward", family=None)
        command.add_argument("--variant", default="Variant()", help="module:attribute, or an expression such as 'Variant(mask=causal, score=softcap(30))'")
        command.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
        command.add_argument("--head-dim", type=_positive, help="default: the variant's, else 128")
        command.add_argument("--head-dim-v", type=_positive, help="of the values, where it differs")
        command.add_argument("--batch", type=_positive, default=1)
        command.add_argument("--heads", type=_positive, default=16)
        command.add_argument("--kv-heads", type=_positive, help="default: as many as --heads")
        command.add_argument("--length", type=_positive, default=4096, help="query rows, and keys unless --kv-length is given")
        command.add_argument("--kv-length", type=_positive)
        if name != "mask":
            command.add_argument("--family", help="force a kernel family")
        if name in ("emit", "explain"):
            command.add_argument("--target", choices=targets.NAMES, help="chip to build for; default: FLASHGEN_TARGET, else the CPU")
            command.add_argument("--which", choices=("forward", "backward"), default="forward")
        if name == "emit":
            command.add_argument("--standalone", action="store_true", help="one file with every header inlined")
            command.add_argument("--output", "-o", type=Path, help="write to a file")
        if name == "explain":
            command.add_argument("--plot", type=Path, help="also draw the predicted bytes over the sequence length")
        if name == "tune":
            command.add_argument("--no-backward", dest="backward", action="store_false", help="the forward alone")
            command.add_argument("--preset", help="instead: all cases of a list of bench, and how often the tiler's choice was good")
            command.add_argument("--record", "--json", type=Path, help="of a preset: also write the table as JSON")
        if name == "mask":
            command.add_argument("--head", type=int, default=0, help="which head")
            command.add_argument("--block", type=_positive, help="rows and keys of a tile; default: what fits the terminal, and 128 in a plot")
            command.add_argument("--plot", type=Path, help="also draw it")
    command = commands.add_parser("info", help="versions, devices, compilers, the cache")
    command.set_defaults(action=info.info)
    command.add_argument("--clean", action="store_true", help="remove every compiled kernel from the cache")
    command = commands.add_parser("cache", help="what the cache holds")
    parts = command.add_subparsers(dest="part", required=True, metavar="COMMAND")
    parts.add_parser("info", help="where it lies, what it holds").set_defaults(action=info.cache_info)
    clean = parts.add_parser("clean", help="remove every compiled kernel")
    clean.set_defaults(action=info.clean)
    clean.add_argument("--tuning", action="store_true", help="the tuner's records too")
    command = commands.add_parser("bench", help="this project and its peers side by side", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    command.set_defaults(action=bench)
    command.add_argument("--preset", default="gpu" if torch.cuda.is_available() else "cpu", help="which list of cases")
    command.add_argument("--rounds", type=_positive, default=3)
    command.add_argument("--family", help="force a kernel family")
    command.add_argument("--peers", help="names of peers, with commas, or none; default: all that can run")
    command.add_argument("--record", "--json", type=Path, help="also write the run as JSON")
    command.add_argument("--plot", type=Path, help="also draw the roofline")
    command = commands.add_parser("generated", help="the kernels kept in generated/")
    command.set_defaults(action=generated)
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--update", action="store_true", help="rewrite them, with the resources that ptxas reports")
    which.add_argument("--check", action="store_true", help="fail when one differs from what is emitted now")
    command.add_argument("--directory", type=Path)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0, or after a message on stderr 1, or 130 (128 + SIGINT, as shells have it) if it was interrupted."""
    options = parser().parse_args(arguments)
    try:
        options.action(options)
    except FlashgenError as error:
        print(f"flashgen: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a file that cannot be written or read
        print(f"flashgen: {error}. Choose another path.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("flashgen: interrupted. What was recorded before is kept.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
