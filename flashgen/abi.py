"""The argument struct of a kernel: one list of fields that prints ``struct Params`` and packs its bytes.

Form, Problem, family extras -> Params. Example: ``layout.pack({"q": pointer, "batch": 2, ...}) -> bytearray``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

from . import bounds
from .form import Form
from .language import LONG
from .printer import STORAGE_TYPES
from .problem import Problem

_T = {"float64": "double", "float32": "float", "bfloat16": "fg::bf16", "float16": "fg::f16"}
AXES = ("b", "h", "l")
TENSOR_MAP = "fg::TensorMap"  # 128 bytes, aligned to as many


@dataclass(frozen=True)
class Field:
    ctype: str
    name: str

    @property
    def code(self) -> str:
        """struct format character; pointers travel as 64-bit addresses."""
        if self.ctype.endswith("*"):
            return "Q"
        if self.ctype == TENSOR_MAP:
            return "128s"
        return {"long long": "q", "int": "i", "unsigned": "I", "float": "f", "double": "d"}[self.ctype]


@dataclass(frozen=True)
class Params:
    """Fields in memory order, tensor maps and then 8-byte members first, so that no padding arises before the end."""

    fields: tuple[Field, ...]

    @cached_property
    def format(self) -> str:
        body = "<" + "".join(f.code for f in self.fields)
        alignment = 128 if any(f.ctype == TENSOR_MAP for f in self.fields) else 8
        return body + "x" * (-struct.calcsize(body) % alignment)

    def pack(self, values: dict[str, int | float | bytes]) -> bytes:
        return struct.pack(self.format, *[values[f.name] for f in self.fields])


def storage_type(problem: Problem) -> str:
    return _T[problem.dtype]


def tensors(problem: Problem) -> tuple[str, ...]:
    """The 4-d tensors of the pass whose strides are passed."""
    if problem.which == "forward":
        return ("q", "k", "v", "out")
    wanted = tuple(n for n in ("dq", "dk", "dv") if getattr(problem, n))
    return ("q", "k", "v", "out", "dout", *wanted)


def params(form: Form, problem: Problem, extras: tuple[tuple[str, str], ...] = (), grad_type: str = "real") -> Params:
    """All fields of one pass (see templates/README.md for their meaning)."""
    real = problem.real
    fields = [Field(ctype, name) for ctype, name in extras if ctype == TENSOR_MAP]
    add = lambda ctype, name: fields.append(Field(ctype, name))  # noqa: E731
    written = {"out"} if problem.which == "forward" else {"dq", "dk", "dv"}
    for name in tensors(problem):
        add(("T*" if name in written else "const T*"), name)
    if problem.which == "forward":
        if problem.lse:
            add("real*", "lse")
        if problem.max_scores:
            add("real*", "max_scores")
        if problem.out_low:
            add("T*", "out_low")
    else:
        add("const real*", "lse")
        if problem.out_low:
            add("const T*", "out_low")
        if problem.dlse:
            add("const real*", "dlse")
        add("real*", "delta")
    if problem.sink:
        add("const real*", "sink")
    if problem.seqlens_k:
        add("const int*", "seqlens_k")
    if problem.layout == "varlen":
        add("const int*", "cu_seqlens_q")
        add("const int*", "cu_seqlens_k")
    if problem.dropout:
        add("const long long*", "seed")
    for n, spec in enumerate(form.captures):
        add(f"const {STORAGE_TYPES[spec.dtype]}*", f"capture_{n}")
    for n in bounds.tables(form, problem):
        add(f"const {STORAGE_TYPES[form.captures[n].dtype]}*", f"least_{n}")
        add(f"const {STORAGE_TYPES[form.captures[n].dtype]}*", f"most_{n}")
    for n in problem.capture_grads:
        add(f"{grad_type}*", f"grad_{n}")
    for ctype, name in extras:
        if ctype.endswith("*"):
            add(ctype, name)
    for name in tensors(problem):
        for axis in AXES:
            add("long long", f"{name}_stride_{axis}")
    add("long long", "lse_stride_b")
    add("long long", "lse_stride_h")
    for n, spec in enumerate(form.captures):
        for d in range(spec.ndim):
            add("long long", f"capture_{n}_stride_{d}")
    totals = ("total_q", "total_k") if problem.layout == "varlen" else ()
    small: list[Field] = [Field("int", n) for n in ("batch", "heads", "kv_heads", "q_len", "kv_len", *totals)]
    for n, spec in enumerate(form.captures):
        small += [Field("int", f"capture_{n}_size_{d}") for d in range(spec.ndim)]
    for n, kind in enumerate(form.ints):
        small.append(Field("long long" if kind == LONG else "int", f"int_{n}"))
    reals = ["scale", *(f"float_{n}" for n in range(form.floats))]
    if problem.dropout:
        reals.append("keep_scale")
        small.append(Field("unsigned", "drop_most"))
    small += [Field(real, n) for n in reals]
    small += [Field(ctype, name) for ctype, name in extras if not ctype.endswith("*") and ctype != TENSOR_MAP]
    wide = [f for f in small if f.code in "qd"]
    return Params((*fields, *wide, *(f for f in small if f.code not in "qd")))
