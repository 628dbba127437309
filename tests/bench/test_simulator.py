"""What the simulator costs beside the engine."""

from __future__ import annotations

from foreseed.bench.simulator import bench_simulator


def test_probes_and_the_servers_estimate_count_as_the_engines() -> None:
    result = bench_simulator(rounds=2)
    assert 0 < result["estimate_ms"] < result["engine_ms"]
    assert result["overhead_ms"] > 0
    assert (result["devices"], result["rounds"]) == (100, 2)
