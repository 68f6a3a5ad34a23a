from __future__ import annotations

from flatout.doctor.rules.ranks.slow_network import detect
from flatout.measure.evidence import Network, Rank


def ranks(*speeds, hosts=None):
    return tuple(
        Rank(
            rank=number,
            step_s=0.1,
            phases_s={},
            ended="measured",
            host=f"gpu-node-{number}" if hosts is None else hosts[number],
            link=None if speed is None else "eth0",
            link_bytes_per_s=speed,
        )
        for number, speed in enumerate(speeds)
    )


def network(bus_bytes_per_s):
    return Network(
        backend="gloo",
        num_ranks=2,
        small_bytes=1 << 20,
        small_s=0.01,
        large_bytes=1 << 24,
        large_s=0.1,
        bus_bytes_per_s=bus_bytes_per_s,
    )


def test_an_exchange_at_a_tenth_of_the_link_is_found(made):
    (finding,) = detect(made.evidence(ranks=ranks(3e9, 3e9), network=network(3e8)))
    assert (finding.code, finding.name) == ("FO703", "slow-network")
    assert "reaches 10 % of the speed of their links" in finding.message


def test_the_node_with_the_slow_link_is_named(made):
    (finding,) = detect(made.evidence(ranks=ranks(3e9, 125e6, 3e9), network=network(1e8)))
    assert finding.message.startswith("gpu-node-1: ")
    assert any("eth0 with 119 MiB/s" in figure for figure in finding.evidence)


def test_a_link_at_its_speed_or_of_unknown_speed_or_one_machine_is_left_alone(made):
    assert detect(made.evidence(ranks=ranks(3e9, 3e9), network=network(2.5e9))) == []
    assert detect(made.evidence(ranks=ranks(None, None), network=network(1e6))) == []
    assert detect(made.evidence(ranks=ranks(3e9, 3e9, hosts=("a", "a")), network=network(1e6))) == []
    assert detect(made.evidence(ranks=ranks(3e9, 3e9), network=None)) == []
