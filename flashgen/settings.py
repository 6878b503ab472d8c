"""Every environment variable that flashgen reads. Each function reads it when called, so a change takes effect at once.

| variable | values | meaning |
|---|---|---|
| ``FLASHGEN_DEBUG`` | 0..4 | stderr: 1 each compile (and checks of values that lie on a GPU), 2 the tiler's table, 3 tuner timings, 4 numbered source |
| ``FLASHGEN_DUMP`` | folder | every artefact that is made (source, headers, binary, compiler log) is also written there |
| ``FLASHGEN_OVERRIDE`` | folder | a file there with the name of a dumped source replaces the emitted text |
| ``FLASHGEN_TARGET`` | ``cpu``, ``sm80`` ... | the chip to build for when ``flashgen.compile`` is not told |
| ``FLASHGEN_CACHE`` | folder, ``off`` | where kernels and tuning records are kept; ``off``: nothing outlives the process |
| ``FLASHGEN_TUNE`` | 0, 1 | default of ``flashgen.compile(tune=...)``: 0 ignores records, 1 tunes at the first call; unset uses recorded winners |
| ``CXX`` | command | the C++ compiler of the cpu target, before ``g++`` and ``clang++`` |

Example: ``FLASHGEN_DEBUG=1 FLASHGEN_CACHE=off python train.py``.
"""

from __future__ import annotations

import os
from pathlib import Path

from .errors import FlashgenError


def _choice(name: str, allowed: tuple[str, ...]) -> str | None:
    value = os.environ.get(name, "").strip()
    if not value:
        return None
    if value not in allowed:
        raise FlashgenError(f"{name}={value!r}: the values are {', '.join(allowed)}. Correct or unset it.")
    return value


def _folder(name: str) -> Path | None:
    value = os.environ.get(name, "").strip()
    try:
        return Path(value).expanduser() if value else None
    except RuntimeError as error:  # "~somebody"
        raise FlashgenError(f"{name}={value!r}: {error} Correct or unset it.") from None


def debug() -> int:
    """FLASHGEN_DEBUG: 0 (default) .. 4."""
    return int(_choice("FLASHGEN_DEBUG", ("0", "1", "2", "3", "4")) or 0)


def dump() -> Path | None:
    """FLASHGEN_DUMP: the folder that receives every artefact."""
    return _folder("FLASHGEN_DUMP")


def override() -> Path | None:
    """FLASHGEN_OVERRIDE: the folder of edited sources."""
    return _folder("FLASHGEN_OVERRIDE")


def target() -> str | None:
    """FLASHGEN_TARGET: a name for ``target.parse``."""
    return os.environ.get("FLASHGEN_TARGET", "").strip() or None


def cache() -> Path | str | None:
    """FLASHGEN_CACHE: a folder, "off", or None for the per-user default."""
    value = os.environ.get("FLASHGEN_CACHE", "").strip()
    return "off" if value == "off" else _folder("FLASHGEN_CACHE")


def tune() -> bool | None:
    """FLASHGEN_TUNE: None (unset) uses recorded winners, True tunes, False ignores records."""
    value = _choice("FLASHGEN_TUNE", ("0", "1"))
    return None if value is None else value == "1"


def compiler() -> str | None:
    """CXX: the C++ compiler to prefer."""
    return os.environ.get("CXX", "").strip() or None


def templates_directory() -> Path:
    """Where the templates lie: inside an installed package, else in the checkout (an editable install does not see mapped folders)."""
    installed = Path(__file__).parent / "templates"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "templates"
