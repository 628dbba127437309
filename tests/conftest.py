"""Property-based tests draw the same examples in every CI run, and new ones everywhere else; none has a deadline."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("here", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")
