"""Runs are tested on small simulations."""

from tests.simulate.conftest import bars as bars
from tests.simulate.conftest import quick as quick
