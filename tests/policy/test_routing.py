"""Where sessions go: every race as a few synchronous lines."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.policy.balance import ServerState, decide
from prorl_envs.policy.routing import Router


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


def test_sessions_stay_where_they_are() -> None:
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


def test_finished_work_is_given_back() -> None:
    router = router_with("a", "b")
    assert [router.start("s1", 0.0), router.start("s2", 0.0)] == ["a", "b"]
    router.end("a")
    assert router.start("s3", 0.0) == "a"


def test_idle_servers_are_told_apart_by_their_sessions() -> None:
    router = router_with("a", "b")
    for number in range(6):
        url = router.start(f"s{number}", 0.0)
        assert url is not None
        router.end(url)
    assert [server.sessions for server in router.servers] == [3, 3]


def test_sessions_leave_a_dead_server_and_do_not_come_back() -> None:
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


def test_failures_together_count_once_and_then_double() -> None:
    router = router_with("a", cooldown_s=10.0, max_cooldown_s=30.0)
    for _ in range(100):
        router.failed("a", 0.0)
    assert router.servers[0].retry_at == 10.0
    router.failed("a", 10.0)
    assert router.servers[0].retry_at == 30.0
    router.failed("a", 30.0)
    assert router.servers[0].retry_at == 60.0, "but no longer than the longest"


def test_with_all_servers_down_the_one_due_soonest_is_tried() -> None:
    router = router_with("a", "b", cooldown_s=10.0)
    router.failed("b", 0.0)
    router.failed("a", 1.0)
    assert router.start("s", 2.0) == "b"
    assert router.start("s", 2.0, excluded={"b"}) == "a"
    assert router.start("s", 2.0, excluded={"a", "b"}) is None


def test_a_draining_server_ends_its_work_and_is_forgotten() -> None:
    router = router_with("a", "b")
    assert router.start("s", 0.0) == "a"
    router.drain("a")
    assert router.start("s", 0.0) == "b"
    assert load(router) == {"a": 1, "b": 1}
    router.end("a")
    assert load(router) == {"b": 1}
    router.drain("nobody")


def test_a_server_taken_back_while_draining_keeps_its_work() -> None:
    router = router_with("a")
    router.start("s", 0.0)
    router.drain("a")
    router.add("a")
    assert load(router) == {"a": 1}
    assert router.start("s", 0.0) == "a"


def test_pins_are_bounded_and_given_up() -> None:
    router = router_with("a", "b", max_sessions=4)
    for number in range(10):
        router.start(f"s{number}", 0.0)
    assert sum(server.sessions for server in router.servers) == 4
    for number in range(10):
        router.forget(f"s{number}")
    assert [server.sessions for server in router.servers] == [0, 0]


def test_nobody_to_ask() -> None:
    assert decide([], pinned="a", now=0.0) is None
    assert decide([ServerState("a", draining=True)], pinned="a", now=0.0) is None


def fill(router: Router, count: int, name: str = "f") -> None:
    """Requests of sessions without siblings."""
    for number in range(count):
        router.start(f"{name}{number}", 0.0, tokens=1000)


def test_siblings_begin_where_the_prompt_is_cached() -> None:
    router = router_with("a", "b", "c")
    first = router.start("g/0", 0.0, tokens=500)
    assert [router.start(f"g/{n}", 0.0, tokens=500) for n in range(1, 8)] == [first] * 7
    assert router.snapshot().expected_hits == 7 * 500


def test_siblings_give_way_to_balance() -> None:
    router = router_with("a", "b")
    fill(router, 40)
    chosen = Counter(router.start(f"g/{n}", 0.0, tokens=500) for n in range(40))
    assert chosen == {"a": 20, "b": 20}
    assert router.snapshot().expected_hits == 38 * 500, "each server read the prompt once"


def test_two_samples_of_other_groups_know_nothing_of_each_other() -> None:
    router = router_with("a", "b")
    assert [router.start("g/0", 0.0), router.start("h/0", 0.0)] == ["a", "b"]
    assert [router.start("g/x/0", 0.0), router.start("g/x/1", 0.0)] == ["a", "a"]


def test_a_session_leaves_an_overloaded_server() -> None:
    router = router_with("a", "b")
    fill(router, 40)
    for _ in range(15):
        router.end("a")
    # b has 20, a has 5: whoever comes back to b is better off at a
    assert router.start("f1", 0.0, tokens=1000) == "a"
    seen = router.snapshot()
    assert (seen.moved, seen.lost) == (1, 0)
    assert seen.expected_hits == 0


def test_a_long_history_stays_longer_than_a_short_one() -> None:
    servers = [ServerState("a", in_flight=33), ServerState("b", in_flight=27)]
    assert decide(servers, pinned="a", now=0.0, weight=1.0) == "a"
    servers[0].in_flight, servers[1].in_flight = 34, 26
    assert decide(servers, pinned="a", now=0.0, weight=1.0) == "a"
    assert decide(servers, pinned="a", now=0.0, weight=0.0) == "b"


def test_to_a_late_server_sessions_move_until_it_has_its_share() -> None:
    router = router_with("a", "b")
    fill(router, 40)
    router.add("c")
    moved = 0
    for number in range(40):  # every session comes back once
        url = "ab"[number % 2]
        router.end(url)
        moved += router.start(f"f{number}", 0.0, tokens=1000) == "c"
    assert 12 <= moved <= 14, "a third of 40, and no more"
    assert router.snapshot().spread < 1.15


def test_what_servers_tell_is_counted() -> None:
    router = router_with("a")
    router.start("s", 0.0, tokens=100)
    router.succeeded("a", tokens=100, cached=60, version="v7")
    seen = router.snapshot()
    assert (seen.told_prompt_tokens, seen.told_hits) == (100, 60)
    assert seen.servers[0].weight_version == "v7"


def test_new_weights_empty_the_books() -> None:
    router = router_with("a", "b")
    router.start("g/0", 0.0, tokens=100)
    router.forget_prefixes()
    assert router.start("g/0", 0.0, tokens=150) == "a", "it stays all the same"
    assert router.snapshot().expected_hits == 0


@given(st.lists(st.tuples(st.integers(0, 63), st.booleans()), max_size=400), st.integers(2, 6))
def test_no_server_is_given_more_than_the_bound(turns: list[tuple[int, bool]], count: int) -> None:
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
