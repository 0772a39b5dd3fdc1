"""Placement: which devices a request gets, or the counted reasons why it gets none."""

from gpupool_allocator.core.placement.plan import Plan, PlannedMember, Unplaced, plan
from gpupool_allocator.core.placement.soonest import soonest
from gpupool_allocator.core.placement.validator import validate
from gpupool_allocator.core.placement.verdicts import explain
from gpupool_allocator.core.placement.wakeup import may_fit_now

__all__ = [
    "Plan",
    "PlannedMember",
    "Unplaced",
    "explain",
    "may_fit_now",
    "plan",
    "soonest",
    "validate",
]
