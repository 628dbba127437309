"""The methods, one file each, to be read beside their papers; importing this room makes their names known."""

from foreseed.methods import baffle as baffle
from foreseed.methods import baffle_original as baffle_original
from foreseed.methods import fedavg as fedavg
from foreseed.methods import feddst as feddst
from foreseed.methods import fedkseed as fedkseed
from foreseed.methods import fedsgd as fedsgd
from foreseed.methods import fedtiny as fedtiny
from foreseed.methods import lotteryfl as lotteryfl
from foreseed.methods import ntk_baffle as ntk_baffle
from foreseed.methods import ntk_fedavg as ntk_fedavg
from foreseed.methods import prunefl as prunefl
from foreseed.methods import zerofl as zerofl
from foreseed.methods.protocol import UNSAVED as UNSAVED
from foreseed.methods.protocol import Devices as Devices
from foreseed.methods.protocol import Job as Job
from foreseed.methods.protocol import KeepsFiles as KeepsFiles
from foreseed.methods.protocol import Local as Local
from foreseed.methods.protocol import LocalResult as LocalResult
from foreseed.methods.protocol import Prober as Prober
from foreseed.methods.protocol import RoundResult as RoundResult
from foreseed.methods.protocol import State as State
from foreseed.methods.protocol import Traffic as Traffic
from foreseed.methods.task import Task as Task
from foreseed.methods.task import make_task as make_task
