"""Words and their trie against brute force."""

from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.audit.words import live_states, minimal_applications, naive_applications, trie
from looplab.recurrence.plan import Plan

LAW = settings(deadline=None, max_examples=60)

PLANS = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=7), min_size=1, max_size=8
)


@LAW
@given(PLANS)
def test_the_trie_has_one_node_per_distinct_prefix(pairs):
    words = {str(i): (Plan.of(entry), tuple(entry)) for i, entry in enumerate(pairs)}
    root = trie(words)
    brute_force = {tuple(entry[:n]) for entry in pairs for n in range(1, len(entry) + 1)}
    assert root.size() == minimal_applications(pairs) == len(brute_force)
    made = {}

    def walk(node, path):
        for name in node.wanted:
            made[name] = path
        for child in node.children:
            walk(child, (*path, tuple(child.application)))

    walk(root, ())
    assert made == {str(i): tuple(entry) for i, entry in enumerate(pairs)}


def most_states_held(node):
    """States held at once when the list order is walked and a state is freed on entering its last child."""
    held = [1]
    for i, child in enumerate(node.children):
        held.append(most_states_held(child) + (i < len(node.children) - 1))
    return max(held)


@LAW
@given(PLANS)
def test_the_walk_order_holds_no_more_states_than_the_bound(pairs):
    root = trie({str(i): (Plan.of(entry), tuple(entry)) for i, entry in enumerate(pairs)})
    leaves = len({tuple(p) for p in pairs})
    assert live_states(root) == most_states_held(root) <= 1 + (leaves.bit_length() - 1)


@LAW
@given(PLANS)
def test_one_by_one_runs_every_different_plan_alone(pairs):
    plans = [Plan.of(entry) for entry in pairs]
    assert naive_applications([*plans, *plans]) == sum(len(entry) for entry in {tuple(entry) for entry in pairs})


def test_a_plan_named_first_is_run_for_all_with_its_word():
    first, second = Plan.of([(0, 0), (0, 1)]), Plan.of([(0, 5), (0, 6)])
    word = ((0, 0), (0, 0))
    root = trie({"first": (first, word), "second": (second, word)})
    (node,) = root.children
    (last,) = node.children
    assert [tuple(node.application), tuple(last.application)] == [(0, 0), (0, 1)]
    assert last.wanted == ["first", "second"]
