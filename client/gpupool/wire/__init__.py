"""The wire: protobuf messages to the pool's words and back, checked at the door.

``x_to_proto`` never fails for an object within ``gpupool.model.limits``;
``x_from_proto`` takes what any peer may send and raises ``BadField`` for
everything outside the accepted ranges, so that nothing behind it checks again.
"""
