"""The messages between server and devices, typed, and their encoding."""

from foreseed.wire.messages import ANY_NUMBER as ANY_NUMBER
from foreseed.wire.messages import CHUNK as CHUNK
from foreseed.wire.messages import NAMES as NAMES
from foreseed.wire.messages import NOTHING_HELD as NOTHING_HELD
from foreseed.wire.messages import PROGRAM as PROGRAM
from foreseed.wire.messages import STATE as STATE
from foreseed.wire.messages import Ack as Ack
from foreseed.wire.messages import Announce as Announce
from foreseed.wire.messages import Chunk as Chunk
from foreseed.wire.messages import Fetch as Fetch
from foreseed.wire.messages import Join as Join
from foreseed.wire.messages import Leave as Leave
from foreseed.wire.messages import Message as Message
from foreseed.wire.messages import OrderMessage as OrderMessage
from foreseed.wire.messages import Presence as Presence
from foreseed.wire.messages import Ready as Ready
from foreseed.wire.messages import Reply as Reply
from foreseed.wire.messages import Update as Update
from foreseed.wire.messages import Welcome as Welcome
from foreseed.wire.messages import WireError as WireError
from foreseed.wire.messages import decode as decode
from foreseed.wire.messages import encode as encode
from foreseed.wire.messages import is_name as is_name
from foreseed.wire.messages import program_hash as program_hash
from foreseed.wire.messages import transfer_bytes as transfer_bytes
from foreseed.wire.messages import values_hash as values_hash
