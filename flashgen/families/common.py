"""Common: small pieces that several families' records share: arithmetic of budgets, what setmaxnreg asks of registers, a workspace.

Example: ``symbols()["block_q"] * ceil_div(dim, 16)``.
"""

from __future__ import annotations

from typing import Any

from . import Constraint, Workspace

MOST_REGISTERS, LEAST_REGISTERS = 256, 24  # that setmaxnreg gives a thread, in steps of 8
SLOT_INTS = 8  # int32s of an fg::Slot
CLEARING_BLOCKS = 32  # that clear the rows of no sequence: as a rule there are none


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def launch_registers(consumers: int) -> int:
    """What a launch has got for a thread of each of its warpgroups together, consumers and producer: for more, setmaxnreg waits forever."""
    return 504 if consumers == 2 else 512


def left_to_producer(fields: dict[str, int], consumers: int) -> int:
    """The producer's registers: those of the plan, or what the consumers leave of them."""
    left = launch_registers(consumers) - consumers * fields["consumer_registers"]
    return min(fields["producer_registers"], left) if left >= LEAST_REGISTERS else fields["producer_registers"]


def register_rules(f: dict[str, Any], consumers: Any) -> list[Constraint]:
    """What setmaxnreg asks of a plan's registers."""
    import sympy

    consumer, producer = f["consumer_registers"], f["producer_registers"]
    got = sympy.Piecewise((launch_registers(2), sympy.Eq(consumers, 2)), (launch_registers(3), True))
    beyond = sympy.Max(sympy.Mod(consumer, 8) + sympy.Mod(producer, 8), LEAST_REGISTERS - producer, producer - consumer, consumer - MOST_REGISTERS)
    return [
        Constraint("registers of all warpgroups beyond those of the launch", consumers * consumer + producer - got, 0, "registers"),
        Constraint("registers beyond what setmaxnreg can give", beyond, 0, "registers"),
    ]


def arrived(waiting: bool) -> Workspace:
    """The count by which blocks of one launch wait for others (fg/blocks.cuh); without any that wait, memory that nobody reads."""
    return Workspace("arrived", "int32", 1, zeroed=waiting, kept=waiting)


def most_tiles(rows: int, sequences: int, tile: int, heads: int) -> int:
    """The most tiles that packed sequences can have, each sequence its own: none holds less than a row. Raises ShapeError beyond int32."""
    from ..errors import ShapeError

    found = min((rows + sequences * (tile - 1)) // tile, rows)
    if found * heads >= 2**31:
        raise ShapeError(f"{sequences} packed sequences in {rows} rows of {heads} heads: {found * heads} tiles, the limit is 2^31 - 1. Split the batch.")
    return found


def block_columns(dim: int) -> int:
    """Width of a Hopper tile's blocks: the widest swizzle, 128, 64 or 32 bytes, that divides the padded head dim or a warpgroup's part."""
    return next(columns for columns in (64, 32, 16) if dim % columns == 0)


def symbols() -> dict[str, Any]:
    """Plan fields by name as sympy symbols, so that one formula serves numbers and proofs."""
    import sympy

    class Symbols(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            return sympy.Symbol(name)

    return Symbols()
