"""Pages are in one state each, and go back where they came from."""

import pytest

from looplab.engine.pages import IntegrityError, PagePool, pages_of, pages_of_request


def counts(pool):
    return len(pool.free), pool.active, pool.idle_cached, pool.quarantined


def test_page_zero_is_never_handed_out():
    pool = PagePool(4)
    assert sorted(pool.take() for _ in range(3)) == [1, 2, 3]
    assert pool.take() is None


def test_a_shared_page_is_free_after_its_last_reader():
    pool = PagePool(3)
    page = pool.take()
    pool.share([page])
    pool.release([page])
    assert counts(pool) == (1, 1, 0, 0)
    pool.release([page])
    assert counts(pool) == (2, 0, 0, 0)


def test_a_held_page_is_quarantined_until_the_launch_is_back():
    pool = PagePool(3)
    page = pool.take()
    pool.hold([page])
    pool.release([page])
    assert counts(pool) == (1, 0, 0, 1) and pool.take() != page
    pool.unhold([page])
    assert counts(pool) == (1, 1, 0, 0)


def test_a_cached_page_stays_until_it_is_reclaimed_and_a_hit_makes_it_active():
    pool = PagePool(2)
    page = pool.take()
    pool.set_cached(page, True)
    pool.release([page])
    assert counts(pool) == (0, 0, 1, 0) and pool.available == 1
    pool.share([page])
    assert counts(pool) == (0, 1, 0, 0) and pool.take() is None
    pool.release([page])
    pool.reclaim = lambda: pool.set_cached(page, False)
    assert pool.take() == page


def test_a_quarantined_page_that_is_hit_is_active_and_then_cached():
    pool = PagePool(2)
    page = pool.take()
    pool.set_cached(page, True)
    pool.hold([page])
    pool.release([page])
    pool.share([page])
    pool.unhold([page])
    assert counts(pool) == (0, 1, 0, 0)
    pool.release([page])
    assert counts(pool) == (0, 0, 1, 0)


def test_nobody_shares_a_free_page():
    with pytest.raises(IntegrityError, match="page 1 is free"):
        PagePool(3).share([1])


@pytest.mark.parametrize("tables", [[[1], [1]], [[2]], []])
def test_counts_that_the_tables_do_not_bear_out_are_found(tables):
    pool = PagePool(3)
    assert pool.take() == 1
    pool.check([[1]], [])
    with pytest.raises(IntegrityError, match="tables give"):
        pool.check(tables, [])


def test_a_lost_page_is_found():
    pool = PagePool(4)
    pool.free.remove(2)
    with pytest.raises(IntegrityError, match="by state"):
        pool.check([], [])


def test_choices_share_the_full_pages_of_the_prompt():
    assert [pages_of(tokens, 4) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert pages_of_request(9, 1, 1, 4) == 3
    assert pages_of_request(9, 4, 1, 4) == 3  # the last token is not kept: 12 tokens
    assert pages_of_request(9, 5, 3, 4) == 2 + 3 * 2
