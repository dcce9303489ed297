"""Simulation of routers: all jobs end, the seed determines the run, and our router keeps its promises."""

import pytest

from bench.router import ROUTERS, Cache, Episode, Outcome, Settings, Simulation, episodes

SMALL = Settings(servers=4, groups=90, live=240, cache=2_500_000, late=1, late_at=150, dead=1, dead_at=260)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {name: Simulation(SMALL, make()).run() for name, make in ROUTERS.items()}


def test_all_work_is_done_with_every_router(outcomes: dict[str, Outcome]) -> None:
    turns = sum(len(episode.turns) for episode in episodes(SMALL))
    for name, outcome in outcomes.items():
        again = outcome.turns - turns
        assert 0 <= again < 240, f"{name}: only what the dead server had is sent again"


def test_a_seed_determines_a_run(outcomes: dict[str, Outcome]) -> None:
    again = Simulation(SMALL, ROUTERS["**ours**"]()).run()
    assert again == outcomes["**ours**"]


def test_our_router_keeps_hits_and_balance(outcomes: dict[str, Outcome]) -> None:
    ours, perfect = outcomes["**ours**"], outcomes["perfect affinity"]
    assert ours.hit_rate > 0.97 * perfect.hit_rate
    assert ours.spread < 1.15
    assert 0.8 < ours.late < 1.15, "a late server has its share at once, and not more"
    assert outcomes["the paper's cumulative heap"].late_peak > 1.5
    assert outcomes["round robin, each call"].hit_rate < 0.9 * perfect.hit_rate


def test_a_cache_evicts_the_oldest() -> None:
    cache = Cache(1000)
    first, second = (Episode(group, 0, 300, [], tokens=600) for group in (1, 2))
    assert (cache.use(first), cache.use(first)) == (0, 600)
    assert cache.use(second) == 0
    assert cache.use(first) == 300, "its prompt, which is used last, is still there"
    assert cache.use(first) == 600
