"""Page tokens: where a listing goes on, opaque to clients and checked when they return.

A token names the last entry of its page and is bound to the listing and its filters,
so that one from another listing is refused rather than misread.
"""

import base64
import binascii
import json
import zlib
from collections.abc import Sequence

from gpupool.wire.errors import BadField

ACCEPTED = "the tokens of this listing's pages"
CHARS_MAX = 8192
"""Two names of 253 characters, each escaped to six bytes, in base64, with a margin."""

_CRC_BYTES = 4


def page_token(listing: str, filters: Sequence[str], after: Sequence[str]) -> str:
    """The token of the page after the entry ``after``."""
    place = json.dumps(list(after)).encode()
    return base64.urlsafe_b64encode(_checksum(listing, filters, place) + place).decode()


def page_after(listing: str, filters: Sequence[str], token: str, parts: int) -> tuple[str, ...]:
    """The entry that the page follows: ``parts`` empty texts for the first page.

    BadField for what is no token of this listing with these filters.
    """
    if not token:
        return ("",) * parts
    if len(token) > CHARS_MAX:
        raise BadField("page_token", token, ACCEPTED)
    try:
        packed = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
        checksum, place = packed[:_CRC_BYTES], packed[_CRC_BYTES:]
        if checksum != _checksum(listing, filters, place):
            raise BadField("page_token", token, ACCEPTED)
        after = tuple(str(part) for part in json.loads(place))
    except (binascii.Error, UnicodeEncodeError, json.JSONDecodeError) as error:
        raise BadField("page_token", token, ACCEPTED) from error
    if len(after) != parts:
        raise BadField("page_token", token, ACCEPTED)
    return after


def _checksum(listing: str, filters: Sequence[str], place: bytes) -> bytes:
    bound = json.dumps([listing, *filters]).encode() + b"\0" + place
    return zlib.crc32(bound).to_bytes(_CRC_BYTES, "big")
