"""What a driver can say, and what not."""

from hypothesis import given
from hypothesis import strategies as st

from gpupool_agent.core.plausible import (
    MEMORY_BYTES_MAX,
    UTILIZATION_PCT,
    memory_doubt,
    process_doubt,
    range_doubt,
)

anything = st.integers(min_value=0, max_value=2**64 - 1)


@given(used=anything, total=anything, reserved=anything)
def test_memory_is_believed_where_its_parts_fit_into_it(
    used: int, total: int, reserved: int
) -> None:
    fits = 0 < total <= MEMORY_BYTES_MAX and used <= total and reserved <= total
    assert (memory_doubt(used, total, reserved) == "") == fits


@given(used=anything, total=st.integers(min_value=1, max_value=MEMORY_BYTES_MAX))
def test_a_process_is_believed_to_hold_at_most_all_of_it(used: int, total: int) -> None:
    doubt = process_doubt(7, used, total)
    assert (doubt == "") == (used <= total)
    assert used <= total or "process 7" in doubt


@given(value=st.none() | st.integers())
def test_a_measurement_is_believed_within_its_range(value: int | None) -> None:
    doubt = range_doubt("utilization_pct", value, UTILIZATION_PCT)
    assert (doubt == "") == (value is None or 0 <= value <= 100)
