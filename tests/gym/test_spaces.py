"""The space of texts."""

import copy

import pytest
from gymnasium.vector.utils import batch_space, concatenate, iterate
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.gym.spaces import UnicodeText


@given(st.text(max_size=20))
def test_every_text_up_to_the_length_is_a_member(text: str) -> None:
    assert text in UnicodeText(20)
    assert (text in UnicodeText(3)) == (len(text) <= 3)


@pytest.mark.parametrize("value", ["\ud800", "x" * 21, 7, None, b"x", ["x"]])
def test_other_values_are_not_members(value: object) -> None:
    assert value not in UnicodeText(20)


def test_samples_are_members_and_reproducible() -> None:
    space = UnicodeText(10, seed=3)
    samples = [space.sample() for _ in range(100)]
    assert all(sample in space for sample in samples)
    space.seed(3)
    assert [space.sample() for _ in range(100)] == samples
    assert len(set(samples)) > 50


def test_masks_are_refused() -> None:
    with pytest.raises(ValueError, match="neither mask nor probability"):
        UnicodeText(10).sample(mask=())


def test_spaces_of_the_same_length_are_equal() -> None:
    assert UnicodeText(10) == copy.deepcopy(UnicodeText(10))
    assert UnicodeText(10) != UnicodeText(11)
    assert hash(UnicodeText(10)) == hash(UnicodeText(10))
    assert repr(UnicodeText(10)) == "UnicodeText(10)"


def test_the_space_can_be_batched() -> None:
    space = UnicodeText(10)
    batch = batch_space(space, 2)
    assert concatenate(space, ["a", "ß"], ()) == ("a", "ß")
    assert list(iterate(batch, ("a", "ß"))) == ["a", "ß"]
    assert ("a", "ß") in batch
