from __future__ import annotations

import pytest

from compress.errors import InputError
from compress.patterns import assign, match_layers, require_matches
from compress.scheme import QuantScheme
from tests.compress.recipes import MINIMAL, read

ROLES = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
LAYERS = [
    "model.embed_tokens",
    *(f"model.layers.{index}.{role}" for index in range(12) for role in ROLES),
    "lm_head",
]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("lm_head", 1),
        ("*", len(LAYERS)),
        ("*.mlp.*", 24),
        ("*.layers.1.*", 4),
        ("model.layers.1*", 12),
        ("*_proj", 48),
        (r"re:model\.layers\.1\..*", 4),
        (r"re:.*\.([0-3])\..*", 16),
        (r"re:.*layers\.1[01]\.mlp\.\w+", 4),
        # No pattern for a whole name:
        ("layers.1", 0),
        ("model.layers.1", 0),
        (r"re:layers\.1", 0),
        (r"re:^layers.1$", 0),
        ("lm_hea", 0),
        ("LM_HEAD", 0),
        # The dot is a dot:
        ("modelXembed_tokens", 0),
        ("model?embed_tokens", 0),
        ("model.layers.[0-9].mlp.up_proj", 0),
    ],
)
def test_a_pattern_matches_whole_names(pattern: str, count: int) -> None:
    found = match_layers([pattern], LAYERS)[pattern]
    assert len(found) == count
    assert found == [layer for layer in LAYERS if layer in found]


def test_layer_one_is_not_layer_ten() -> None:
    found = match_layers(["*.layers.1.*"], LAYERS)["*.layers.1.*"]
    assert found == [f"model.layers.1.{role}" for role in ROLES]


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("lm_haed", "; did you mean 'lm_head'?"),
        ("layers.1", "; a pattern is a whole name: '*.layers.1.*' would match 4"),
        ("model.layers.1", "; a pattern is a whole name: 'model.layers.1.*' would match 4"),
        ("down_proj", "; a pattern is a whole name: '*.down_proj' would match 12"),
        (r"re:layers\.1\.", "; it must match the whole name: '.*' before and after would match 4"),
        ("re:gate", ""),
        ("*.router", ""),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_a_hint(pattern: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        require_matches(match_layers([pattern, "lm_head"], LAYERS), LAYERS)
    assert caught.value.what == f"'{pattern}' matches no layer{hint}"


def test_a_recipe_says_which_layers_are_fixed() -> None:
    recipe = read(MINIMAL + "ignore: [lm_head]\npin: {'*.1.mlp.*': int8-g32, model.embed_tokens: float}\n")
    int8 = QuantScheme(8, 32)
    assert list(recipe.pinned(LAYERS).items()) == [
        ("model.embed_tokens", None),
        ("model.layers.1.mlp.up_proj", int8),
        ("model.layers.1.mlp.down_proj", int8),
        ("lm_head", None),
    ]


def test_every_pattern_of_a_recipe_that_matches_nothing_is_named_with_its_line() -> None:
    recipe = read(MINIMAL + "ignore: [lm_haed, lm_head]\npin:\n  layers.1: int8-g32\n")
    with pytest.raises(InputError) as caught:
        recipe.pinned(LAYERS)
    assert caught.value.what.splitlines() == [
        "r.yaml:4: ignore[0]: 'lm_haed' matches no layer; did you mean 'lm_head'?",
        "r.yaml:6: pin.layers.1: 'layers.1' matches no layer; a pattern is a whole name: '*.layers.1.*' would match 4",
    ]


def test_rules_that_disagree_about_a_layer_are_an_error_and_rules_that_agree_are_not() -> None:
    assert assign({"*.0.*": 4, "*.0.mlp.*": 4}, LAYERS) == dict.fromkeys(LAYERS[1:5], 4)
    with pytest.raises(
        InputError, match=r"model\.layers\.0\.mlp\.up_proj is already given another scheme by '\*\.0\.\*'"
    ):
        assign({"*.0.*": 4, "*.0.mlp.*": None}, LAYERS)
