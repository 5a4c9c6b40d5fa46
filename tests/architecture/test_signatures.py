"""Calls, not tuples: few positional parameters, and no argument picked by its number."""

import ast
from collections.abc import Mapping

import pytest

from source import nothing, sources

MOST = 8
KERNELS = "triton.jit"  # a launch passes numbers and pointers one by one: such functions have no structures
TORCHS_OWN = {("nn/multihead.py", "MultiheadAttention.__init__")}  # torch's signature
TUPLES = {"args", "arguments", "inputs", "setting", "options", "tensors"}


def long_signatures(files: Mapping[str, str]) -> list[str]:
    """Functions with more than eight positional parameters; the object or class of a method is not counted."""
    found = []

    def look(path: str, node: ast.AST, names: tuple[str, ...], in_class: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inner, class_body = names, False
            if isinstance(child, ast.ClassDef):
                inner, class_body = (*names, child.name), True
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                decorators = [] if isinstance(child, ast.Lambda) else child.decorator_list
                if any(ast.unparse(d) == KERNELS for d in decorators):
                    continue
                bound = in_class and not any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in decorators)
                inner = (*names, getattr(child, "name", "lambda"))
                count = len(child.args.posonlyargs) + len(child.args.args) - bound
                name = ".".join(inner)
                if count > MOST and (path, name) not in TORCHS_OWN:
                    found.append(f"{path}:{child.lineno} {name} has {count} positional parameters")
            look(path, child, inner, class_body)

    for path, text in files.items():
        look(path, ast.parse(text, path), (), False)
    return found


def arguments_by_number(files: Mapping[str, str]) -> list[str]:
    """Subscripts such as ``args[3]`` and ``self.inputs[-1]``; parts such as ``args[1:]`` are no such thing."""
    found = []
    for path, text in files.items():
        for node in ast.walk(ast.parse(text, path)):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name | ast.Attribute):
                name = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                index = node.slice.operand if isinstance(node.slice, ast.UnaryOp) else node.slice
                if name in TUPLES and isinstance(index, ast.Constant) and isinstance(index.value, int):
                    found.append(f"{path}:{node.lineno} {ast.unparse(node)}")
    return found


def test_signatures_are_short() -> None:
    nothing(long_signatures(sources()))


def test_no_argument_is_picked_by_its_number() -> None:
    nothing(arguments_by_number(sources()))


EIGHT = "a, b, c, d, e, f, g, h"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"def take({EIGHT}, i): ...", "take"),
        (f"def take({EIGHT}, i=0): ...", "take"),
        (f"def take({EIGHT}, /, i): ...", "take"),
        (f"async def take({EIGHT}, i): ...", "take"),
        (f"take = lambda {EIGHT}, i: 0", "lambda"),
        (f"class Room:\n    def take(self, {EIGHT}, i): ...", "Room.take"),
        (f"class Room:\n    @staticmethod\n    def take({EIGHT}, i): ...", "Room.take"),
        (f"class Room:\n    def make(self):\n        def take({EIGHT}, i): ...", "Room.make.take"),
    ],
)
def test_a_long_signature_is_seen(text: str, name: str) -> None:
    (found,) = long_signatures({"nn/multihead.py": text})
    assert f" {name} has 9 " in found


@pytest.mark.parametrize(
    "text",
    [
        f"def take({EIGHT}): ...",
        f"def take({EIGHT}, *args, i, j=0, **options): ...",
        f"class Room:\n    def take(self, {EIGHT}): ...",
        f"class Room:\n    @classmethod\n    def take(cls, {EIGHT}): ...",
        f"class MultiheadAttention:\n    def __init__(self, {EIGHT}, i, j): ...",
    ],
)
def test_short_signatures_are_allowed(text: str) -> None:
    assert long_signatures({"nn/multihead.py": text}) == []


@pytest.mark.parametrize("text", ["args[3]", "inputs[-1]", "self.setting[0]", "ctx.tensors[2]", "f(*options[1])"])
def test_an_argument_by_number_is_seen(text: str) -> None:
    assert len(arguments_by_number({"ops/rows/api.py": text})) == 1


@pytest.mark.parametrize("text", ["args[1:]", "args[name]", "inputs['x']", "shape[0]", "call.coefs", "args[i]"])
def test_names_and_parts_are_allowed(text: str) -> None:
    assert arguments_by_number({"ops/rows/api.py": text}) == []
