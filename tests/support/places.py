"""Where the tests find things."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"  # real data beside the repository; tests that need it are skipped without
