"""Data sets, how they are shared out over devices, and the files that devices read."""

from foreseed.data.catalog import SETS as SETS
from foreseed.data.catalog import Entry as Entry
from foreseed.data.download import Progress as Progress
from foreseed.data.draw import picture as picture
from foreseed.data.errors import DataError as DataError
from foreseed.data.errors import PartitionError as PartitionError
from foreseed.data.formats import class_folders as class_folders
from foreseed.data.formats import image_paths as image_paths
from foreseed.data.formats import list_pictures as list_pictures
from foreseed.data.formats import read_pictures as read_pictures
from foreseed.data.partition import Partition as Partition
from foreseed.data.partition import dirichlet as dirichlet
from foreseed.data.partition import iid as iid
from foreseed.data.partition import k_classes as k_classes
from foreseed.data.sets import Dataset as Dataset
from foreseed.data.sets import HeldOut as HeldOut
from foreseed.data.sets import load as load
from foreseed.data.sets import load_held_out as load_held_out
from foreseed.data.sets import origin as origin
from foreseed.data.shards import shard_name as shard_name
from foreseed.data.shards import write_shard as write_shard
from foreseed.data.shards import write_shards as write_shards
from foreseed.data.store import data_root as data_root
from foreseed.data.store import get as get
from foreseed.data.store import where as where
