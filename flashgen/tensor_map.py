"""Tensor maps: what a TMA load needs to know of a tensor, encoded by the driver once per address.

TensorMap (a family's record), strides, Sizes -> a function from address to the map's 128 bytes.
Example: ``encoder(record, "bfloat16", arguments, sizes)(q.data_ptr())``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from .errors import DeviceError, ShapeError, VariantError
from .families import Sizes, TensorMap

TENSOR_MAP_BYTES = 128
MAX_ADDRESSES = 1024  # remembered per tensor before the memo starts anew
PACKED_ROWS = 2**30  # fg::PACKED_ROWS
PACKED_MOST = 2**31 - 2**16  # more than any row, and than PACKED_ROWS
PACKED_WRAP = 2**34  # bytes: PACKED_ROWS times it is 2^64, nothing to a 64-bit address
_KINDS = {"bfloat16": "BFLOAT16", "float16": "FLOAT16"}
_SWIZZLES = {128: "128B", 64: "64B", 32: "32B"}  # by the bytes of a box's row


def encoder(wanted: TensorMap, dtype: str, arguments: Mapping[str, Any], sizes: Sizes) -> Callable[[int], bytes]:
    """The maps of one tensor of a call, (columns, rows, heads, batch) of 2-byte elements, by address. A stride of 0 makes that dimension one entry.

    Packed sequences: (columns, PACKED_ROWS, heads, start, 1), where row and start are both counted in rows, and the last dimension takes PACKED_ROWS of
    them back by the 64-bit overflow of addresses, so that the bound on the second one is the end of a sequence (see fg/sm90/ptx.cuh).
    Raises VariantError when the rows of a tensor are one row, ShapeError when packed rows are more than PACKED_ROWS.
    """
    length, heads = (sizes.total_q, sizes.heads) if wanted.tensor in ("q", "out", "dout", "dq") else (sizes.total_k, sizes.kv_heads)
    counts, strides = [wanted.columns], []
    for axis, count in (("l", length), ("h", heads), ("b", sizes.batch)):
        stride = 2 * arguments[f"{wanted.tensor}_stride_{axis}"]
        if axis == "l" and stride == 0 and count > 1:
            raise VariantError(f"{wanted.tensor} repeats one row (stride 0), which TMA cannot load: pass {wanted.tensor}.contiguous(), or family='sm80'.")
        counts.append(count if stride else 1)
        strides.append(stride if stride and count > 1 else 16)  # of one entry, torch may give any stride, TMA wants a multiple of 16
    if 0 in counts:
        return lambda address: bytes(TENSOR_MAP_BYTES)  # no element, no load
    if wanted.packed:
        if length > PACKED_ROWS:
            raise ShapeError(f"{wanted.tensor} packs {length} rows: the limit is 2^30 on sm90. Split the batch, or pass family='sm80'.")
        counts = [wanted.columns, PACKED_ROWS, counts[2], PACKED_MOST, PACKED_MOST]
        strides = [strides[0], strides[1], strides[0], PACKED_WRAP - strides[0]]
    from cuda.bindings import driver

    kind = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_KINDS[dtype]}")
    swizzle = getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[2 * wanted.box_columns]}")
    layout = (
        [driver.cuuint64_t(x) for x in counts], [driver.cuuint64_t(x) for x in strides],
        [driver.cuuint32_t(x) for x in (wanted.box_columns, wanted.box_rows, *[1] * len(counts[2:]))], [driver.cuuint32_t(1)] * len(counts),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    known: dict[int, bytes] = {}

    def encode(address: int) -> bytes:
        found = known.get(address)
        if found is None:
            code, made = driver.cuTensorMapEncodeTiled(kind, len(counts), address, *layout)
            if code != driver.CUresult.CUDA_SUCCESS:
                box = f"box {wanted.box_columns} x {wanted.box_rows}"
                raise DeviceError(f"no tensor map for {wanted.tensor} at {address:#x}: {code.name}; counts {counts}, strides {strides} bytes, {box}.")
            if len(known) >= MAX_ADDRESSES:
                known.clear()
            found = known[address] = ctypes.string_at(made.getPtr(), TENSOR_MAP_BYTES)
        return found

    return encode
