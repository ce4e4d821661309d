"""Dispatch rules of devices that take another's."""

from __future__ import annotations

import pytest

from tilewright import rules, vendors
from tilewright.build import operators
from tilewright.errors import ProfileError

A, B = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert", "fused_qk_norm_rope"


@pytest.mark.parametrize(
    ("device", "like"), [("nvidia-h100", "nvidia-h200"), ("nvidia-b200", "nvidia-h200"), ("amd-mi355x", "amd-mi300x")]
)
def test_rules_like_anothers_are_inferred(device: str, like: str) -> None:
    for operator in operators():
        own, other = operator.kernel.rules(device), operator.kernel.rules(like)
        assert [(r.least, r.config) for r in own.rules] == [(r.least, r.config) for r in other.rules]
        assert [(r.how, r.source) for r in own.rules] == [("inferred", f"as {like}: {r.source}") for r in other.rules]
        assert "not run on" in own.status


def test_own_rules_come_first() -> None:
    by_name = {operator.name: operator.kernel.rules("mthreads-s5000") for operator in operators()}
    assert [(dict(r.least), r.config["tokens"], r.how) for r in by_name[A].rules] == [
        ({"tokens": 512}, 4, "measured"), ({}, 1, "stated"),
    ]  # fmt: skip
    assert [(r.how, r.source.split(":")[0]) for r in by_name[B].rules] == [("inferred", "as generic")]


def test_every_profile_has_rules_of_its_own_or_of_another() -> None:
    """None falls back to generic's without its file saying so."""
    for name in vendors.names():
        for operator in operators():
            assert operator.kernel.rules(name).status != "only generated, with generic's rules", name
    assert rules.load(A, "card-9", ("tokens", "heads", "kv_tokens"), ("tokens",)).status == (
        "only generated, with generic's rules"
    )


def test_a_file_without_rules_is_refused() -> None:
    with pytest.raises(ProfileError) as caught:
        rules.parse('status = "x"\n', "configs/card.toml", A, (), ())
    assert str(caught.value) == (
        f"configs/card.toml:\n  {A}: its last rule must have no threshold, so that one always fits"
    )
