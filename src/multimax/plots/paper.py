"""The figures that need no training: the paper's figures that follow from its printed parameters."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from multimax.plots.function_comparisons import simplex, trade_off, two_entries
from multimax.plots.sigma import learned_sigma

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def paper_figures() -> Iterator[tuple[str, "Figure"]]:
    """Pairs of name and figure: Figures 1a, 1b, 2, 3 and 10, which ``multimax figures`` writes.

    Example:
        >>> from multimax import plots
        >>> [name for name, figure in plots.paper_figures()]
        ['simplex', 'trade-off', 'two-entries', 'sigma-deit-small', 'sigma-wikitext103-lm']
    """
    yield "simplex", simplex()
    yield "trade-off", trade_off()
    yield "two-entries", two_entries()
    yield "sigma-deit-small", learned_sigma("deit_small", columns=4)
    yield "sigma-wikitext103-lm", learned_sigma("wikitext103_lm")
