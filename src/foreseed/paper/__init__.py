"""The paper's tables and figures again: which runs make them, what they come to here, and what the paper says."""

from foreseed.paper.items import ITEMS as ITEMS
from foreseed.paper.items import Item as Item
from foreseed.paper.items import PaperArm as PaperArm
from foreseed.paper.items import find_item as find_item
from foreseed.paper.memory import device_memories as device_memories
from foreseed.paper.table import comparison_rows as comparison_rows
