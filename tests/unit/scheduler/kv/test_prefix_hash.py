"""Prefix identity: equal keys if and only if equal history, model, adapter and salt."""

import pytest

from scheduler_svc.kv.prefix_hash import KeyChain, Media, granule_key, seed_key


def test_keys_chain_over_blocks() -> None:
    """The second block's key depends on the first block's tokens."""
    seed = seed_key(model="m")
    one, two = KeyChain(seed, 2), KeyChain(seed, 2)
    assert one.extend([1, 2, 3, 4], 2)[1] != two.extend([9, 2, 3, 4], 2)[1]


def test_equal_tokens_give_equal_keys_however_they_were_asked_for() -> None:
    """Hashing block by block or all at once is the same."""
    seed = seed_key(model="m")
    steps = KeyChain(seed, 2)
    for count in (1, 2, 3):
        steps.extend([1, 2, 3, 4, 5, 6], count)
    assert steps.keys == KeyChain(seed, 2).extend([1, 2, 3, 4, 5, 6], 3)


def test_asking_again_hashes_nothing_again() -> None:
    """Known keys are returned as they are, even if the tokens given were wrong."""
    chain = KeyChain(seed_key(model="m"), 2)
    first = chain.extend([1, 2], 1)
    assert chain.extend([7, 7], 1) == first


@pytest.mark.parametrize(
    "other",
    [{"model": "x"}, {"model": "m", "salt": "s"}, {"model": "m", "lora": "l"}, {"model": "", "lora": "m"}],
)
def test_model_adapter_and_salt_separate_prefixes(other: dict[str, str]) -> None:
    """No part can be mistaken for another."""
    assert seed_key(model="m") != seed_key(**other)


def test_a_key_is_the_same_in_every_process() -> None:
    """Unlike hash(), so that it can be shared and compared later."""
    assert granule_key(b"", [1, 2, 3]).hex().startswith("4636993d3e1da4e9")


def test_media_belong_to_the_identity_of_what_stands_for_them() -> None:
    """The same placeholder tokens for another picture are another prefix, from the granule on in which it starts."""
    seed, tokens = seed_key(model="m"), [1, 2, 9, 9, 3, 4]

    def keys(*media: Media) -> list[bytes]:
        return KeyChain(seed, 2, media).extend(tokens, 3)

    none, cat, dog = keys(), keys(Media(2, 4, b"cat")), keys(Media(2, 4, b"dog"))
    assert none[0] == cat[0] == dog[0]
    assert len({none[1], cat[1], dog[1]}) == len({none[2], cat[2], dog[2]}) == 3
    assert keys(Media(3, 4, b"cat"))[1] != cat[1]
    assert keys(Media(1, 3, b"cat"))[0] != none[0]
