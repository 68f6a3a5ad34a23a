"""Two nodes whose link is slower than their network cards say.

The nodes are namespaces of network, host name and mounts on this machine, joined by a virtual cable whose
rate the kernel limits.  A cable has no nominal speed of its own, so each node finds a card that names one.
Root needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ENDPOINT = "10.0.0.1:29500"
CABLE = """
mount -t tmpfs tmpfs /run  # where the names of namespaces are kept: theirs go with them
ip netns add other
ip link add eth1 type veth peer name eth1 netns other
ip addr add 10.0.0.1/24 dev eth1
ip -n other addr add 10.0.0.2/24 dev eth1
for link in lo eth1; do ip link set $link up; ip -n other link set $link up; done
tc qdisc add dev eth1 root tbf rate $RATE burst 64kb latency 50ms
tc -n other qdisc add dev eth1 root tbf rate $RATE burst 64kb latency 50ms
"""
AGENTS = """
unshare --uts --mount sh -ec "$NODE" node node-1 10.0.0.1 "$@" &
ip netns exec other unshare --uts --mount sh -ec "$NODE" node node-2 10.0.0.2 "$@"
wait $!
"""
NODE = """
hostname $1
mount --bind "$CARDS" /sys/class/net
mount --bind "$HOSTS" /etc/hosts
address=$2
shift 2
exec "$PYTHON" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --local-addr $address \
  --rdzv-backend c10d --rdzv-endpoint $ENDPOINT --rdzv-id nodes "$@"
"""


def inside(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell's script in namespaces that end with it."""
    return subprocess.run(
        ["unshare", "--net", "--mount", "--fork", "--kill-child", "sh", "-ec", script, "sh", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth1", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def may_have_cable() -> bool:
    return all(map(shutil.which, ("unshare", "ip", "tc"))) and inside(CABLE, RATE="1gbit").returncode == 0


def two_agents(*job: str, folder: Path, rate: str, card_megabits: int) -> subprocess.CompletedProcess[str]:
    """Run a job under an agent of torchrun on each node; `rate` is the cable's, as `tc` reads it."""
    card = folder / "cards" / "eth1"
    (card / "device").mkdir(parents=True)
    (card / "speed").write_text(f"{card_megabits}\n")
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.0.0.1 node-1\n10.0.0.2 node-2\n")
    return inside(
        CABLE + AGENTS,
        *job,
        RATE=rate,
        NODE=NODE,
        CARDS=str(card.parent),
        HOSTS=str(hosts),
        ENDPOINT=ENDPOINT,
        PYTHON=sys.executable,
    )
