"""What servers of tests are forked with."""

from importlib.util import find_spec

import pytest

from support.warm import PRELOADED


@pytest.mark.parametrize("module", PRELOADED)
def test_what_is_imported_beforehand_is_there(module):
    """The fork server leaves out in silence what is not, and all tests would be slower."""
    assert find_spec(module)
