"""Prefixes are found by their tokens, shared page by page, and given up leaf by leaf."""

import pytest

from looplab.engine.pages import IntegrityError, PagePool
from looplab.engine.prefix import PrefixCache


def keep(cache, tokens, *, root=b"", shared=()):
    """A request that reads `tokens`, on top of pages it found, and goes."""
    pool = cache.pool
    pool.share(shared)
    table = [*shared, *(pool.take() for _ in range(len(tokens) // 2 - len(shared)))]
    cache.insert(cache.keys(root, tokens), tokens, table)
    pool.release(table)
    cache.check()
    return table


def found(cache, tokens, root=b""):
    return cache.match(cache.keys(root, tokens), tokens)


@pytest.fixture
def cache():
    return PrefixCache(PagePool(8), 2)


def test_the_longest_common_prefix_is_found_in_whole_pages(cache):
    table = keep(cache, [1, 2, 3, 4, 5, 6])
    assert found(cache, [1, 2, 3, 4, 9, 9]) == table[:2]
    assert found(cache, [1, 2, 3]) == table[:1]
    assert found(cache, [9, 2, 3, 4]) == []


def test_another_root_finds_nothing(cache):
    keep(cache, [1, 2], root=b"one key")
    assert found(cache, [1, 2], root=b"another") == []


def test_the_place_of_a_page_is_part_of_its_key(cache):
    keep(cache, [1, 2, 3, 4])
    assert found(cache, [3, 4]) == []


def test_equal_keys_of_other_tokens_are_no_hit(cache):
    keep(cache, [1, 2])
    assert cache.match(cache.keys(b"", [1, 2]), [7, 8]) == []


def test_the_leaf_that_was_used_longest_ago_goes_first(cache):
    old = keep(cache, [1, 2, 3, 4])
    new = keep(cache, [1, 2, 5, 6], shared=old[:1])
    cache.touch(old)
    for _ in range(5):  # four are free
        cache.pool.take()
    assert cache.evicted == 1 and found(cache, [1, 2, 5, 6]) == new[:1]
    cache.pool.take()
    assert found(cache, [1, 2, 3, 4]) == old[:1], "the leaf goes before the page it hangs on"
    assert cache.pool.take() == old[0] and cache.pool.take() is None


def test_pages_in_use_are_not_given_up(cache):
    table = keep(cache, [1, 2, 3, 4])
    cache.pool.share(table)
    assert [cache.pool.take() for _ in range(6)][5] is None
    assert found(cache, [1, 2, 3, 4]) == table


def test_two_that_read_the_same_at_once_keep_one_copy(cache):
    pool = cache.pool
    one, two = [pool.take(), pool.take()], [pool.take(), pool.take()]
    for table in (one, two):
        cache.insert(cache.keys(b"", [1, 2, 3, 4]), [1, 2, 3, 4], table)
    pool.release(one)
    pool.release(two)
    cache.check()
    assert found(cache, [1, 2, 3, 4]) == one and len(pool.free) == 5


def test_what_is_forgotten_goes_with_all_that_hangs_on_it(cache):
    table = keep(cache, [1, 2, 3, 4, 5, 6])
    keep(cache, [1, 2, 7, 8], shared=table[:1])
    cache.forget([table[1]])
    assert found(cache, [1, 2, 3, 4, 5, 6]) == table[:1] and len(found(cache, [1, 2, 7, 8])) == 2
    cache.forget(table[:1])
    assert not cache.nodes and len(cache.pool.free) == 7


def test_a_long_text_is_forgotten_at_once():
    cache = PrefixCache(PagePool(3001), 2)
    table = keep(cache, [1] * 6000)
    cache.forget(table)
    assert len(cache.pool.free) == 3000


def test_old_entries_of_the_list_of_leaves_are_cleared(cache):
    table = keep(cache, [1, 2])
    for _ in range(200):
        cache.touch(table)
    assert len(cache._leaves) < 80
    assert [cache.pool.take() for _ in range(7)][6] == table[0]


def test_a_broken_tree_is_found(cache):
    table = keep(cache, [1, 2, 3, 4])
    cache.pool.references[table[1]] += 1
    with pytest.raises(IntegrityError, match="without page"):
        cache.check()
