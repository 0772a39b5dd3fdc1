"""An allocator whose placement has a bug: it proposes the first places again and again.

Everything else of it is the real program. The bug is what C04 is about; the check that
must stop it knows nothing of the placement code.
"""

import sys
from typing import Any

from gpupool_allocator.__main__ import main
from gpupool_allocator.core import granting
from gpupool_allocator.core.placement import Plan, plan

_first: list[Plan] = []


def _first_plan_again(*asked: Any, **how: Any) -> Any:
    found = plan(*asked, **how)
    if isinstance(found, Plan):
        _first.append(found)
    return _first[0] if _first else found


if __name__ == "__main__":
    setattr(granting, plan.__name__, _first_plan_again)
    sys.exit(main())
