"""Property-based tests draw the same examples in every CI run, and new ones everywhere else; none has a deadline."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("here", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# Threads that wait for each other sleep. Two tests at a time on two cores, and all that they start, would else spend
# more on waiting than on work: torch reads it when it is loaded, here and in other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
