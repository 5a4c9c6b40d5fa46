"""What holds for every library: the Protocol, the one list, the one walk."""

import ast
import importlib
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import multimax
from multimax.convert.library import HEADS, LIBRARIES, Library, converter, in_use
from multimax.convert.outline import Outline, around, within

FOLDER = Path(multimax.__file__).parent / "convert"


@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_implement_the_protocol(name: str) -> None:
    library = converter(name)
    assert Library in type(library).__mro__
    assert library.name == name
    assert converter(HEADS).name == HEADS


def test_a_library_without_its_functions_is_an_error() -> None:
    class Incomplete(Library):
        name = "incomplete"

    with pytest.raises(TypeError, match=r"abstract methods? '?attach'?, '?detach'?, '?sites'?"):
        Incomplete()  # type: ignore[abstract]


def test_libraries_are_those_of_the_classes() -> None:
    class Mine(nn.Linear):
        pass

    assert [library.name for library in in_use(Outline(Mine(3, 3)))] == ["torch"]


def names_of_libraries(path: Path) -> list[str]:
    """Where a file's code, not its docstrings and comments, names a library, by line."""
    tree = ast.parse(path.read_text())
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found = []
    for node in ast.walk(tree):
        words = [getattr(node, name, None) for name in ("id", "attr", "module", "name", "value")]
        words += [alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)]
        for word in words:
            if id(node) not in prose and isinstance(word, str) and re.search("timm|transformers|torch_nn", word):
                found.append(f"{path.name}:{node.lineno}: {word}")  # type: ignore[attr-defined]
    return found


def test_libraries_are_named_in_the_list_and_their_own_files_only() -> None:
    others = [path for path in FOLDER.glob("*.py") if path.name not in ("library.py", "timm.py", "torch_nn.py")]
    found = [line for path in others for line in names_of_libraries(path)]
    assert len(found) == 1, found
    assert re.fullmatch(r"__init__.py:\d+: multimax.convert.transformers.pretrained", found[0])  # the export
    assert len(names_of_libraries(FOLDER / "library.py")) == 2 * len(LIBRARIES)  # the list, and the words for people
    assert names_of_libraries(FOLDER / "timm.py")


# ---- the walk ----


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Dropout()))
        self.none = None
        self.register_module("nothing", None)
        self.again = self.first
        self.inner = self.first[1]
        self.last = nn.Linear(2, 2)


def test_outline_is_that_of_named_modules() -> None:
    model = Around()
    outline = Outline(model)
    assert list(outline.modules.items()) == list(model.named_modules())
    assert outline.repeated == {"first", "first.1"}
    assert list(outline.types.items())[:3] == [(Around, ""), (nn.Sequential, "first"), (nn.Linear, "first.0")]
    assert outline.packages == {"torch", __name__.partition(".")[0], "builtins"}
    assert outline.name_of(model.inner) == "first.1"
    assert outline.name_of(nn.ReLU()) is None


def test_outline_of_a_cycle_comes_to_an_end() -> None:
    model = nn.Sequential(nn.Sequential())
    model[0].add_module("back", model)
    assert list(Outline(model).modules) == ["", "0"]
    assert Outline(model).repeated == {""}


def test_names_around_others() -> None:
    assert around([]) == set()
    assert around(["a.b.c", "a.d"]) == {"", "a", "a.b", "a.b.c", "a.d"}
    assert around([""]) == {""}
    assert [within(name, "a") for name in ("a", "a.b", "ab", "")] == [True, True, False, False]
    assert within("a", "")


def calls(function: Any, *args: Any) -> Counter[str]:
    """How often Python functions of this package are called, by file and name."""
    found: Counter[str] = Counter()
    root = f"{FOLDER.parent}/"

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            found[f"{frame.f_code.co_filename.removeprefix(root)}:{frame.f_code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function(*args)
    finally:
        sys.setprofile(before)
    return found


def test_conversion_does_not_walk_again_and_again() -> None:
    transformers = importlib.import_module("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    model = transformers.BertModel(config)
    converting = calls(multimax.convert_, model)
    assert converting.total() <= 400, converting.most_common(20)
    assert converting["convert/outline.py:__init__"] == 1
    reverting = calls(multimax.revert_, model)
    assert reverting.total() <= 60, reverting.most_common(20)
    longer = transformers.BertModel(transformers.BertConfig(**{**config.to_dict(), "num_hidden_layers": 4}))
    more = calls(multimax.convert_, longer) - converting
    assert sum(number for name, number in more.items() if name.startswith("convert/")) <= 2 * 40
