"""Random tests try the same examples in every run, unless `make hunt` wants new ones."""

import os

from hypothesis import settings

from kvstrata.testing.machines import HUNT

is_hunt = HUNT in os.environ
settings.register_profile("tests", derandomize=not is_hunt, database=None, deadline=None)
settings.load_profile("tests")
