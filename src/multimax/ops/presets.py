"""The learned parameters that the paper prints (its last two tables), every value as printed there."""

from types import MappingProxyType
from typing import NamedTuple


class PaperParameters(NamedTuple):
    """One layer's parameters in the paper's symbols, one value per order.

    Example:
        >>> import multimax
        >>> coefs, knots = multimax.from_paper(*multimax.presets["deit_small"][11])
    """

    t_b: tuple[float, ...]
    t_d: tuple[float, ...]
    b: tuple[float, ...]
    d: tuple[float, ...]


def _layers(table: str) -> tuple[PaperParameters, ...]:
    """Rows of t_b1, t_d1, t_b2, t_d2, b1, d1, b2, d2, the paper's columns."""
    layers = []
    for row in table.strip().splitlines():
        t_b1, t_d1, t_b2, t_d2, b1, d1, b2, d2 = map(float, row.split())
        layers.append(PaperParameters((t_b1, t_b2), (t_d1, t_d2), (b1, b2), (d1, d2)))
    return tuple(layers)


_DEIT_SMALL = """
1.8347933    2.815388     0.9864913    0.68440557   1.185235     -1.208543    -2.1076407   1.9158255
1.9773115    1.9971638    0.985555     0.74650276   -0.8580209   0.02481092   -0.49835142  1.9772723
-1.1411996   1.4711196    1.9901285    0.8758977    0.18852632   2.8039892    2.9608543    1.0462786
0.6694808    1.206692     1.8682657    0.93786246   3.4023566    -1.5490056   2.500237     0.986331
0.8902384    1.5881691    1.8920481    0.72857785   2.5070796    -1.1942928   1.8854694    1.2248528
0.6015882    0.87738      2.818536     0.96271396   2.6490533    0.8454426    1.6205754    0.89434063
0.8023207    1.2427123    3.040797     0.84531546   2.6984618    1.2127148    1.2652112    1.2134424
0.64486825   0.79173684   2.5263662    0.968745     3.0230901    0.62191963   1.6307493    1.6259384
0.5796288    0.6852025    3.500835     0.99119073   2.675157     0.68776745   1.3239485    1.5808712
0.54873073   0.8240905    3.5563424    0.9692498    2.176066     0.39797062   0.9276044    1.5223614
0.38645744   0.6951747    4.0935583    0.9958999    1.6583583    0.29572898   0.77263904   2.9975116
0.16383016   0.25565386   3.2074118    0.99102634   1.6852132    -0.04795134  0.9796309    2.1836245
"""

_WIKITEXT103_LM = """
0.6467285    0.7980957    0.98324585   0.9649048    0.7475586    -0.87939453  0.3395996    -0.14501953
0.69018555   0.8063965    0.98350525   0.9720764    0.25073242   0.15991211   0.2956543    -0.17687988
0.8557129    0.79797363   0.98939514   0.9855194    -0.12609863  0.06817627   0.14794922   -0.14428711
0.9662781    0.83569336   1.0231781    1.0240021    -0.07574463  0.8510742    -0.13220215  0.27368164
0.9260864    0.9187622    0.98670197   1.039093     -0.5239258   0.51416016   0.23999023   0.09521484
1.1514893    1.152832     0.98441315   1.0156403    0.1751709    0.05374146   -0.13269043  -0.08825684
"""

presets = MappingProxyType(
    {
        # the 12 attention layers of DeiT-small, trained on ImageNet-1k
        "deit_small": _layers(_DEIT_SMALL),
        # the 6 attention layers of the language model, trained on WikiText-103
        "wikitext103_lm": _layers(_WIKITEXT103_LM),
    }
)
