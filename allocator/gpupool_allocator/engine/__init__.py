"""Drives the pure core: events in, effects out, one commit at a time."""

from gpupool_allocator.engine.calls import AnswerStream, FinalAnswer, RefusedError, Result, Sink
from gpupool_allocator.engine.engine import AgentOutbound, Engine, EngineStoppedError

__all__ = [
    "AgentOutbound",
    "AnswerStream",
    "Engine",
    "EngineStoppedError",
    "FinalAnswer",
    "RefusedError",
    "Result",
    "Sink",
]
