"""The table of docs/convert.md, from the tests' lists: python tools/convert_table.py writes it."""

import importlib.metadata
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests" / "support"))

import timm_environment  # noqa: E402
from architectures import ARCHITECTURES, OUTSIDE  # noqa: E402
from multimax.convert.timm import FORMS, OLDER, REFUSED  # noqa: E402

DOCUMENT = ROOT / "docs" / "convert.md"
TORCH_NN = [
    ("nn.MultiheadAttention", "fused", "-"),
    ("nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer and their layers", "fused", "-"),
    ("nn.Softmax", "rows", "-"),
    ("nn.Linear", "-", 'yes, by `output="name"`'),
]


def timm_version() -> str:
    """Of the folder that the tests have for it."""
    found = importlib.metadata.distributions(name="timm", path=[str(timm_environment.FOLDER)])
    return next((distribution.version for distribution in found), "?")


def table() -> str:
    """As Markdown."""
    lines = ["| library | architecture | attention | output | verified version |", "|---|---|---|---|---|"]
    version = torch.__version__.partition("+")[0]
    lines += [f"| torch.nn | {name} | {attention} | {output} | {version} |" for name, attention, output in TORCH_NN]
    version = importlib.metadata.version("transformers")
    for architecture in ARCHITECTURES:
        output = f"`{architecture.output}`" if architecture.output else f"no: {architecture.no_output}"
        lines.append(f"| transformers | {architecture.name} | {architecture.attention} | {output} | {version} |")
    lines.append(f"| transformers | {', '.join(OUTSIDE)} | refused: outside the interface | - | {version} |")
    version = timm_version()
    names = [name for name in FORMS if name not in OLDER]
    models = f"models with {len(names)} kinds of attention, below"
    lines.append(f"| timm | {models} | yes | `head`, `head_dist` | {version} |")
    lines.append(f"| timm | {len(REFUSED)} modules, below | refused, with the reason | - | {version} |")
    reasons: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        reasons.setdefault(reason, []).append(name)
    lines += ["", f"timm's attention that is converted: {_listed(names)}.", "", "What is refused of timm:", ""]
    lines += [f"- {_listed(names)}: {reason}" for reason, names in reasons.items()]
    return "\n".join(lines)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main() -> None:
    """Puts it between the marks."""
    before, rest = DOCUMENT.read_text().split("<!-- table -->\n")
    after = rest.split("<!-- /table -->")[1]
    DOCUMENT.write_text(f"{before}<!-- table -->\n{table()}\n<!-- /table -->{after}")


if __name__ == "__main__":
    sys.exit(main())
