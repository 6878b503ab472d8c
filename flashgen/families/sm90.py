"""The sm90 family: TMA, wgmma and warp specialisation for Hopper GPUs (sm_90a); forward here, backward in ``sm90_backward``.

Problem, Facts, Target -> lattice, budgets, launches, tensor maps. Example: ``FAMILY.tensor_maps(problem, plan)[0].box_rows == plan.block_q``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import Constraint, Family, Launch, Sizes, TensorMap, Workspace, sm90_backward, sm90_clocks
from .common import (
    CLEARING_BLOCKS,
    MOST_REGISTERS,
    SLOT_INTS,
    block_columns,
    ceil_div,
    left_to_producer,
    most_tiles,
    register_rules,
    symbols,
)  # fmt: skip

if TYPE_CHECKING:
    from ..analysis import Facts
    from ..plan import Plan
    from ..problem import Problem
    from ..target import Target

MAX_HEAD_DIM = 256
GRID, STATIC, DYNAMIC = 0, 1, 2  # schedule: a block per piece of work; persistent blocks that stride; persistent blocks that draw from a counter
# Registers that setmaxnreg gives a consumer and the producer, by consumer warpgroups, roomy producers first: together those of a launch.
REGISTERS = {1: ((256, 56),), 2: ((224, 56), (232, 40), (240, 24)), 3: ((152, 56), (160, 32))}
ROOMY_PRODUCER = {"consumer_registers": 208, "producer_registers": 88}  # of two consumer warpgroups
OVERHEAD_REGISTERS = 30  # statistics, descriptors, indices of a consumer; read off ptxas reports: with fewer, accumulators spill
MASK_OPS = 8  # up to so many per pair, and no loads, a mask is written out for each score of a tile
FOUND = 8  # tiles that the producer's searching warp may be ahead of the one that loads
SPARE_REGISTERS, AHEAD_REGISTERS = 4, 8  # more that a consumer gets before the producer does, the latter where scores are prepared ahead


def refuse(problem: Problem, target: Target) -> list[str]:
    """Reasons against this family for a call; empty means accepted."""
    reasons = []
    if target.name != "sm90a":
        reasons.append(f"sm90 needs a Hopper GPU (sm90a), the target is {target.name}")
    if problem.dtype not in ("float16", "bfloat16"):
        reasons.append(f"sm90 computes float16 and bfloat16, not {problem.dtype}")
    if max(problem.head_dim_qk, problem.head_dim_v) > MAX_HEAD_DIM:
        reasons.append(f"sm90 takes head dims up to {MAX_HEAD_DIM}, not ({problem.head_dim_qk}, {problem.head_dim_v})")
    if problem.size == "few":
        reasons.append("sm90 has no splits over keys yet, which few query rows need")
    if not problem.aligned:
        reasons.append("sm90 loads by TMA: rows of q, k, v and out must start on 16 bytes, a multiple of 16 bytes above 0 apart")
    return reasons + (sm90_backward.refuse(problem) if problem.which == "backward" else [])


def smem_bytes(fields: dict[str, Any], ceiling: Any) -> Any:
    """Shared memory, for numbers or sympy symbols: what ``sizeof(Smem)`` is in the template, whose alignment is 1024."""
    f = fields
    tiles = f["q_stages"] * f["block_q"] * f["dim_qk"] + f["stages"] * f["block_kv"] * (f["dim_qk"] + f["dim_v"])
    staged = (1 - f["store_registers"]) * f["block_q"] * f["dim_v"]
    rest = 32 * f["q_stages"] + 36 * f["stages"] + 32 * FOUND  # barriers, and what the producer tells of tiles
    return 1024 * ceiling((2 * (tiles + staged) + rest) / 1024)


def _consumer_registers(fields: dict[str, Any]) -> Any:
    """What a consumer thread needs: scores, weights and outputs beside the rest."""
    return fields["score_registers"] * 3 / 2 + fields["out_registers"] + OVERHEAD_REGISTERS


def lattice(problem: Problem, facts: Facts, target: Target) -> list[dict[str, int]]:
    """Candidate plans, best guess first on ties."""
    dim_qk, dim_v = (16 * ceil_div(d, 16) for d in (problem.head_dim_qk, problem.head_dim_v))
    masked, long, packed = facts.has_mask, problem.size == "long", problem.layout == "varlen"
    # Which tiles a row of them takes follows from lengths alone, and registers are not short.
    steady = masked and not (packed or facts.data_dependent or problem.dropout)
    common = {
        "dim_qk": dim_qk, "dim_v": dim_v, "columns_qk": block_columns(dim_qk), "columns_v": block_columns(dim_v), "sms": target.sms,
        # 2-9% faster at 64, 1-3% at 256; at 128 with scores, and where a mask leaves few keys, else even or slower
        "early_keys": int(not 64 < max(dim_qk, dim_v) <= 128 or facts.has_score or (steady and not long)),
        "mask_bits": int(facts.mask_ops > MASK_OPS or (facts.data_dependent and bool(facts.loads_per_pair or facts.listed))),
        # What scores need of keys or differences is computed before q . k is there; entries of tensors are too many registers with their addresses.
        "ahead": int(facts.has_score and not facts.loads_per_pair),
        "scanned": int(facts.data_dependent),  # the producer reads captured tensors to classify tiles
        "holes": int(masked and not facts.kv_prefix),  # a warpgroup may skip tiles below others that it needs
        "section_bytes": target.l2_bytes * 8 // 25 if masked or long else 0,  # up to 5% faster than twice that
        # The shortest pieces come last and all are drawn late, so that blocks end together: 3% faster; for narrow heads and few tiles a late draw costs more.
        "shortest_last": int(long and masked and facts.kv_prefix and not facts.data_dependent and max(dim_qk, dim_v) > 64),
    }  # fmt: skip
    names = ("consumers", "block_kv", "schedule", "q_stages", "stages", "stagger", "store_registers")
    regular = not masked or facts.kv_prefix
    few_wide = regular and max(dim_qk, dim_v) > 192 and not long  # narrow tiles are 6% faster
    plain = [(2, block_kv, DYNAMIC if masked else STATIC, 1, 2, 0, 1) for block_kv in ((64, 48) if few_wide else (96, 80, 64, 48))]
    if max(dim_qk, dim_v) <= 64:
        block_kv = 112 if facts.loads_per_pair else 128  # their addresses are registers
        tiles = [(3, block_kv, DYNAMIC, 2, 3 if masked and not long else 2, 0, 0), (2, 128, DYNAMIC, 2, 2, 0, 0)]
    elif max(dim_qk, dim_v) <= 128:
        # Three warpgroups hide more of a softmax than two, whose wider tiles are faster where keys are few, where scores load something for each pair,
        # where all tiles are partial, and for head dims to 96.
        narrow = long and max(dim_qk, dim_v) > 96 and not (packed or facts.listed or facts.loads_per_pair or facts.patterned or problem.dropout)
        tiles = [(3, 64, DYNAMIC, 1, 3, 0, 0), (3, 64, DYNAMIC, 2, 2, 0, 0)] if narrow else []
        if masked:
            staggers = (0,) if not steady else (1, 0) if long or facts.has_score else (0, 1)  # at 512 keys 4% faster without
            tiles += [(2, 128, DYNAMIC, 2, 2, stagger, 0) for stagger in staggers]
        else:
            tiles += [(2, 144, STATIC, 2, 2, 1, 1), (2, 128, STATIC, 2, 2, 1, 0)] if long else [(2, 128, STATIC, 2, 2, 1, 0)]
    else:
        schedule = STATIC if not masked else GRID if long else DYNAMIC
        tiles = [(2, block_kv, schedule, q_stages, 2, 1, 1) for block_kv in (128, 112, 96, 80) for q_stages in (2, 1)]
        if regular and max(dim_qk, dim_v) >= 192:  # without stagger up to 10% faster, the more so the fewer keys
            tiles = plain if masked or few_wide else plain + tiles
    if 0 < facts.block < 128 and max(dim_qk, dim_v) <= 128:
        tiles.append((2, 64, DYNAMIC, 2, 4, 0, 0))  # tiles of whole blocks; warpgroups that see different ones may be further apart
    tiles += [values for values in plain if values not in tiles]
    tiles += [(1, 64, STATIC, 1, 2, 0, 1), (1, 32, STATIC, 1, 1, 0, 1)]
    splits: dict[int, list[dict[str, int]]] = {n: [{}] for n in REGISTERS}
    if facts.data_dependent:  # the producer scans captured tensors for their bounds over a tile
        roomy: list[dict[str, int]] = [{"consumer_registers": 224, "producer_registers": 56}, ROOMY_PRODUCER]
        roomy = roomy[::-1] if facts.listed else roomy  # explicit blocks: 4% faster
        bits = (1,) if common["mask_bits"] else (0, 1)
        splits = {1: [], 2: [{**split, "mask_bits": n} for n in bits for split in roomy], 3: [] if max(dim_qk, dim_v) <= 96 or common["mask_bits"] else [{}]}
    points = [{**common, **dict(zip(names, values, strict=True)), **split} for values in tiles for split in splits[values[0]]]
    if masked and not facts.data_dependent:  # where a mask of many operations spills: its bounds over a tile in the producer, itself in the consumers
        place = next(n for n, p in enumerate(points) if p["consumers"] == 2)
        points.insert(place + 1, {**points[place], **ROOMY_PRODUCER, "mask_bits": 1})
    if facts.has_score:
        points.insert(1, {**points[0], "ahead": 1 - points[0]["ahead"]})  # the other way, where one takes too many registers
    if packed:  # pieces are of very different lengths
        points = [{**p, "schedule": DYNAMIC} for p in points]
    return [derive({**p, "store_registers": int(p["store_registers"] or problem.out_low)}) for p in points]


def derive(fields: dict[str, int]) -> dict[str, int]:
    """Fields that follow from others."""
    found = {
        **fields, "block_q": 64 * fields["consumers"], "score_registers": fields["block_kv"] // 2, "out_registers": fields["dim_v"] // 2,
        "holes": fields["holes"] * (1 - fields["stagger"]), "shortest_last": fields["shortest_last"] * (fields["schedule"] == DYNAMIC),
    }  # fmt: skip
    if "consumer_registers" not in fields:
        spare = SPARE_REGISTERS + AHEAD_REGISTERS * fields["ahead"] * (1 - fields["scanned"])
        choices, needed = REGISTERS[fields["consumers"]], _consumer_registers(found) + spare
        found["consumer_registers"], found["producer_registers"] = next((c for c in choices if c[0] >= needed), choices[-1])
    found["producer_registers"] = left_to_producer(found, fields["consumers"])
    return {**found, "smem_bytes": int(smem_bytes(found, lambda x: -int(-x // 1)))}


def constraints(problem: Problem, target: Target) -> list[Constraint]:
    """Shared memory of a block; registers of a consumer thread (scores, weights and outputs beside the rest), and of a thread of each warpgroup together."""
    import sympy

    f = symbols()
    held = _consumer_registers(f) + MOST_REGISTERS - f["consumer_registers"]  # with those that the split among warpgroups leaves it without
    return [
        Constraint("shared memory", smem_bytes(f, sympy.ceiling), target.smem_block_bytes, "bytes"),
        Constraint("registers of a consumer", held, MOST_REGISTERS, "registers"),
        *register_rules(f, f["consumers"]),
    ]


def params(problem: Problem, plan: Plan) -> Sequence[tuple[str, str]]:
    """Tensor maps, the counter that persistent blocks draw their work from, and the amount of work (see ``numbers``)."""
    maps = [("fg::TensorMap", f"map_{name}") for name in ("q", "k", "v", "out")]
    if problem.layout == "varlen":
        return (*maps, ("int*", "counter"), ("fg::Slot*", "slots"), ("int", "pieces"), ("int", "slots_room"))
    return (*maps, ("int*", "counter"), *(("int", name) for name in ("q_tiles", "pieces", "section")))


def tensor_maps(problem: Problem, plan: Plan) -> Sequence[TensorMap]:
    """Boxes of a tile's rows by one block of columns; a warpgroup stores its own 64 rows."""
    packed = problem.layout == "varlen"
    return (
        TensorMap("map_q", "q", problem.head_dim_qk, plan.columns_qk, plan.block_q, packed),
        TensorMap("map_k", "k", problem.head_dim_qk, plan.columns_qk, plan.block_kv, packed),
        TensorMap("map_v", "v", problem.head_dim_v, plan.columns_v, plan.block_kv, packed),
        TensorMap("map_out", "out", problem.head_dim_v, plan.columns_v, 64, packed),
    )


def numbers(problem: Problem, plan: Plan, sizes: Sizes) -> dict[str, int]:
    """Tiles of query rows of a head, of all heads, and the heads of a section, whose keys and values stay in L2 together.

    Of packed sequences only the most that there can be are known; sections are as long as each sequence lets them be.
    """
    if problem.layout == "varlen":
        room = most_tiles(sizes.total_q, sizes.batch, plan.block_q, sizes.heads)
        return {"slots_room": room, "pieces": room * sizes.heads}
    q_tiles, heads = ceil_div(sizes.q_len, plan.block_q), sizes.batch * sizes.heads
    bytes_per_head = max(2 * sizes.kv_len * (plan.dim_qk + plan.dim_v) // problem.group, 1)
    return {"q_tiles": q_tiles, "pieces": q_tiles * heads, "section": max(min(plan.section_bytes // bytes_per_head, heads), 1)}


def workspaces(problem: Problem, plan: Plan, sizes: Sizes) -> list[Workspace]:
    found = [Workspace("counter", "int32", 2, zeroed=True, kept=True)]
    if problem.layout == "varlen":
        found.append(Workspace("slots", "int32", SLOT_INTS * numbers(problem, plan, sizes)["slots_room"], zeroed=False))
    return found


def launches(problem: Problem, plan: Plan, sizes: Sizes) -> list[Launch]:
    """One kernel, of packed sequences after the one that lists their tiles; persistent schedules start a block per SM."""
    pieces = numbers(problem, plan, sizes)["pieces"]
    blocks = pieces if plan.schedule == GRID else min(pieces, plan.sms)
    first = [Launch("forward_prepare", (1 + CLEARING_BLOCKS, 1, 1), 1024, 0)] if problem.layout == "varlen" else []
    return [*first, Launch("forward", (blocks, 1, 1), 128 * (plan.consumers + 1), plan.smem_bytes)]


def _of_pass(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """One rule for both passes: the Problem, its first argument, says which."""
    return lambda problem, *others: (backward if problem.which == "backward" else forward)(problem, *others)


FAMILY = Family(
    name="sm90",
    refuse=refuse,
    lattice=_of_pass(lattice, sm90_backward.lattice),
    constraints=_of_pass(constraints, sm90_backward.constraints),
    cost=_of_pass(sm90_clocks.cost, sm90_backward.cost),
    clocks=sm90_clocks.units,
    templates={"forward": "kernel/sm90/forward.cu.j2", "backward": "kernel/sm90/backward.cu.j2"},
    headers=("fg/base.h", "fg/interval.h", "fg/math.cuh", "fg/sm90/layout.cuh", "fg/sm90/ptx.cuh", "fg/sm90/schedule.cuh", "fg/sm90/softmax.cuh"),
    params=_of_pass(params, sm90_backward.params),
    workspaces=_of_pass(workspaces, sm90_backward.workspaces),
    launches=_of_pass(launches, sm90_backward.launches),
    derive=lambda which, fields: (sm90_backward.derive if which == "backward" else derive)(fields),
    tensor_maps=_of_pass(tensor_maps, sm90_backward.tensor_maps),
    lacks=("kv_splits",),
    raw_scores=lambda problem, plan: problem.which == "forward",
    gaps=True,
    grad_type=lambda problem: "fg::ExactSum" if problem.deterministic else "real",
    numbers=_of_pass(numbers, sm90_backward.numbers),
    clears=True,
)
