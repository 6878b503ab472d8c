"""The sm90 family's backward: lattice, budgets, launches and tensor maps of its kernels.

Problem, Facts, Target -> candidate plans. Example: ``launches(problem, plan, sizes)[-1].entry == "backward_main"``. ``sm90.FAMILY`` refers to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import Constraint, Launch, Sizes, TensorMap, Workspace
from .common import CLEARING_BLOCKS, SLOT_INTS, arrived, block_columns, ceil_div, left_to_producer, most_tiles, register_rules, symbols

if TYPE_CHECKING:
    from ..analysis import Facts
    from ..plan import Plan
    from ..problem import Problem
    from ..target import Target

NARROW_HEAD_DIM = 128  # beyond it dK and dV are the work of one warpgroup each
BLOCK_KV = 128  # keys of a block: 64 for each of the two consumer warpgroups; of wide heads 64 for both
THREADS = 384  # of a block: a producer and two consumer warpgroups
BOX_ROWS = 64  # of every tensor map, see fg/sm90/backward.cuh
REGISTERS = {240: 24, 232: 40, 224: 56}  # a consumer's and the producer's; two and one of them are those of a launch
EVERYTHING = (1 << 31) - 1  # bytes: no limit
SUM_SLOTS = 3  # sections of heads that have a float32 sum of dQ at the same time
SUM_BYTES = 16 << 20  # of a section's, if that many heads have a block for each SM
OVERHEAD_REGISTERS = 26  # descriptors, indices, keys of a consumer thread; read off ptxas reports
LIGHT_MASK_OPS = 4  # of a mask of captured tensors, per pair


def refuse(problem: Problem) -> list[str]:
    """Reasons against a backward beside those of the forward; empty means accepted."""
    reasons, dims = [], (problem.head_dim_qk, problem.head_dim_v)
    if any(dim % 8 for dim in dims):
        reasons.append(f"sm90's backward takes head dims that are multiples of 8, not {dims}")
    if _wide(problem) and problem.capture_grads:
        reasons.append(f"sm90's backward has gradients of captured tensors for head dims up to {NARROW_HEAD_DIM}, not {dims}")
    return reasons


def _wide(problem: Problem) -> bool:
    """Sums of dK and dV are too many for one warpgroup's registers."""
    return max(problem.head_dim_qk, problem.head_dim_v) > NARROW_HEAD_DIM


def _dq_by_rows(problem: Problem) -> bool:
    """dQ by a kernel of its own over q tiles: bitwise repeatable, and the cheaper way for wide heads and where nothing else is wanted."""
    repeatable = problem.deterministic and (bool(problem.capture_grads) or problem.layout == "varlen")
    return problem.dq and (repeatable or _wide(problem) or not (problem.dk or problem.dv or problem.capture_grads))


def _dq_summed(problem: Problem) -> bool:
    """dQ by additions of all blocks over keys in float32."""
    return problem.dq and not _dq_by_rows(problem)


def _ordered(problem: Problem) -> bool:
    """Those additions in one order, so that the sum is bitwise repeatable."""
    return problem.deterministic and _dq_summed(problem)


def _joined(problem: Problem, plan: Plan) -> bool:
    """backward_main can do the work of backward_prepare: no kernel comes between them."""
    return _dq_summed(problem) and problem.layout == "dense" and not plan.listed


def _diagonals(problem: Problem, facts: Facts) -> bool:
    """Gradients of captured tensors by sums along the diagonals of dS, which is in shared memory for dQ."""
    return bool(problem.capture_grads) and set(problem.capture_grads) <= set(facts.diagonal) and _dq_summed(problem) and not problem.deterministic


def _persistent(problem: Problem, facts: Facts) -> bool:
    """A block per SM can draw keys from a counter, and load the next ones while it computes. Those who sum diagonals leave no warps for the rest."""
    return _dq_summed(problem) and (problem.dk or problem.dv) and problem.layout == "dense" and not _wide(problem) and not _diagonals(problem, facts)


def _late(problem: Problem) -> bool:
    """A tile's dQ is worth computing a step later, by the length of the keys, which are mostly as many as the queries of a walk. Where blocks add in turn it
    costs 2 % instead, for packed sequences it gains nothing; kernels that draw what to drop, or sum gradients of captures, have no registers to spare."""
    plain = problem.layout == "dense" and not (problem.deterministic or problem.dropout or problem.capture_grads)
    return problem.size == "long" and plain and _dq_summed(problem) and not _wide(problem)


def _ways(problem: Problem, facts: Facts, target: Target, point: dict[str, int]) -> list[dict[str, int]]:
    """The plans of a point, best guess first: who has which keys, and when dQ is computed.

    A block for each tile of keys, or one that draws them, which hides what is between two tiles. That wins where these are short, and for narrow heads, whose
    next keys have a place of their own; else the loop over queries loses as much. A tile's dQ a step later, with the warpgroups half a step apart, wins where
    there are many steps: it costs one more.
    """
    late = int(_late(problem))
    alone = {**point, "late": late, "persistent": 0, "kv_stages": 1}
    found = [alone]
    if _persistent(problem, facts) and point["dq_staged"]:
        largest = max(problem.head_dim_qk, problem.head_dim_v)
        drawing = {**alone, "persistent": 1, "kv_stages": 2 if largest <= 64 else 1}
        if derive(drawing)["smem_bytes"] > target.smem_block_bytes:
            drawing["kv_stages"] = 1
        # There may be no registers for what a producer does besides.
        crowded = facts.loads_per_pair > 0 or (largest > 96 and facts.data_dependent) or point["consumer_registers"] > 232
        found = [drawing, alone] if (largest <= 96 or problem.size == "short") and not crowded else [alone, drawing]
    if late:
        found.append({**found[0], "late": 0})
    return [derive(plan) for plan in found]


def _over_keys(problem: Problem) -> bool:
    return problem.dk or problem.dv or _dq_summed(problem) or bool(problem.capture_grads)


# ---- budgets: for numbers or sympy symbols ---------------------------------------------------------------------------------------------------


def smem_bytes(f: dict[str, Any], ceiling: Any) -> Any:
    """Shared memory of backward_main: ``sizeof(Smem)`` of the template, whose alignment is 1024."""
    tiles = (f["kv_stages"] * f["block_kv"] + f["stages"] * f["block_q"]) * (f["dim_qk"] + f["dim_v"])
    crossing = (f["dq_summed"] + f["wide"]) * f["stages"] * f["block_q"] * f["block_kv"]  # dS, or the weights of a wide head
    staged = f["dq_summed"] * f["dq_staged"] * 4 * f["block_q"] * f["dim_qk"]
    rest = f["stages"] * (8 * f["block_q"] + 32 + 4 + 4 * f["ordered"] + 20 * f["diagonals"]) + 16 + 16 + 8 * f["ordered"]
    rest += f["persistent"] * (40 + 24 * f["kv_stages"])
    return 1024 * ceiling((2 * (tiles + crossing) + staged + rest) / 1024)


def dq_smem_bytes(f: dict[str, Any]) -> Any:
    """The same for backward_dq: two tiles of keys, one of values, and 1 KiB for barriers."""
    return 2 * (f["dq_block_q"] * (f["dim_qk"] + f["dim_v"]) + f["dq_block_kv"] * (2 * f["dim_qk"] + f["dim_v"])) + 1024


def _consumer_registers(f: dict[str, Any], largest: Any) -> Any:
    """What a consumer thread needs: its sums, and scores with dP or their packed halves with dQ."""
    sums = largest(f["dk_registers"], f["dv_registers"]) * f["wide"] + (f["dk_registers"] + f["dv_registers"]) * (1 - f["wide"])
    return sums + largest(2 * f["score_registers"], f["score_registers"] + f["dq_registers"] * f["dq_summed"]) + OVERHEAD_REGISTERS


def _splits(problem: Problem, facts: Facts) -> tuple[tuple[int, int], ...]:
    """How dQ reaches its sum (1: staged in shared memory, 0: from registers), and a consumer's registers; a producer that classifies tiles needs more."""
    if not _dq_summed(problem):
        return tuple((0, consumer) for consumer in REGISTERS)
    if _ordered(problem):  # a warp of its own waits for a block's turn
        return ((1, 232), (1, 240), (1, 224))
    if facts.data_dependent:
        return ((1, 232), (0, 224), (0, 232))
    if not facts.has_mask:
        return ((1, 240), (1, 232), (1, 224), (0, 240)) if facts.has_score else ((1, 224), (1, 232), (1, 240), (0, 240))
    if problem.layout == "varlen":  # what is staged can be stored where a sequence has one block alone
        return ((1, 232), (1, 224), (1, 240), (0, 232), (0, 224))
    largest = max(problem.head_dim_qk, problem.head_dim_v)
    if largest <= 64 and facts.loads_per_pair > 0 and not problem.capture_grads:  # with fewer registers they spill
        return ((1, 240), (1, 232), (1, 224), (0, 232), (0, 224))
    if largest <= 64 and not problem.capture_grads:
        return ((1, 232), (1, 224), (1, 240), (0, 232), (0, 224))
    if largest <= 64:
        return ((1, 224), (1, 232), (1, 240), (0, 232), (0, 224))
    if _late(problem) and not facts.score_affine:
        return ((1, 240), (1, 224), (0, 232), (0, 224), (1, 232))
    if not facts.score_affine or problem.capture_grads:
        return ((0, 232), (1, 224), (1, 240), (0, 224), (1, 232))
    if largest <= 96 or problem.size == "short" or facts.ranges > 1:
        return ((1, 224), (1, 240), (0, 224), (0, 232), (1, 232))
    if _late(problem):  # at 128, causal: 1 to 4% faster than from registers
        return ((1, 224), (0, 224), (0, 232), (1, 240), (1, 232))
    return ((0, 224), (1, 224), (0, 232), (1, 240), (1, 232))  # at 128, causal: 3 to 8% faster than the last


def lattice(problem: Problem, facts: Facts, target: Target) -> list[dict[str, int]]:
    """Candidate plans, best guess first on ties. Half as many rows a step leave room for a score function's values."""
    wide, dq_summed, diagonals = int(_wide(problem)), int(_dq_summed(problem)), _diagonals(problem, facts)
    by_pairs = bool(problem.capture_grads) and not diagonals
    sums = {"sum_bytes": EVERYTHING if facts.ranges > 1 else SUM_BYTES, "sum_slots": SUM_SLOTS, "sms": target.sms} if dq_summed else {}
    common = {
        "block_kv": BLOCK_KV // (2 if wide else 1), "stages": 2, "overlap": int(facts.score_affine and not by_pairs), "wide": wide,
        "diagonals": int(diagonals),
        "dq_summed": dq_summed, **sums, "ordered": int(_ordered(problem)), "listed": int(_ordered(problem) and facts.has_mask),
        "dq_by_rows": int(_dq_by_rows(problem)), "dq_block_q": 128, "dq_block_kv": 64,
        # Where all rows see some keys and others only a few, the blocks of the former start first, those of all heads: dQ is then summed for all of them.
        "section_bytes": EVERYTHING if facts.ranges > 1 else target.l2_bytes * 4 // 5 if facts.has_mask else 0,
    }  # fmt: skip
    # values that live through a step beside the sums
    heavy = not facts.score_affine or (facts.data_dependent and (facts.mask_ops > LIGHT_MASK_OPS or facts.loads_per_pair > 0)) or bool(problem.capture_grads)
    points: list[dict[str, int]] = []
    for block_q in (64,) if wide else (64, 128) if heavy else (128, 64):
        halves = dq_summed and block_q == 64  # two warpgroups share the columns of dQ's 64 rows
        step = 32 if halves else 16
        dim_qk, dim_v = step * ceil_div(problem.head_dim_qk, step), 16 * ceil_div(problem.head_dim_v, 16)
        dq_columns = dim_qk // 2 if halves else dim_qk
        tile = {
            "block_q": block_q, "dim_qk": dim_qk, "dim_v": dim_v, "columns_qk": block_columns(dq_columns), "columns_v": block_columns(dim_v),
            "dq_columns": dq_columns,
        }  # fmt: skip
        splits = _splits(problem, facts)
        whole = next((split for split in splits if split[0]), splits[0])  # the first one that can draw: all ways of one split are enough to tune
        for dq_staged, consumer in splits:
            split = {"dq_staged": dq_staged, "consumer_registers": consumer, "producer_registers": REGISTERS[consumer]}
            points += _ways(problem, facts, target, {**common, **tile, **split})[: None if (dq_staged, consumer) == whole else 1]
    return points


def derive(fields: dict[str, int]) -> dict[str, int]:
    """Fields that follow from others."""
    halves = {
        "score_registers": "block_q", "dk_registers": "dim_qk", "dv_registers": "dim_v", "dq_registers": "dq_columns", "dq_score_registers": "dq_block_kv",
    }  # fmt: skip
    found = {**fields, **{name: fields[of] // 2 for name, of in halves.items()}}
    found["producer_registers"] = left_to_producer(found, 2)
    return {**found, "smem_bytes": int(smem_bytes(found, lambda x: -int(-x // 1))), "dq_smem_bytes": dq_smem_bytes(found)}


def constraints(problem: Problem, target: Target) -> list[Constraint]:
    """Shared memory of a block; registers of a consumer thread."""
    import sympy

    f = symbols()
    found = [Constraint("shared memory", smem_bytes(f, sympy.ceiling), target.smem_block_bytes, "bytes")]
    if _over_keys(problem):
        found.append(Constraint("registers of a consumer beyond its share", _consumer_registers(f, sympy.Max) - f["consumer_registers"], 0, "registers"))
        found += register_rules(f, 2)
    undrawn = int(problem.layout == "varlen" or not (problem.dk or problem.dv) or not _dq_summed(problem))
    drawn = f["persistent"] * (undrawn + f["wide"] + f["diagonals"] + 1 - f["dq_staged"] + f["persistent"] - 1)
    places = (1 - f["persistent"]) * (f["kv_stages"] - 1) + sympy.Max(1 - f["kv_stages"], 0)
    needs = "persistent needs dq_staged, dk or dv, a dense layout, head dims <= 128, no diagonals; kv_stages needs it"
    found.append(Constraint(needs, drawn + places, 0, "fields"))
    apart = 1 - f["dq_summed"] + f["wide"] + f["diagonals"] + f["ordered"] + sympy.Abs(f["stages"] - 2)
    later = sympy.Abs(f["late"]) * apart + sympy.Abs(f["late"] * (f["late"] - 1))
    found.append(Constraint("late needs a sum of dq in any order, two stages, head dims <= 128, no diagonals", later, 0, "fields"))
    parts = sympy.Piecewise((2, sympy.Eq(f["block_q"] * f["dq_summed"], 64)), (1, True))
    beside = sympy.Mod(f["block_q"], 64) + sympy.Abs(f["dq_columns"] * parts - f["dim_qk"])
    found.append(Constraint("rows or columns of a tile that do not go together", beside, 0, "rows and columns"))
    if _dq_by_rows(problem):
        found.append(Constraint("shared memory of dq", dq_smem_bytes(f), target.smem_block_bytes, "bytes"))
    return found


def cost(problem: Problem, facts: Facts, target: Target) -> Any:
    return 1


def params(problem: Problem, plan: Plan) -> Sequence[tuple[str, str]]:
    """Tensor maps, the statistics of rows in whole tiles, the float32 sum of dQ, and the amount of work (see ``numbers``)."""
    maps = [("fg::TensorMap", f"map_{name}") for name in _mapped(problem)]
    extras, counts = [("float*", "statistics")], []
    if _dq_summed(problem):
        extras.append(("float*", "dq_sum"))
    if problem.layout == "varlen":
        lists = ["row", "key", *(["dq"] if _dq_by_rows(problem) else [])]
        extras += [("fg::Slot*", f"{name}_slots") for name in lists]
        counts += [f"{name}_room" for name in lists]
        return (*maps, *extras, *(("int", name) for name in counts))
    counts += ["q_tiles", "kv_tiles", "section"]
    if _dq_summed(problem):
        extras.append(("int*", "progress"))
        counts += ["sum_heads", "sum_sections", "finish_blocks", *(["main_blocks"] if plan.persistent else [])]
    if _joined(problem, plan):
        extras.append(("int*", "arrived"))
        counts.append("prepare_blocks")
    if plan.ordered:
        extras.append(("int*", "turns"))
    if plan.listed:
        extras.append(("unsigned*", "seen_by"))
        counts.append("seen_words")
    if plan.dq_by_rows:
        counts += ["dq_tiles", "dq_section"]
    return (*maps, *extras, *(("int", name) for name in counts))


def _mapped(problem: Problem) -> list[str]:
    """The tensors that are loaded or stored by TMA."""
    stored = {"dq": _dq_by_rows(problem), "dk": problem.dk, "dv": problem.dv}
    return ["q", "k", "v", "dout", *(name for name, by_tma in stored.items() if by_tma)]


def tensor_maps(problem: Problem, plan: Plan) -> Sequence[TensorMap]:
    """Boxes of 64 rows by one block of columns."""
    packed = problem.layout == "varlen"
    qk, v = (problem.head_dim_qk, plan.columns_qk, BOX_ROWS, packed), (problem.head_dim_v, plan.columns_v, BOX_ROWS, packed)
    return tuple(TensorMap(f"map_{name}", name, *(v if name in ("v", "dv", "dout") else qk)) for name in _mapped(problem))


def numbers(problem: Problem, plan: Plan, sizes: Sizes) -> dict[str, int]:
    """Tiles of a head's rows and keys; the heads of a section, which stay in L2 together: kv heads with their queries and dO, or heads with their keys;
    and the kv heads of a section whose dQ is summed at a time. prepare_blocks: of backward_prepare, those that come first in backward_main,
    where all blocks then run at once; else 0.
    """
    if problem.layout == "varlen":
        tiles = _packed_tiles(plan, sizes)
        return {f"{name}_room": tiles[name] for name in ("row", "key", "dq") if name != "dq" or plan.dq_by_rows}

    def section(bytes_per_head: int, heads: int) -> int:
        return max(min(plan.section_bytes // max(bytes_per_head, 1), heads), 1)

    kv_heads, dims = sizes.batch * sizes.kv_heads, plan.dim_qk + plan.dim_v
    found = {
        "q_tiles": ceil_div(sizes.q_len, plan.block_q), "kv_tiles": ceil_div(sizes.kv_len, plan.block_kv),
        "section": section(problem.group * sizes.q_len * (2 * dims + 4 * plan.dim_qk * plan.dq_summed), kv_heads),
    }  # fmt: skip
    if _dq_summed(problem):
        fitting = plan.sum_bytes // max(4 * problem.group * found["q_tiles"] * plan.block_q * plan.dim_qk, 1)
        busy = ceil_div(plan.sms, found["kv_tiles"]) if found["kv_tiles"] else kv_heads
        heads = min(max(fitting, busy), max(kv_heads, 1))
        finish_blocks = ceil_div(heads * problem.group * found["q_tiles"] * plan.block_q, BOX_ROWS * THREADS // 128)
        found |= {"sum_heads": heads, "sum_sections": ceil_div(kv_heads, heads), "finish_blocks": finish_blocks}
    if plan.persistent:
        found["main_blocks"] = min(kv_heads * found["kv_tiles"], plan.sms) if found["q_tiles"] else 0  # without queries the caller clears all gradients
    if _joined(problem, plan):
        blocks = found["q_tiles"] * sizes.batch * sizes.heads
        found["prepare_blocks"] = blocks if blocks + _summing_blocks(plan, found) <= plan.sms else 0
    if plan.listed:
        found["seen_words"] = ceil_div(found["kv_tiles"], 32)
    if plan.dq_by_rows:
        found["dq_tiles"] = ceil_div(sizes.q_len, plan.dq_block_q)
        found["dq_section"] = section(2 * sizes.kv_len * dims // problem.group, kv_heads * problem.group)
    return found


def _summing_blocks(plan: Plan, count: dict[str, int]) -> int:
    """Blocks over the keys of all sections, and those that only round dQ."""
    over_keys = count["main_blocks"] if plan.persistent else count["sum_sections"] * count["kv_tiles"] * count["sum_heads"]
    return over_keys + min(count["sum_sections"], plan.sum_slots - 1) * count["finish_blocks"]


def _packed_tiles(plan: Plan, sizes: Sizes) -> dict[str, int]:
    """The most tiles that packed sequences can have, of rows, of keys and of the rows of backward_dq."""
    return {
        "row": most_tiles(sizes.total_q, sizes.batch, plan.block_q, sizes.heads),
        "key": most_tiles(sizes.total_k, sizes.batch, plan.block_kv, sizes.kv_heads),
        "dq": most_tiles(sizes.total_q, sizes.batch, plan.dq_block_q, sizes.heads),
    }  # fmt: skip


def workspaces(problem: Problem, plan: Plan, sizes: Sizes) -> list[Workspace]:
    """Lse and delta of every row, and a float32 copy of dQ (without packing of some heads), in whole tiles. backward_prepare writes the former and clears
    sums, but not those of later sections, which backward_main does, nor the dQ of packed sequences that one block alone has.
    """
    packed, count = problem.layout == "varlen", numbers(problem, plan, sizes)
    tiles = sizes.total_q // plan.block_q + sizes.batch if packed else sizes.batch * count["q_tiles"]  # a sequence may leave one partly empty
    rows = tiles * sizes.heads * plan.block_q
    found = [Workspace("statistics", "float32", 2 * rows, zeroed=False)]
    if packed:
        found += [Workspace(name.replace("_room", "_slots"), "int32", SLOT_INTS * room, zeroed=False) for name, room in count.items()]
        return found + ([Workspace("dq_sum", "float32", rows * plan.dim_qk, zeroed=False)] if _dq_summed(problem) else [])
    if _dq_summed(problem):
        heads = min(count["sum_heads"] * plan.sum_slots, sizes.batch * sizes.kv_heads) * problem.group
        found.append(Workspace("dq_sum", "float32", heads * count["q_tiles"] * plan.block_q * plan.dim_qk, zeroed=False))
        found.append(Workspace("progress", "int32", 2 * count["sum_sections"] + plan.persistent, zeroed=False))
    if _joined(problem, plan):
        found.append(arrived(count["prepare_blocks"] > 0))
    if plan.ordered:
        found.append(Workspace("turns", "int32", tiles * sizes.heads, zeroed=False))
    if plan.listed:
        found.append(Workspace("seen_by", "int32", tiles * sizes.heads * count["seen_words"], zeroed=False))
    return found


def launches(problem: Problem, plan: Plan, sizes: Sizes) -> list[Launch]:
    """The kernels of a call in order."""
    packed, first = problem.layout == "varlen", 0
    if packed:
        tiles = _packed_tiles(plan, sizes)
        rows, keys, dq_rows = tiles["row"] * sizes.heads, tiles["key"] * sizes.kv_heads, tiles["dq"] * sizes.heads
        found = [Launch("backward_list", (3 + CLEARING_BLOCKS, 1, 1), 1024, 0)]
    else:
        count, heads = numbers(problem, plan, sizes), sizes.batch * sizes.heads
        rows, keys, dq_rows = count["q_tiles"] * heads, count["kv_tiles"] * sizes.batch * sizes.kv_heads, count.get("dq_tiles", 0) * heads
        found, first = [], count.get("prepare_blocks", 0)
    if not first:
        found.append(Launch("backward_prepare", (rows, 1, 1), 256, 0))
    if plan.listed:
        found.append(Launch("backward_order", (keys, 1, 1), 32, 0))
    if _dq_summed(problem) and not packed:
        keys = first + _summing_blocks(plan, count)
    if _over_keys(problem):
        found.append(Launch("backward_main", (keys, 1, 1), THREADS, plan.smem_bytes))
    if _dq_by_rows(problem):
        found.append(Launch("backward_dq", (dq_rows, 1, 1), THREADS, plan.dq_smem_bytes))
    if _dq_summed(problem) and packed:
        found.append(Launch("backward_finish", (rows, 1, 1), 2 * plan.block_q, 0))
    return found
