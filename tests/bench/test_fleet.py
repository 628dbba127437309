"""What a real fleet costs is measured on real processes, and stays below what is promised."""

from __future__ import annotations

import pytest

from foreseed.bench import fleet

KEYS = {
    "wire_up_bytes", "wire_down_bytes", "payload_up_bytes", "payload_down_bytes", "device_peak_mb",
    "round_overhead_ms", "rounds", "devices",
}  # fmt: skip


@pytest.mark.slow
def test_real_device_processes_with_tls_keep_to_their_bytes_and_memory() -> None:
    said: list[str] = []
    # All answer in each round: who fetches the program and is never asked has bytes that it never tells.
    result = fleet.bench_fleet(devices=5, per_round=5, rounds=3, say=said.append)
    assert result.keys() >= KEYS
    assert (result["rounds"], result["devices"], result["replies"], result["refused"]) == (3, 5, 15, 0)
    assert result["tls"] is True
    assert 10 < result["device_peak_mb"] < 25
    assert result["round_overhead_ms"] > 0
    assert 200 < result["payload_up_bytes"] < result["wire_up_bytes"]
    assert 260 < result["reply_wire_bytes"] <= 600
    assert result["payload_up_bytes"] < result["payload_down_bytes"] < result["wire_down_bytes"]
    assert said[-3:] == [f"round {number} of 3" for number in range(1, 4)]


@pytest.mark.slow
def test_many_light_agents_in_one_process_lose_no_reply() -> None:
    said: list[str] = []
    result = fleet.bench_light_fleet(devices=20, per_round=5, rounds=3, say=said.append)
    assert result.keys() >= KEYS
    assert (result["rounds"], result["devices"], result["replies"], result["refused"]) == (3, 20, 15, 0)
    assert result["tls"] is False
    assert 200 < result["reply_wire_bytes"] <= 600
    assert said[-1] == "round 3 of 3"
    assert 5 <= result["joined"] <= 20
    assert all(result[f"{who}_join_ms"] > 0 for who in ("broker", "server"))
    answers = [result[f"{who}_answer_ms"] for who in ("broker", "server")]
    assert answers == [None, None] or min(answers) > 0, "devices may join until the last round"
