"""Number of sandboxes that are kept ready."""

from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.tools.pool.pool_size import Demand


def learned(start_s: float = 1.0, memory_s: float = 60.0) -> Demand:
    demand = Demand(memory_s)
    demand.started(start_s)
    return demand


def test_after_a_single_request_no_sandbox_is_kept_ready() -> None:
    demand = learned()
    assert demand.wanted(0.0) == 0
    demand.taken(0.0)
    assert demand.wanted(0.1) == 0


def test_a_steady_rate_of_requests_keeps_one_sandbox_ready() -> None:
    demand = learned()
    for now in (0.0, 10.0, 20.0):
        demand.taken(now)
    assert demand.wanted(20.0) == 1


def test_a_burst_is_the_number_of_requests_during_one_start() -> None:
    demand = learned(start_s=1.0)
    for now in (0.0, 0.1, 0.2, 0.9, 5.0, 5.1):
        demand.taken(now)
    assert demand.wanted(6.0) == 4


def test_slower_starts_keep_more_ready() -> None:
    fast, slow = learned(start_s=0.05), learned(start_s=2.0)
    for demand in (fast, slow):
        for tick in range(20):
            demand.taken(tick * 0.1)
    assert fast.wanted(2.0) == 1
    assert slow.wanted(2.0) == 20


def test_a_burst_is_forgotten_and_a_smaller_one_remembered() -> None:
    demand = learned(memory_s=60.0)
    for now in (0.0, 0.1, 0.2, 30.0, 30.1):
        demand.taken(now)
    assert demand.wanted(59.0) == 3
    assert demand.wanted(61.0) == 2
    assert demand.wanted(91.0) == 0


def test_an_unused_sandbox_resets_the_demand() -> None:
    demand = learned()
    for now in (0.0, 0.1, 0.2):
        demand.taken(now)
    demand.unused()
    assert demand.wanted(0.3) == 0
    demand.taken(0.4)
    assert demand.wanted(0.4) == 0
    demand.taken(0.5)
    assert demand.wanted(0.5) > 0


@given(st.lists(st.floats(0, 5), max_size=60), st.floats(0.01, 3))
def test_the_demand_is_the_largest_burst_and_never_more(gaps: list[float], start_s: float) -> None:
    demand = learned(start_s=start_s, memory_s=1e9)
    times: list[float] = []
    for gap in gaps:
        times.append((times[-1] if times else 0.0) + gap)
        demand.taken(times[-1])
    largest = max((sum(1 for t in times if end - start_s <= t <= end) for end in times), default=0)
    assert demand.wanted(times[-1] if times else 0.0) <= max(largest, 0)
    if len(times) > 1:
        # Equal times count in order of arrival, so the last request counts all earlier ones.
        assert demand.wanted(times[-1]) == largest
