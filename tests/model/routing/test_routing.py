"""Routing of sessions, with races as sequences of synchronous calls."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.model.routing.balance import ServerState, decide
from prorl_envs.model.routing.state import Router
from prorl_envs.model.types import ServerHealth


def router_with(*urls: str, **settings: float) -> Router:
    router = Router(**settings)  # type: ignore[arg-type]
    for url in urls:
        router.add(url)
    return router


def load(router: Router) -> dict[str, int]:
    return {server.url: server.in_flight for server in router.servers}


def test_work_is_spread_evenly() -> None:
    router = router_with("a", "b", "c")
    chosen = Counter(router.start(f"s{number}", 0.0) for number in range(30))
    assert chosen == {"a": 10, "b": 10, "c": 10}


def test_sessions_stay_on_their_server() -> None:
    router = router_with("a", "b")
    for number in range(10):
        router.start(f"s{number}", 0.0)
    before = router.start("s3", 0.0)
    assert before is not None
    router.end(before)
    for server in list(router.servers):
        for _ in range(server.in_flight if server.url != before else 0):
            router.end(server.url)
    assert router.start("s3", 0.0) == before, "although the other server is idle"


def test_a_new_server_gets_its_fair_share_and_no_more() -> None:
    router = router_with("a", "b")
    for number in range(20):
        router.start(f"s{number}", 0.0)
    router.add("c")
    seen = [router.start(f"t{number}", 0.0) for number in range(40)]
    assert seen[:10] == ["c"] * 10, "until it has as much as the others"
    assert load(router) == {"a": 20, "b": 20, "c": 20}


def test_finished_turns_free_capacity() -> None:
    router = router_with("a", "b")
    assert [router.start("s1", 0.0), router.start("s2", 0.0)] == ["a", "b"]
    router.end("a")
    assert router.start("s3", 0.0) == "a"


def test_idle_servers_are_ranked_by_their_sessions() -> None:
    router = router_with("a", "b")
    for number in range(6):
        url = router.start(f"s{number}", 0.0)
        assert url is not None
        router.end(url)
    assert [server.sessions for server in router.servers] == [3, 3]


def test_sessions_leave_a_dead_server_and_do_not_return() -> None:
    router = router_with("a", "b")
    assert router.start("s", 0.0) == "a"
    router.failed("a", 0.0)
    router.end("a")
    assert router.start("s", 0.1, excluded={"a"}) == "b"
    router.end("b")
    assert router.start("s", 1000.0) == "b", "its prefix is cached there now"


def test_one_request_shows_whether_a_server_recovered() -> None:
    router = router_with("a", "b", cooldown_s=10.0)
    router.failed("a", 0.0)
    assert [router.start(f"s{number}", 5.0) for number in range(4)] == ["b"] * 4
    assert router.start("trial", 10.0) == "a"
    assert router.start("next", 10.0) == "b", "while the trial is out"
    router.succeeded("a")
    assert router.start("more", 10.0) == "a"


def test_simultaneous_failures_count_once_and_then_double() -> None:
    router = router_with("a", cooldown_s=10.0, max_cooldown_s=30.0)
    for _ in range(100):
        router.failed("a", 0.0)
    assert router.servers[0].retry_at == 10.0
    router.failed("a", 10.0)
    assert router.servers[0].retry_at == 30.0
    router.failed("a", 30.0)
    assert router.servers[0].retry_at == 60.0, "but no longer than the longest"


def test_if_all_servers_are_down_the_one_due_soonest_is_tried() -> None:
    router = router_with("a", "b", cooldown_s=10.0)
    router.failed("b", 0.0)
    router.failed("a", 1.0)
    assert router.start("s", 2.0) == "b"
    assert router.start("s", 2.0, excluded={"b"}) == "a"
    assert router.start("s", 2.0, excluded={"a", "b"}) is None


def test_a_draining_server_finishes_its_turns_and_is_forgotten() -> None:
    router = router_with("a", "b")
    assert router.start("s", 0.0) == "a"
    router.drain("a")
    assert router.start("s", 0.0) == "b"
    assert load(router) == {"a": 1, "b": 1}
    router.end("a")
    assert load(router) == {"b": 1}
    router.drain("nobody")


def test_a_server_added_again_while_draining_keeps_its_turns() -> None:
    router = router_with("a")
    router.start("s", 0.0)
    router.drain("a")
    router.add("a")
    assert load(router) == {"a": 1}
    assert router.start("s", 0.0) == "a"


def test_pins_are_bounded_and_evicted() -> None:
    router = router_with("a", "b", max_sessions=4)
    for number in range(10):
        router.start(f"s{number}", 0.0)
    assert sum(server.sessions for server in router.servers) == 4
    for number in range(10):
        router.forget(f"s{number}")
    assert [server.sessions for server in router.servers] == [0, 0]


def test_without_a_usable_server_there_is_no_decision() -> None:
    assert decide([], pinned="a", now=0.0) is None
    assert decide([ServerState("a", draining=True)], pinned="a", now=0.0) is None


def fill(router: Router, count: int, name: str = "f") -> None:
    """Start requests of sessions without siblings."""
    for number in range(count):
        router.start(f"{name}{number}", 0.0, tokens=1000)


def test_siblings_start_on_the_server_that_cached_the_prompt() -> None:
    router = router_with("a", "b", "c")
    first = router.start("g/0", 0.0, tokens=500)
    assert [router.start(f"g/{n}", 0.0, tokens=500) for n in range(1, 8)] == [first] * 7
    assert router.snapshot().expected_hits == 7 * 500


def test_siblings_are_moved_to_balance_the_load() -> None:
    router = router_with("a", "b")
    fill(router, 40)
    chosen = Counter(router.start(f"g/{n}", 0.0, tokens=500) for n in range(40))
    assert chosen == {"a": 20, "b": 20}
    assert router.snapshot().expected_hits == 38 * 500, "each server read the prompt once"


def test_samples_of_different_groups_are_unrelated() -> None:
    router = router_with("a", "b")
    assert [router.start("g/0", 0.0), router.start("h/0", 0.0)] == ["a", "b"]
    assert [router.start("g/x/0", 0.0), router.start("g/x/1", 0.0)] == ["a", "a"]


def test_a_session_leaves_an_overloaded_server() -> None:
    router = router_with("a", "b")
    fill(router, 40)
    for _ in range(15):
        router.end("a")
    # b has 20, a has 5: a returning session of b is better served by a
    assert router.start("f1", 0.0, tokens=1000) == "a"
    seen = router.snapshot()
    assert (seen.rebalanced, seen.failed_over) == (1, 0)
    assert seen.expected_hits == 0


def test_a_long_history_stays_longer_than_a_short_one() -> None:
    servers = [ServerState("a", in_flight=33), ServerState("b", in_flight=27)]
    assert decide(servers, pinned="a", now=0.0, weight=1.0) == "a"
    servers[0].in_flight, servers[1].in_flight = 34, 26
    assert decide(servers, pinned="a", now=0.0, weight=1.0) == "a"
    assert decide(servers, pinned="a", now=0.0, weight=0.0) == "b"


def test_sessions_move_to_a_late_server_until_it_has_its_share() -> None:
    router = router_with("a", "b")
    fill(router, 40)
    router.add("c")
    moved = 0
    for number in range(40):  # every session returns once
        url = "ab"[number % 2]
        router.end(url)
        moved += router.start(f"f{number}", 0.0, tokens=1000) == "c"
    assert 12 <= moved <= 14, "a third of 40, and no more"
    assert router.snapshot().load_imbalance < 1.15


def test_reported_cache_hits_are_counted() -> None:
    router = router_with("a")
    router.start("s", 0.0, tokens=100)
    router.succeeded("a", tokens=100, cached=60, version="v7")
    seen = router.snapshot()
    assert (seen.reported_prompt_tokens, seen.reported_hits) == (100, 60)
    assert seen.servers[0].weight_version == "v7"


def test_new_weights_reset_the_cached_prefixes() -> None:
    router = router_with("a", "b")
    router.start("g/0", 0.0, tokens=100)
    router.forget_prefixes()
    assert router.start("g/0", 0.0, tokens=150) == "a", "it stays all the same"
    assert router.snapshot().expected_hits == 0


@given(st.lists(st.tuples(st.integers(0, 63), st.booleans()), max_size=400), st.integers(2, 6))
def test_no_server_exceeds_the_bound(turns: list[tuple[int, bool]], count: int) -> None:
    router = router_with(*(f"u{number}" for number in range(count)))
    flying: list[str] = []
    for number, ends in turns:
        if ends and flying:
            router.end(flying.pop(number % len(flying)))
            continue
        url = router.start(f"g{number % 7}/{number}", 0.0, tokens=number * 100)
        assert url is not None
        flying.append(url)
        assert load(router)[url] <= max(8, 1.2 * len(flying) / count + 1)


def test_a_late_server_takes_sessions_of_servers_at_the_mean_without_room() -> None:
    servers = [ServerState("a", in_flight=8), ServerState("b", in_flight=12), ServerState("c", in_flight=3)]
    assert decide(servers, pinned="a", now=0.0) == "a", "it has been there all along"
    servers[2].joining = True
    assert decide(servers, pinned="a", now=0.0) == "c"
    servers[0].in_flight = 7
    assert decide(servers, pinned="a", now=0.0) == "a", "a has less than its share"


def late_server(home: int, other: int, late: int) -> str | None:
    """Return the server of a session's next turn. The session is on the first of three servers; the third has
    joined late."""
    flying = {"home": home, "other": other, "late": late}
    servers = [ServerState(url, in_flight=count) for url, count in flying.items()]
    servers[2].joining = True
    return decide(servers, pinned="home", now=0.0)


def test_a_late_server_takes_no_session_of_a_server_with_room() -> None:
    assert late_server(8, 8, 0) == "late"
    assert late_server(7, 8, 0) == "home"


def test_a_late_server_takes_sessions_until_it_reaches_its_share() -> None:
    assert late_server(8, 9, 6) == "late"
    assert late_server(9, 9, 8) == "home"


def test_a_server_below_the_minimum_bound_always_has_room() -> None:
    servers = [ServerState("a", in_flight=7), ServerState("b")]
    assert decide(servers, pinned="a", now=0.0) == "a"
    assert decide(servers, pinned=None, warm={"a"}, now=0.0) == "a"
    servers[0].in_flight = 8
    assert decide(servers, pinned="a", now=0.0) == "b"
    assert decide(servers, pinned=None, warm={"a"}, now=0.0) == "b"


def test_a_group_starts_on_the_server_with_its_prompt_up_to_a_share_of_the_mean() -> None:
    servers = [ServerState("a", in_flight=21), ServerState("b", in_flight=20)]
    assert decide(servers, pinned=None, warm={"a"}, now=0.0) == "a"
    servers[0].in_flight = 26
    assert decide(servers, pinned=None, warm={"a"}, now=0.0) == "b"


def test_a_failed_server_does_not_count_as_room() -> None:
    """Otherwise a turn would be sent to a full server instead of waiting."""
    router = router_with("a", "b", cooldown_s=10.0)
    router.start("s", 0.0)
    router.complained("a", 0.0)
    assert not router.saturated(0.0)
    router.failed("b", 0.0)
    assert router.saturated(0.0)
    assert not router.saturated(10.0), "b is due for a trial"


def test_a_health_check_clears_a_failure_unless_a_turn_was_refused() -> None:
    router = router_with("a", cooldown_s=10.0)
    router.failed("a", 0.0, problem="connection refused")
    router.checked("a", version="v2")
    (server,) = router.servers
    assert (server.health, server.problem, server.weight_version) == (ServerHealth.HEALTHY, "", "v2")
    router.failed("a", 0.0, problem="404", refused=True)
    router.checked("a", version="v3")
    (server,) = router.servers
    assert (server.health, server.problem) == (ServerHealth.FAILING, "404")
    router.succeeded("a")
    assert router.servers[0].health is ServerHealth.HEALTHY


def test_a_moved_session_counts_only_for_its_new_server() -> None:
    router = router_with("a", "b")
    assert router.start("s", 0.0) == "a"
    assert router.start("s", 0.0, excluded={"a"}) == "b"
    assert [server.sessions for server in router.servers] == [0, 1]


def test_a_server_is_joining_until_it_has_its_share_and_only_once() -> None:
    router = router_with("a", "b")
    fill(router, 10)
    for _ in range(4):
        router.end("a")
    router.start("x", 0.0, excluded={"b"})
    assert not any(server.joining for server in router.servers), "less work is no reason"
    router.add("c")
    assert [server.joining for server in router.servers] == [False, False, True]
    fill(router, 12, "g")
    assert not any(server.joining for server in router.servers)


def test_the_spread_is_over_the_servers_that_get_work() -> None:
    router = Router()
    assert router.snapshot().load_imbalance == 1.0
    for url in ("a", "b"):
        router.add(url)
    assert router.snapshot().load_imbalance == 1.0, "nothing is in flight"
    fill(router, 4)
    router.end("b")
    assert router.snapshot().load_imbalance == 2 / 1.5
    router.drain("b")
    assert router.snapshot().load_imbalance == 1.0


def test_a_snapshot_does_not_change() -> None:
    router = router_with("a")
    router.start("s", 0.0)
    before = router.snapshot()
    router.complained("a", 0.0)
    router.start("t", 0.0)
    assert before.servers[0].in_flight == 1 and before.servers[0].window.limit == math.inf
    assert router.snapshot().servers[0].window.limit == 1.0


def test_turns_prompts_and_hits_are_counted() -> None:
    router = router_with("a")
    for tokens in (100, 150, 50):
        router.start("s", 0.0, tokens=tokens)
    router.start("t", 0.0)
    seen = router.snapshot()
    assert (seen.turns, seen.prompt_tokens, seen.expected_hits) == (4, 300, 100 + 50)
    assert (seen.rebalanced, seen.failed_over) == (0, 0)
    for cached in (60, 30, 0):
        router.succeeded("a", tokens=100, cached=cached, version="v7")
    router.succeeded("a", tokens=100)
    router.succeeded("a", cached=0)
    seen = router.snapshot()
    assert (seen.reported_prompt_tokens, seen.reported_hits) == (300, 90)
    assert seen.servers[0].weight_version == "v7", "an answer without a version changes none"


def test_sessions_moved_for_balance_and_after_failures_are_counted() -> None:
    router = router_with("a", "b", "c")
    fill(router, 60)
    for _ in range(15):
        router.end("b")
    assert [router.start(f"f{number}", 0.0) for number in (0, 3)] == ["b", "b"], "a has clearly more"
    assert (router.snapshot().rebalanced, router.snapshot().failed_over) == (2, 0)
    router.start("f6", 0.0, excluded={"a"})
    assert (router.snapshot().rebalanced, router.snapshot().failed_over) == (2, 1)
    router.drain("a")
    router.start("f9", 0.0)
    router.failed("c", 0.0)
    router.start("f2", 0.0)
    assert (router.snapshot().rebalanced, router.snapshot().failed_over) == (2, 3)


def test_a_history_is_weighed_against_those_of_other_sessions() -> None:
    router = router_with("a", "b")
    fill(router, 60)
    for _ in range(4):
        router.end("b")
        router.start("more", 0.0, excluded={"b"}, tokens=1000)
    assert load(router) == {"a": 34, "b": 26}
    assert router.start("f0", 0.0, tokens=2000) == "a", "twice the usual length"
    router.end("a")
    assert router.start("f2", 0.0, tokens=0) == "b"


def test_a_history_of_the_usual_length_is_moved_earlier_than_a_longer_one() -> None:
    router = router_with("a", "b")
    fill(router, 60)
    for _ in range(6):
        router.end("b")
        router.start("more", 0.0, excluded={"b"}, tokens=1000)
    assert load(router) == {"a": 36, "b": 24}
    assert router.start("f0", 0.0, tokens=2000) == "a"
    router.end("a")
    assert router.start("f2", 0.0, tokens=1000) == "b"


def test_samples_of_a_group_share_its_shortest_first_prompt() -> None:
    router = router_with("a")
    router.start("g/0", 0.0, tokens=500)
    router.start("g/0", 0.0, tokens=900)
    router.start("g/1", 0.0, tokens=300)
    before = router.snapshot().expected_hits
    router.start("g/2", 0.0, tokens=500)
    assert router.snapshot().expected_hits - before == 300


def test_the_longest_idle_session_is_forgotten_first() -> None:
    router = router_with("a", max_sessions=2)
    for name in ("f", "g", "f", "h"):
        router.start(name, 0.0, tokens=100)
    before = router.snapshot().expected_hits
    router.start("f", 0.0, tokens=100)
    assert router.snapshot().expected_hits - before == 100
    router.start("g", 0.0, tokens=100)
    assert router.snapshot().expected_hits - before == 100, "g was forgotten"


def test_the_longest_idle_group_is_forgotten_first() -> None:
    router = router_with("a", max_sessions=2)
    for name in ("g", "h", "g", "i"):
        router.start(f"{name}/0", 0.0, tokens=100)
    before = router.snapshot().expected_hits
    router.start("g/1", 0.0, tokens=100)
    assert router.snapshot().expected_hits - before == 100
    router.start("h/1", 0.0, tokens=100)
    assert router.snapshot().expected_hits - before == 100


def test_new_weights_remove_a_groups_prompt_from_all_caches() -> None:
    router = router_with("a")
    router.start("g/0", 0.0, tokens=100)
    router.forget_prefixes()
    router.start("g/1", 0.0, tokens=100)
    assert router.snapshot().expected_hits == 0


def test_a_drained_server_takes_its_own_sessions_with_it() -> None:
    router = router_with("a", "b")
    fill(router, 4)
    router.drain("a")
    for _ in range(2):
        router.end("a")
    assert [server.sessions for server in router.servers] == [2]
    router.start("f0", 0.0, tokens=1000)
    router.start("f1", 0.0, tokens=1000)
    assert router.snapshot().expected_hits == 1000, "of f1, which stayed"


EVENTS = st.lists(
    st.tuples(st.sampled_from(["add", "drain", "start", "end", "fail", "ok", "forget"]), st.integers(0, 3)),
    max_size=60,
)


@given(EVENTS)
def test_counts_hold_under_any_order_of_events(events: list[tuple[str, int]]) -> None:
    router = Router(max_sessions=3)
    flying: list[str] = []
    for now, (event, number) in enumerate(events):
        url, session = f"u{number}", f"s{number}"
        match event:
            case "add":
                router.add(url)
            case "drain":
                router.drain(url)
            case "start":
                chosen = router.start(session, float(now))
                flying += [chosen] if chosen else []
            case "end" if flying:
                router.end(flying.pop(number % len(flying)))
            case "fail" if flying:
                router.failed(flying[number % len(flying)], float(now))
            case "ok" if flying:
                router.succeeded(flying[number % len(flying)])
            case "forget":
                router.forget(session)
        assert Counter(flying) == Counter(load(router))
        assert sum(server.sessions for server in router.servers) <= 3
        assert all(server.sessions >= 0 for server in router.servers)
