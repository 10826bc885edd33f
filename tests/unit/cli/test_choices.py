from typing import Annotated

import pytest
from pydantic import TypeAdapter, ValidationError

from paceline_bench.options import names_of, numbers_to
from paceline_serving.settings import StringList

NUMBERS = TypeAdapter(Annotated[tuple[int, ...], numbers_to(9)])
NAMES = TypeAdapter(Annotated[StringList, names_of(("one", "two"), kind="thing")])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("4", (4,)),
        ("8, 1-3,2", (1, 2, 3, 8)),
        ("1-9", (1, 2, 3, 4, 5, 6, 7, 8, 9)),
        ([3, 1], (1, 3)),
        (["1-2", 9], (1, 2, 9)),
        (7, (7,)),
    ],
)
def test_numbers_are_read_from_flags_and_from_files(given, expected):
    assert NUMBERS.validate_python(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("0", "'0' is not within 1 to 9"),
        ("1-10", "'1-10' is not within 1 to 9"),
        ("3-1", "'3-1' goes down; write it as 1-3"),
        ("1,", "'' is no number and no range such as 1-10"),
        ("-1", "'-1' is no number"),
        ([1.5], "'1.5' is no number"),
        ([], "give at least one number"),
    ],
)
def test_other_numbers_are_refused(given, message):
    with pytest.raises(ValidationError, match=message):
        NUMBERS.validate_python(given)


def test_names_are_those_that_are_known():
    assert NAMES.validate_python("two, one") == ("two", "one")
    with pytest.raises(ValidationError, match="there is no thing 'three'; there are one, two"):
        NAMES.validate_python("one,three")
