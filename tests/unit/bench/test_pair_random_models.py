import pytest

from paceline_bench.pair.engine import decode, measure_rows
from paceline_bench.pair.random_models import RandomModel, Shape
from paceline_engine.torch_backend.llama import FusedLlama


def test_a_shape_is_layers_and_width():
    assert Shape.parse("40x5120") == Shape(40, 5120)
    assert str(Shape(2, 768)) == "2x768"


@pytest.mark.parametrize(
    "words", ["", "40", "40x", "x64", "4x100", "0x64", "4x0", "-1x64", "1x64x2"]
)
def test_other_words_are_no_shape(words):
    with pytest.raises(ValueError, match=f"{words!r}"):
        Shape.parse(words)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_random_model_computes_as_a_loaded_one(dtype):
    model = RandomModel(Shape(2, 64), dtype=dtype, device="cpu", threads=1)
    assert isinstance(model.decoder, FusedLlama)
    assert len(decode(model, range(1, 20), 3).token_ids) == 3
    assert set(measure_rows(model, range(1, 20), (1, 4), repeats=1)) == {1, 4}


def test_where_forwards_cannot_be_captured_they_are_computed():
    model = RandomModel(Shape(1, 64), dtype="float32", device="cpu", capture=True)
    assert not model.captures
    assert len(decode(model, range(1, 20), 3).token_ids) == 3
