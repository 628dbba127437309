"""An experiment as one typed file: every key checked, every mistake named."""

from foreseed.config.comparison import arms as arms
from foreseed.config.errors import ConfigError as ConfigError
from foreseed.config.identity import CHANGEABLE as CHANGEABLE
from foreseed.config.identity import content as content
from foreseed.config.identity import differences as differences
from foreseed.config.identity import fingerprint as fingerprint
from foreseed.config.identity import value_of as value_of
from foreseed.config.identity import why_fixed as why_fixed
from foreseed.config.method_registry import Method as Method
from foreseed.config.method_registry import methods as methods
from foreseed.config.reading import load as load
from foreseed.config.reading import overridden as overridden
from foreseed.config.schema import Config as Config
from foreseed.config.schema import Data as Data
from foreseed.config.schema import Model as Model
from foreseed.config.schema import Prune as Prune
from foreseed.config.schema import Table as Table
from foreseed.config.schema import Train as Train
from foreseed.config.schema import enter as enter
from foreseed.config.schema import withdraw as withdraw
from foreseed.config.tracker_registry import trackers as trackers
