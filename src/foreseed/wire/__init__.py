"""The messages between server and devices, typed, and their encoding."""

from foreseed.wire.messages import CatchUp as CatchUp
from foreseed.wire.messages import OrderMessage as OrderMessage
from foreseed.wire.messages import Reply as Reply
from foreseed.wire.messages import Update as Update
from foreseed.wire.messages import WireError as WireError
from foreseed.wire.messages import decode as decode
from foreseed.wire.messages import encode as encode
from foreseed.wire.messages import values_hash as values_hash
