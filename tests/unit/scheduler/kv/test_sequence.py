"""A sequence's count of computed tokens, and the identity of its prefixes."""

import pytest

from scheduler_svc.kv.sequence import HashChain, SequenceKv, hash_block_key, seed_key


def test_equal_tokens_give_equal_keys() -> None:
    """Hashing one by one or all at once gives the same keys."""
    seed = seed_key(model="m")
    steps = HashChain(seed, 2)
    for count in (1, 2, 3):
        steps.extend([1, 2, 3, 4, 5, 6], count)
    assert steps.keys == HashChain(seed, 2).extend([1, 2, 3, 4, 5, 6], 3)


@pytest.mark.parametrize(
    "other",
    [{"model": "x"}, {"model": "m", "salt": "s"}, {"model": "m", "lora": "l"}, {"model": "", "lora": "m"}],
)
def test_model_adapter_and_salt_separate_prefixes(other: dict[str, str]) -> None:
    """No part can be mistaken for another."""
    assert seed_key(model="m") != seed_key(**other)


def test_a_key_is_the_same_in_every_process() -> None:
    """Unlike ``hash()``, so that keys can be shared and compared later."""
    assert hash_block_key(b"", [1, 2, 3]).hex().startswith("4636993d3e1da4e9")


def test_computed_tokens_are_counted_from_the_end() -> None:
    """A decode step computes one token and appends one, and touches nothing but the list."""
    sequence = SequenceKv([5, 6, 7])
    assert (sequence.num_computed, sequence.num_uncomputed) == (0, 3)
    sequence.num_computed = 2
    assert sequence.num_uncomputed == 1
    sequence.token_ids.append(8)
    assert (sequence.num_computed, sequence.num_uncomputed) == (3, 1)
