"""What a processor is called. Virtual machines often hide the product's name, so vendor, family and model count."""

import platform
import re
from pathlib import Path
from typing import NamedTuple

# ranges of models by family: as the kernel tells AMD's generations apart, and Intel's servers by their single models
AMD = {
    23: {"Zen 1": [(0x00, 0x2F), (0x50, 0x5F)], "Zen 2": [(0x30, 0x4F), (0x60, 0x7F), (0x90, 0x91), (0xA0, 0xAF)]},
    25: {"Zen 3": [(0x00, 0x0F), (0x20, 0x5F)], "Zen 4": [(0x10, 0x1F), (0x60, 0xAF)]},
    26: {"Zen 5": [(0x00, 0x2F), (0x40, 0x4F), (0x60, 0x7F)]},
}
INTEL = {
    6: {
        "Haswell": [(0x3C, 0x3C), (0x3F, 0x3F), (0x45, 0x46)],
        "Broadwell": [(0x3D, 0x3D), (0x47, 0x47), (0x4F, 0x4F), (0x56, 0x56)],
        "Skylake": [(0x4E, 0x4E), (0x55, 0x55), (0x5E, 0x5E)],  # 0x55 is Cascade Lake, too
        "Ice Lake": [(0x6A, 0x6A), (0x6C, 0x6C), (0x7D, 0x7E)],
        "Sapphire Rapids": [(0x8F, 0x8F)],
        "Emerald Rapids": [(0xCF, 0xCF)],
        "Granite Rapids": [(0xAD, 0xAE)],
    }
}
VENDORS = {"AuthenticAMD": ("AMD", AMD), "GenuineIntel": ("Intel", INTEL)}


class Processor(NamedTuple):
    """What the system says about it; numbers are None where it has none."""

    name: str
    product: str
    family: int | None = None
    model: int | None = None

    @property
    def slug(self) -> str:
        """The name of its folder."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower().replace("zen ", "zen")).strip("-")


def parse(cpuinfo: str) -> Processor:
    """From the text of /proc/cpuinfo."""
    lines = (line.partition(":") for line in cpuinfo.splitlines() if ":" in line)
    fields: dict[str, str] = {}
    for key, _, value in lines:
        fields.setdefault(key.strip(), value.strip())
    product = fields.get("model name", platform.processor() or platform.machine())
    if "vendor_id" not in fields or "cpu family" not in fields:
        if "CPU implementer" in fields:  # ARM
            return Processor(f"ARM {fields['CPU implementer']} {fields.get('CPU part', '')}".strip(), product)
        return Processor(product or "unknown", product)
    family, model = int(fields["cpu family"]), int(fields["model"])
    vendor, families = VENDORS.get(fields["vendor_id"], (fields["vendor_id"], {}))
    for generation, ranges in families.get(family, {}).items():
        if any(low <= model <= high for low, high in ranges):
            return Processor(f"{vendor} {generation}", product, family, model)
    return Processor(f"{vendor} family {family} model {model}", product, family, model)


def here() -> Processor:
    """This machine's."""
    info = Path("/proc/cpuinfo")
    return parse(info.read_text() if info.exists() else "")
