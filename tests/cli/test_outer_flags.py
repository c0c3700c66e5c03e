"""``--outer`` and what goes with it, from words to settings."""

import attrs
import pytest

from yeto.cli.fitting import fitting_merge_alpha, fitting_outer
from yeto.cli.policy import PolicyFlags
from yeto.cli.run_syncer import SyncerFlags
from yeto.core.outer import resolved
from yeto.errors import ConfigError
from yeto.syncer.config import merge_profile

LENGTH = {"learners": 2, "total_steps": 64}


def policy(**flags):
    return PolicyFlags(**LENGTH, **flags).core_config()


def test_the_default_is_what_did_best():
    assert policy() == policy(outer="auto") == policy(outer="direct")
    outer = resolved(policy(), num_fragments=8, target=64)
    assert (outer.kind, outer.lr, outer.momentum) == ("direct", 1.0, 0.0)


def test_stock_has_its_own_numbers():
    settings = policy(outer="stock")
    assert (settings.outer, settings.outer_lr, settings.outer_momentum) == ("stock", None, None)
    outer = resolved(settings, num_fragments=8, target=64)
    assert (outer.kind, outer.lr, outer.momentum) == ("stock", 0.7, 0.9)


def test_numbers_without_a_kind_are_those_of_the_kind_that_has_them():
    assert policy(outer_lr=0.7).outer == policy(outer_momentum=0.5).outer == "stock"


@pytest.mark.parametrize(
    "iso", [{"iso_backend": "scalar"}, {"iso_backend": "torch-svd", "iso_worker_devices": "cpu"}]
)
def test_isotropic_merges_that_are_set_up_are_made(iso):
    flags = SyncerFlags(**LENGTH, allow_unauthenticated=True, **iso)
    assert flags.config().core.outer == "stock"
    assert attrs.evolve(flags, outer="direct").config().core.outer == "direct"


def test_numbers_are_stated_beside_a_kind():
    outer = resolved(policy(outer="direct", outer_lr=0.8), num_fragments=8, target=64)
    assert (outer.kind, outer.lr, outer.momentum) == ("direct", 0.8, 0.0)


def test_outer_normalised_is_another_way_to_say_it():
    assert policy(outer_normalised=True) == policy(outer="normalised")
    assert policy(outer_normalised=True, outer="normalised") == policy(outer="normalised")
    with pytest.raises(ConfigError, match="--outer direct and --outer-normalised: give one of them"):
        policy(outer_normalised=True, outer="direct")


def test_a_profile_names_the_kind_and_stock_keeps_its_own():
    stock = merge_profile(policy(outer="stock"))
    assert stock == merge_profile(attrs.evolve(policy(outer="stock"), outer_lr=0.7, outer_momentum=0.9))
    profiles = {merge_profile(policy(outer=kind)) for kind in ("stock", "direct", "normalised")}
    assert stock in profiles
    assert len(profiles) == 3


@pytest.mark.parametrize(
    ("given", "outer", "interval", "expected"),
    [
        (None, "stock", 24.0, None),
        (None, "normalised", 24.0, None),
        (None, "direct", 24.0, "carry"),
        (None, "auto", 4.0, "carry"),
        (None, "auto", 24.0, "carry"),
        (0.5, "direct", 24.0, 0.5),
        ("carry", "stock", 24.0, "carry"),
    ],
)
def test_learners_of_a_whole_run_carry_where_fragments_become_averages(given, outer, interval, expected):
    settings = policy(outer=outer, sync_interval_steps=interval)
    assert fitting_merge_alpha(given, settings, num_fragments=8, total_steps=64) == expected


def test_isotropic_merges_of_a_whole_run_are_made():
    assert [fitting_outer(given, "iso") for given in (None, "direct", "auto")] == ["stock", "direct", "auto"]
    assert fitting_outer(None, "rda") is None
