"""How pytest-xdist shares the tests between processes: one by one, as each process is free, except for some files."""

from typing import Any

import pytest

# Their tests share what a fixture makes once for all of them: trained models, a browser, processes.
TOGETHER = (
    "test_dark.py",
    "test_distributed.py",
    "test_explorer.py",
    "test_explorer_controls.py",
    "test_explorer_files.py",
    "test_recipe_runs.py",
    "test_report.py",
    "test_timm.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files that stay together come first. (pytest-xdist 3.8 does not see its own groups with pytest 9.2.)"""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Sharing(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith(TOGETHER) else nodeid

    return Sharing(config, log)
