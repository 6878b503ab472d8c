"""Packing: a decoding step's query heads as the rows of their kv head, so that a tile of rows reads K and V once for all of them.

Form -> Form. Example: with a group of 4, row ``q`` of kv head ``h`` is row ``q // 4`` of query head ``4 h + q % 4``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from .form import Form, Node
from .language import INT


@lru_cache(maxsize=256)
def pack_group(form: Form, group: int) -> Form:
    """The same score and mask where row numbers run over (row, head of the group), heads over kv heads."""
    nodes: list[Node] = []
    index: dict[tuple, int] = {}

    def add(op: str, *args: int, kind: str = INT, data: object = None) -> int:
        node = Node(op, kind, args, data)
        if node.key not in index:
            index[node.key] = len(nodes)
            nodes.append(node)
        return index[node.key]

    def renamed(node: Node) -> int:
        match node.op:
            case "q" | "q_len":
                return add("floordiv", add(node.op), add("const", data=group))
            case "heads":
                return add("mul", add("heads"), add("const", data=group))
            case "h":
                return add("add", add("mul", add("h"), add("const", data=group)), add("mod", add("q"), add("const", data=group)))
        return add(node.op, *(place[i] for i in node.args), kind=node.type, data=node.data)

    place: list[int] = []
    for node in form.nodes:
        place.append(renamed(node))
    score, mask = (place[root] if root >= 0 else -1 for root in (form.score, form.mask))
    return replace(form, nodes=tuple(nodes), score=score, mask=mask)
