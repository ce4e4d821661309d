"""Vendor profiles: what the shipped files say, and how a malformed one is rejected."""

import dataclasses
import os
import subprocess
import sys

import pytest

from tilewright.errors import ProfileError
from tilewright.vendors import VendorProfile, load, names, parse
from tilewright.vendors.lowering import LOWERING

SHIPPED = (
    "amd-mi300x",
    "amd-mi355x",
    "ascend-910b",
    "cambricon-mlu590",
    "generic",
    "hygon-bw1000",
    "metax-c550",
    "mthreads-s5000",
    "nvidia-a100",
    "nvidia-b200",
    "nvidia-h100",
    "nvidia-h200",
    "thead-zw810e",
)
HEAD = 'name = "card-1"\nvendor = "maker"\n'


def fact(value: str) -> str:
    return f'{{ value = {value}, how = "measured", source = "a run" }}'


def test_names_are_the_shipped_files() -> None:
    assert names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_every_fact_has_a_provenance(name: str) -> None:
    profile = load(name)
    for field in dataclasses.fields(VendorProfile):
        value = getattr(profile, field.name)
        if "table" in field.metadata and field.name != "lowering":
            assert all(f"{field.name}.{key}" in profile.provenance for key in value)
        if "fact" in field.metadata and value != field.default:
            assert field.name in profile.provenance
    for label, (how, source) in profile.provenance.items():
        assert how in ("measured", "stated", "inferred", "known"), label
        assert source and not source.startswith("/"), label


@pytest.mark.parametrize("name", SHIPPED)
def test_facts_agree_with_each_other(name: str) -> None:
    profile = load(name)
    if profile.warp_size and profile.max_threads and profile.num_warps:
        assert max(profile.num_warps) * profile.warp_size <= profile.max_threads
    if "cast" in (profile.lowering["e4m3_encode"], profile.lowering["e4m3_decode"]):
        assert profile.support["cast.e4m3"] in ("native", "emulated")
    if profile.lowering["pair"] == "reshape_split_join":
        assert profile.support.get("op.reshape_pair", "native") != "unsupported"
    assert profile.supported_capabilities | profile.unsupported_capabilities == set(profile.support)
    assert not profile.supported_capabilities & profile.unsupported_capabilities
    assert bool(profile.match) == (name != "generic")


def test_lowering_always_answers_and_generic_is_all_defaults() -> None:
    for name in names():
        assert load(name).lowering.keys() == LOWERING.keys()
    generic = load("generic")
    assert generic.lowering == {name: axis.default for name, axis in LOWERING.items()}
    assert not [label for label in generic.provenance if label.startswith("lowering.")]


# Figures of the cited sources that generated code and dispatch depend on.
@pytest.mark.parametrize(
    ("name", "warp_size", "copy_gbps", "encode", "pair", "tail"),
    [
        ("nvidia-h200", 32, 4228, "cast", "reshape_split_join", "mask"),
        ("nvidia-a100", 32, 2039, "int_rne", "reshape_split_join", "mask"),
        ("hygon-bw1000", 64, 1340.3, "int_rne", "reshape_split_join", "mask"),
        ("metax-c550", 64, 1388, "cast", "reshape_split_join", "mask"),
        ("mthreads-s5000", 32, 1332, "cast", "reshape_split_join", "mask"),
        ("thead-zw810e", 32, None, "int_rne", "reshape_split_join", "mask"),
        ("ascend-910b", None, None, "int_rne", "pair_address", "exact"),
        ("cambricon-mlu590", None, None, "int_rne", "pair_address", "mask"),
        ("generic", None, None, "int_rne", "pair_address", "mask"),
    ],
)
def test_key_values(
    name: str, warp_size: object, copy_gbps: object, encode: str, pair: str, tail: str
) -> None:
    profile = load(name)
    assert (profile.warp_size, profile.copy_gbps) == (warp_size, copy_gbps)
    lowering = profile.lowering
    assert (lowering["e4m3_encode"], lowering["pair"], lowering["tail"]) == (encode, pair, tail)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("h200", "nvidia-h200"),
        ("hygon", "hygon-bw1000"),
        ("metax", "metax-c550"),
        ("muxi-c550", "metax-c550"),
        ("moore-s5000", "mthreads-s5000"),
        ("ascend-910b3", "ascend-910b"),
        ("ascend-910b4", "ascend-910b"),
        (" NVIDIA_H200 ", "nvidia-h200"),
    ],
)
def test_an_alias_loads_the_same_object(alias: str, name: str) -> None:
    assert load(alias) is load(name)
    assert load(alias).name == name


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ProfileError) as caught:
        load("h20")
    lines = str(caught.value).splitlines()
    assert lines[0] == "no vendor profile is called 'h20'; names and aliases are"
    assert "  metax-c550         metax, c550, muxi-c550" in lines
    assert len(lines) == 1 + len(SHIPPED)


def test_hash_is_short_and_changes_with_any_field() -> None:
    profile = load("h200")
    assert len(profile.hash) == 12 and int(profile.hash, 16) >= 0
    assert dataclasses.replace(profile).hash == profile.hash
    changes = {
        "max_threads": 512,
        "num_warps": (1, 2),
        "backend_modes": {"triton": frozenset({"aot"})},
        "lowering": {**profile.lowering, "tail": "exact"},
        "provenance": {**profile.provenance, "max_threads": ("measured", "a run")},
    }
    hashes = {dataclasses.replace(profile, **{key: value}).hash for key, value in changes.items()}
    assert len(hashes | {profile.hash}) == len(changes) + 1
    assert len({load(name).hash for name in names()}) == len(SHIPPED)


def test_profiles_are_read_only_and_hashable() -> None:
    profile = load("h200")
    with pytest.raises(dataclasses.FrozenInstanceError):
        profile.max_threads = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        profile.lowering["tail"] = "exact"  # type: ignore[index]
    assert {profile: 1}[load("nvidia-h200")] == 1


def test_describe_tells_facts_defaults_and_unknowns_apart() -> None:
    profile = parse(
        HEAD + f"warp_size = {fact(chr(34) + 'none' + chr(34))}\nmax_threads = {fact('256')}\n"
        f"[lowering]\ntail = {fact(chr(34) + 'exact' + chr(34))}\n",
        "card-1.toml",
    )
    lines = [" ".join(line.split()) for line in profile.describe().splitlines()]
    assert lines[0] == f"card-1 profile {profile.hash}"
    assert "warp_size none measured: a run" in lines
    assert "max_threads 256 measured: a run" in lines
    assert "align_bytes 16 default: the widest access of one lane on most devices" in lines
    assert "scratch_bytes unknown" in lines
    assert "support.cast.e4m3 unknown" in lines
    assert "lowering.tail exact measured: a run" in lines
    assert f"lowering.pair pair_address default: {LOWERING['pair'].why}" in lines
    assert "env unknown" in lines
    for field in dataclasses.fields(VendorProfile):
        if field.name not in ("name", "provenance"):
            assert any(line.split()[0].split(".")[0] == field.name for line in lines), field.name


FORM = 'write { value = ..., how = "...", source = "..." }'
MISTAKES = {
    "no provenance": ("warp_size = 64", f"warp_size: 64 has no provenance; {FORM}"),
    "unknown field": (
        f"wrap_size = {fact('64')}",
        "wrap_size: no such field; did you mean warp_size?",
    ),
    "wrong type": (
        f"max_threads = {fact('true')}",
        "max_threads: true is not a whole number above 0",
    ),
    "too short": (
        f"min_dot = {fact('[1, 2]')}",
        "min_dot: [1, 2] is not a list of three whole numbers above 0",
    ),
    "unknown how": (
        'max_threads = { value = 1, how = "heard", source = "a run" }',
        'max_threads.how: "heard" is not measured, stated, inferred or known',
    ),
    "no source": (
        'max_threads = { value = 1, how = "known" }',
        "max_threads.source: missing; give a non-empty string",
    ),
    "empty source": (
        'max_threads = { value = 1, how = "known", source = " " }',
        'max_threads.source: " " is not a non-empty string',
    ),
    "stranger in a fact": (
        'max_threads = { value = 1, how = "known", source = "a run", unit = "lanes" }',
        "max_threads.unit: no such field; choose among value, how, source",
    ),
    "unknown axis": (
        f"[lowering]\npairs = {fact('1')}",
        "lowering.pairs: no such field; did you mean pair?",
    ),
    "unknown lowering": (
        '[lowering]\npair = { value = "split", how = "known", source = "a run" }',
        'lowering.pair: "split" is not reshape_split_join or pair_address',
    ),
    "early return": (
        '[lowering]\nbranch = { value = "early_return", how = "known", source = "a run" }',
        'lowering.branch: "early_return" is not positive_if or separate',
    ),
    "unquoted capability": (
        f"[support]\ncast.e4m3 = {fact('1')}",
        "support.cast: no such field; did you mean cast.e4m3?",
    ),
    "fourth state": (
        '[support]\n"cast.e4m3" = { value = "slow", how = "known", source = "a run" }',
        'support.cast.e4m3: "slow" is not native, emulated or unsupported',
    ),
    "unknown match": (
        f"[match]\nsmi = {fact('1')}",
        "match.smi: no such field; choose among torch_attr, gcn_arch, name_contains, cc",
    ),
    "no table": ("env = 3", "env: 3 is not a table of facts"),
    "alias": (
        'aliases = ["Card 1"]',
        'aliases: ["Card 1"] is not a list of names of lower-case letters, digits and hyphens',
    ),
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_named_with_its_cure(text: str, message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        parse(HEAD + text, "vendors/card-1.toml")
    assert str(caught.value) == f"vendors/card-1.toml: 1 problem\n  {message}"


def test_all_mistakes_of_a_file_come_at_once() -> None:
    text = f'vendor = "X Y"\nwarp_size = 64\n[lowering]\ntail = {fact("3")}\n'
    with pytest.raises(ProfileError) as caught:
        parse(text, "card-1.toml")
    name = "a name of lower-case letters, digits and hyphens"
    assert str(caught.value).splitlines() == [
        "card-1.toml: 4 problems",
        f"  name: missing; give {name}",
        f'  vendor: "X Y" is not {name}',
        f"  warp_size: 64 has no provenance; {FORM}",
        "  lowering.tail: 3 is not mask or exact",
    ]


def test_what_is_not_toml_says_where() -> None:
    with pytest.raises(ProfileError) as caught:
        parse("name = \n", "card-1.toml")
    assert str(caught.value) == "card-1.toml: not TOML: Invalid value (at line 1, column 8)"


ALONE = """
import sys
for name in ("torch", "triton", "ninetoothed"):
    sys.modules[name] = None  # importing it raises ImportError
from tilewright.vendors import detect, load, names
print(detect(), *(load(name).hash for name in names()))
"""
LAZY = """
import sys
import tilewright.vendors
tilewright.vendors.load("h200").describe()
print(sorted({"torch", "triton", "ninetoothed"} & sys.modules.keys()))
"""


def run(code: str, seed: str = "0") -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    environment.pop("TILEWRIGHT_DEVICE", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_import_and_load_need_no_torch() -> None:
    assert run(LAZY) == "[]"


def test_hashes_do_not_depend_on_the_process() -> None:
    expected = " ".join(["generic", *(load(name).hash for name in names())])
    assert {run(ALONE, "1"), run(ALONE, "2")} == {expected}
