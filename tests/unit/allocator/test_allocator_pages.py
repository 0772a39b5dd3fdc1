import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupool.wire.errors import BadField
from gpupool_allocator.rpc.pages import page_after, page_token


@given(st.lists(st.text(), min_size=1, max_size=3), st.lists(st.text(), max_size=3))
def test_a_page_goes_on_where_the_one_before_ended(after: list[str], filters: list[str]) -> None:
    token = page_token("nodes", filters, after)
    assert page_after("nodes", filters, token, len(after)) == tuple(after)


def test_no_token_is_the_first_page() -> None:
    assert page_after("devices", (), "", 2) == ("", "")


@given(st.text(max_size=200))
def test_what_is_no_token_is_refused(text: str) -> None:
    if text:
        with pytest.raises(BadField, match="page_token"):
            page_after("nodes", (), text, 1)


def test_a_token_of_another_listing_or_filter_is_refused() -> None:
    token = page_token("leases", ("default",), ["l-1"])
    with pytest.raises(BadField):
        page_after("holds", ("default",), token, 1)
    with pytest.raises(BadField):
        page_after("leases", ("other",), token, 1)


def test_a_huge_token_is_refused_unread() -> None:
    with pytest.raises(BadField):
        page_after("nodes", (), "A" * 10_000_000, 1)
