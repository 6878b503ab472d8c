"""The exceptions a user can see. Every message says what was given, the limit, and the remedy.

Example: ``raise ShapeError("head_dim=1024: the limit is 576 on cpu and sm80. Split the heads.")``.
"""

from __future__ import annotations


class FlashgenError(Exception):
    """Base of every error that flashgen raises on purpose."""


class VariantError(FlashgenError):
    """What was written in a Variant, a score or mask function, or a call's options cannot be built."""


class ShapeError(FlashgenError, ValueError):
    """A tensor's shape does not fit the call or the variant."""


class DtypeError(FlashgenError, TypeError):
    """A tensor's dtype does not fit the call, the variant or the device."""


class DeviceError(FlashgenError):
    """The device is missing, too old, or not the one the kernel was built for."""


class CompileError(FlashgenError):
    """A compiler is missing or rejected the emitted source.

    ``log`` is the compiler's whole output, ``excerpt`` the numbered source lines around its first diagnostic; ``str()`` shows the excerpt and the
    first LOG_LINES lines of the log.
    """

    LOG_LINES = 40

    def __init__(self, message: str, log: str = "", excerpt: str = "") -> None:
        super().__init__(message, log, excerpt)  # all in args, so that the error survives pickling between processes
        self.message = message
        self.log = log
        self.excerpt = excerpt

    def __str__(self) -> str:
        log = "\n".join(self.log.strip().splitlines()[: self.LOG_LINES])
        return "\n\n".join(part for part in (self.message, self.excerpt, log) if part)


def numbered(text: str, line: int, *, context: int = 4) -> str:
    """The source lines around ``line`` (counted from 1), numbered, an arrow at the line itself."""
    lines = text.splitlines()
    first, last = max(1, line - context), min(len(lines), line + context)
    return "\n".join(f"{'->' if number == line else '  '} {number:5d} | {lines[number - 1]}" for number in range(first, last + 1))
