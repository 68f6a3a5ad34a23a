"""FO703 slow-network

What it does
Finds an exchange that is slower than the links between nodes, and nodes with a slow link.

Why it costs
An all-reduce goes through every node, so it is as fast as the slowest link. Half the bandwidth means twice
the exchange time, for all GPUs of the job.

Evidence
Flatout times an all-reduce of two sizes between two steps; the extra time of the larger one gives the
bandwidth without latency. The link's nominal speed comes from the system: the rates of InfiniBand ports, or
else the speed of the network card. There is a finding if several nodes reach less than half of that speed,
and for nodes whose link has less than half of the other nodes' median. If the system does not report a
speed, the measured figure is shown without a finding. No arm gives a job another network, so there is no
ceiling.

Fix
Check which device the exchange uses, and why it is not the fast one:

```diff
-torchrun train.py
+NCCL_DEBUG=INFO torchrun train.py | grep "Using network"   # Socket where IB was expected?
+NCCL_SOCKET_IFNAME=eth1 torchrun train.py                  # then name the fast card
```

Fix safety
Exact: the same bytes take another route.
"""

from __future__ import annotations

from statistics import median

from flatout.doctor.finding import Finding
from flatout.doctor.rule import title_of
from flatout.doctor.sentences import node_name
from flatout.ground.units import show_bytes, show_share
from flatout.measure.evidence import Evidence, Rank

RULE = title_of(__doc__)
SLOW = 0.5  # of the expected speed
NO_ARM = "no arm gives a job another network"


def detect(evidence: Evidence) -> list[Finding]:
    nodes: dict[str, Rank] = {}
    for rank in evidence.ranks:
        nodes.setdefault(node_name(rank, evidence.ranks) or "", rank)
    if len(nodes) < 2:
        return []
    return _slow_nodes(nodes) or _slow_exchange(evidence, nodes)


def _slow_nodes(nodes: dict[str, Rank]) -> list[Finding]:
    """Return nodes whose link is nominally slower than the others'."""
    speeds = {name: rank.link_bytes_per_s for name, rank in nodes.items() if rank.link_bytes_per_s}
    usual = median(speeds.values()) if len(speeds) > 1 else 0.0
    slow = sorted((name for name in speeds if speeds[name] < SLOW * usual), key=lambda name: speeds[name])
    if not slow:
        return []
    shown = [f"{name}: {nodes[name].link} with {show_bytes(speeds[name])}/s" for name in slow]
    return [
        RULE.finding(
            None,
            f"{', '.join(slow)}: a link with less than half of the speed of the other nodes' links",
            figures=[*shown, f"the other nodes: {show_bytes(usual)}/s (median)"],
            no_ceiling=NO_ARM,
            fix=f"see why the port of {slow[0]} negotiated a lower speed, or leave the node out",
        )
    ]


def _slow_exchange(evidence: Evidence, nodes: dict[str, Rank]) -> list[Finding]:
    network = evidence.network
    promised = min((rank.link_bytes_per_s or 0.0 for rank in nodes.values()), default=0.0)
    if network is None or network.bus_bytes_per_s is None or not promised:
        return []
    part = network.bus_bytes_per_s / promised
    if part >= SLOW:
        return []
    links = sorted({rank.link or "" for rank in nodes.values()})
    return [
        RULE.finding(
            None,
            f"an all-reduce over {len(nodes)} nodes reaches {show_share(part)} of the speed of their links",
            figures=(
                f"{show_bytes(network.bus_bytes_per_s)}/s through each link by {network.backend}",
                f"{show_bytes(promised)}/s nominal ({', '.join(links)})",
            ),
            no_ceiling=NO_ARM,
            fix="check which network device the exchange uses: NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME",
        )
    ]
