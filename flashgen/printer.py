"""Printer: nodes of a form -> C++ text, strict, typed, in the user's own order of operations.

Node -> expression string. Example: ``k <= q + kv_len - q_len`` prints as ``k <= q + (u.lens.kv_len - u.lens.q_len)``.
The same text compiles for the host and the device; functions are those of ``fg/base.h`` and ``fg/math.h``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from .errors import VariantError
from .form import Form, Node
from .language import BOOL, FLOATS, INT, LONG, REAL, ROUNDING, SINGLE, UNARY_REAL

C_TYPES = {BOOL: "bool", INT: "int", LONG: "long long", SINGLE: "float", REAL: "real"}
STORAGE_TYPES = {
    "bool": "unsigned char", "uint8": "unsigned char", "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long",
    "float16": "fg::f16", "bfloat16": "fg::bf16", "float32": "float", "float64": "double",
}  # fmt: skip

FLOAT_LIMIT = 2.0**128 - 2.0**103  # what rounds to an infinite float
MAX_DEPTH = 24  # operations nested in one expression; what is deeper gets a name

# C++ precedence, loosest first
_OR, _XOR, _AND, _EQ, _LESS, _SHIFT, SUM, _PRODUCT, _UNARY, _ATOM = range(10)
_INFIX = {"add": ("+", SUM), "sub": ("-", SUM), "mul": ("*", _PRODUCT), "eq": ("==", _EQ), "ne": ("!=", _EQ), "lt": ("<", _LESS), "le": ("<=", _LESS),
          "gt": (">", _LESS), "ge": (">=", _LESS)}  # fmt: skip
_CALLS = {"fma": "fma", "minimum": "minimum", "maximum": "maximum", "pow": "pow", "fmod": "fmod", "atan2": "atan2", "sign": "sign"}


def real_literal(value: float, real: str) -> str:
    """A literal of the C type ``real`` ("float" or "double")."""
    if math.isnan(value):
        return f"fg::not_a_number<{real}>()"
    if math.isinf(value) or (real == "float" and abs(value) >= FLOAT_LIMIT):
        return ("-" if value < 0 else "") + f"fg::infinity<{real}>()"
    text = repr(float(value))
    return text + "f" if real == "float" else text


class Printer:
    """Prints nodes whose arguments are either inlined (used once) or named.

    ``name(i)`` returns the C++ name under which node i is already available (a struct field, a parameter), or None.
    ``narrow``: the last dimension's stride of a captured tensor is taken as an int. ``near``: tanh nodes whose argument is at most NEAR_TANH in magnitude.
    """

    def __init__(self, form: Form, real: str, name: Callable[[int], str | None], exact: frozenset[int] = frozenset(), *, narrow: bool = False,
                 near: frozenset[int] = frozenset()):  # fmt: skip
        self.form, self.real, self.name, self.narrow = form, real, name, narrow
        self.near = {form.nodes[i] for i in near}
        # products that must round on their own instead of fusing with a sum: comparisons of masks, float32 index arithmetic of a float64 problem
        self.exact = {form.nodes[i] for i in exact} if exact else set()
        self.lines: list[str] = []
        self.local: dict[int, str] = {}
        self.uses: dict[int, int] = {}

    def statements(self, roots: Iterable[int]) -> list[str]:
        """Print what the roots need; afterwards ``expression(root)`` gives each one's text. Returns the lines of named temporaries."""
        roots = list(roots)
        needed: set[int] = set()
        stack = list(roots)
        for r in roots:
            self.uses[r] = self.uses.get(r, 0) + 1
        while stack:
            i = stack.pop()
            if i in needed or self.name(i) is not None:
                continue
            needed.add(i)
            for a in self.form.nodes[i].args:
                self.uses[a] = self.uses.get(a, 0) + 1
                stack.append(a)
        depth: dict[int, int] = {}  # of the expression that a node prints as
        for i in sorted(needed):
            node = self.form.nodes[i]
            depth[i] = 1 + max((depth.get(a, 0) for a in node.args), default=0)
            if node.op in ("const", "number") or (self.uses[i] == 1 and node.op != "load" and depth[i] <= MAX_DEPTH):
                continue
            depth[i] = 0
            text = self._print(node)[0]
            self.local[i] = f"t{len(self.local)}"
            self.lines.append(f"const {C_TYPES[node.type]} {self.local[i]} = {text};")
        return self.lines

    def expression(self, i: int, level: int = 0) -> str:
        text, precedence = self._reference(i)
        return f"({text})" if precedence < level else text

    def _reference(self, i: int) -> tuple[str, int]:
        known = self.name(i) or self.local.get(i)
        return (known, _ATOM) if known else self._print(self.form.nodes[i])

    def _call(self, function: str, node: Node) -> tuple[str, int]:
        return f"fg::{function}({', '.join(self.expression(a) for a in node.args)})", _ATOM

    def _of_distance(self, node: Node) -> int | None:
        """The factor of a product of q - k + rest that is the same for a whole head."""
        for a, x in (node.args, node.args[::-1]):
            if self.form.nodes[x].op == "real_distance" and x not in self.local and not self.name(x) and self.form.depends[a] <= {"b", "h"}:
                return a
        return None

    def _print(self, node: Node) -> tuple[str, int]:
        match node.op:
            case "const":
                return self._constant(node)
            case "number":
                if node.type == SINGLE and self.real == "double":
                    return f"float(p.float_{node.data})", _ATOM
                return (f"p.float_{node.data}" if node.type in FLOATS else f"p.int_{node.data}"), _ATOM
            case "load":
                return self._load(node), _ATOM
            case "cast" | "detach":  # detach only stops slopes
                if node.op == "detach" or (self.real == "float" and node.type in FLOATS and self.form.nodes[node.args[0]].type in FLOATS):
                    return self._reference(node.args[0])  # no conversion: same C type
                inner = self.expression(node.args[0])
                return (f"{C_TYPES[node.type]}({inner})" if " " not in C_TYPES[node.type] else f"(({C_TYPES[node.type]})({inner}))"), _ATOM
            case "real_distance":  # q - k + rest, exact below 2^24
                rest = f" + {self.expression(node.args[2], _PRODUCT)}" if len(node.args) > 2 else ""
                return f"{C_TYPES[node.type]}(d{rest}) + {C_TYPES[node.type]}(step)", SUM
            case "mul" if node not in self.exact and (factor := self._of_distance(node)) is not None:
                distance = next(self.form.nodes[a] for a in node.args if a != factor)
                rest = f" + {self.expression(distance.args[2], _PRODUCT)}" if len(distance.args) > 2 else ""
                a, kind = self.expression(factor), C_TYPES[node.type]
                return f"fg::fma({a}, {kind}(step), {self.expression(factor, _PRODUCT)} * {kind}(d{rest}))", _ATOM  # what steps share is one product
            case "neg":
                return f"-{self.expression(node.args[0], _UNARY + 1)}", _UNARY
            case "not":
                return f"{'!' if node.type == BOOL else '~'}{self.expression(node.args[0], _UNARY + 1)}", _UNARY
            case "abs":
                return self._call("abs" if node.type in FLOATS else "int_abs", node)
            case "where":
                condition, a, b = (self.expression(x, _OR) for x in node.args)
                return f"({condition} ? {a} : {b})", _ATOM
            case "and" | "or" | "xor":
                return self._bits(node)
            case "shl" | "shr":
                return self._call("shift_left" if node.op == "shl" else "shift_right", node)
            case "div" if node not in self.exact and node.type in FLOATS and self.real == "float":
                return self._call("divide", node)  # as coarse as 16-bit inputs allow on a GPU, where a true division is a subroutine
            case "div":
                return f"{self.expression(node.args[0], _PRODUCT)} / {self.expression(node.args[1], _UNARY)}", _PRODUCT
            case "floordiv" | "mod" | "truncdiv":
                return self._integer_division(node)
            case "minimum" | "maximum" if node.type not in FLOATS:
                return self._call({"minimum": "int_min", "maximum": "int_max"}[node.op], node)
            case "mul" if (node in self.exact and node.type in FLOATS) or (node.type == SINGLE and self.real == "double"):
                return self._call("product", node)
            case op if op in _INFIX:
                sign, level = _INFIX[op]
                a, b = self.expression(node.args[0], level), self.expression(node.args[1], level + 1)
                return f"{a} {sign} {b}", level
            case "tanh" if node in self.near:
                return self._call("tanh_near", node)
            case op if op in _CALLS or op in UNARY_REAL or op in ROUNDING:
                if node.type == SINGLE and self.real == "double" and (op in UNARY_REAL or op in ("pow", "atan2")):
                    # float32 index arithmetic of a float64 problem: rounded once, from double, as good libraries do
                    return f"float(fg::{op}({', '.join(f'double({self.expression(a)})' for a in node.args)}))", _ATOM
                return self._call(_CALLS.get(op, op), node)
        raise VariantError(f"the operation {node.op} cannot be printed.")  # a new op of the language needs a case here

    def _constant(self, node: Node) -> tuple[str, int]:
        if node.type == BOOL:
            return ("true" if node.data else "false"), _ATOM
        if node.type in FLOATS:
            text = real_literal(node.data, "float" if node.type == SINGLE else self.real)
        else:
            text = f"{node.data}" if node.type == INT else f"{node.data}ll"
            if node.data in (-(2**31), -(2**63)):
                text = f"({node.data + 1} - 1)" if node.type == INT else f"({node.data + 1}ll - 1)"
        return text, _UNARY if text.startswith("-") else _ATOM

    def _load(self, node: Node) -> str:
        capture, last = f"p.capture_{node.data}", len(node.args) - 1
        if self.narrow and node.args:  # the last dimension's stride fits an int (calls.prepared), what comes before it may be hoisted
            element = f"fg::element({self.line(node)}, {self.clamped(node, last)}, (int){capture}_stride_{last})"
        else:
            element = f"{capture}[{' + '.join(self._offset(node, d) for d in range(last + 1)) or '0'}]"
        return self.stored(element, node.type)

    def clamped(self, node: Node, d: int) -> str:
        """The index of a load in dimension d, within the tensor."""
        return f"fg::clamp_index({self.expression(node.args[d])}, p.capture_{node.data}_size_{d})"

    def _offset(self, node: Node, d: int) -> str:
        return f"{self.clamped(node, d)} * p.capture_{node.data}_stride_{d}"

    def line(self, node: Node) -> str:
        """Where the entries begin that a load's last index chooses among."""
        return " + ".join([f"p.capture_{node.data}", *(self._offset(node, d) for d in range(len(node.args) - 1))])

    @staticmethod
    def stored(element: str, kind: str) -> str:
        """An element of a captured tensor as a value of the type ``kind``."""
        match kind:
            case "real":
                return f"real(fg::to_real({element}))"
            case "bool":
                return f"({element} != 0)"
        return f"int({element})" if kind == INT else element

    def _bits(self, node: Node) -> tuple[str, int]:
        # & and | of conditions rather than && and ||: no branches, so that loops vectorise
        sign, level = {"and": ("&", _AND), "or": ("|", _OR), "xor": ("^", _XOR)}[node.op]
        a, b = (self.expression(x, _SHIFT if self.form.nodes[x].op not in (node.op,) else level) for x in node.args)
        return f"{a} {sign} {b}", level

    def _integer_division(self, node: Node) -> tuple[str, int]:
        if node.type in FLOATS:
            a, b = (self.expression(x) for x in node.args)
            if node.op == "mod":
                return f"fg::remainder({a}, {b})", _ATOM
            quotient = f"{self.expression(node.args[0], _PRODUCT)} / {self.expression(node.args[1], _UNARY)}"
            return f"fg::{'floor' if node.op == 'floordiv' else 'trunc'}({quotient})", _ATOM
        divisor = self.form.nodes[node.args[1]]
        power = divisor.op == "const" and divisor.data > 0 and divisor.data & (divisor.data - 1) == 0
        if power and node.op == "floordiv":  # an arithmetic shift floors, also below zero
            return f"{self.expression(node.args[0], _SHIFT + 1)} >> {divisor.data.bit_length() - 1}", _SHIFT
        if power and node.op == "mod":
            return f"{self.expression(node.args[0], _AND + 1)} & {divisor.data - 1}", _AND
        return self._call({"floordiv": "floordiv", "mod": "floormod", "truncdiv": "truncdiv"}[node.op], node)
