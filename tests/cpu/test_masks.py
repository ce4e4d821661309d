"""Masks of the DeepSeek operator, counted exactly: what the prover could not drop, in facts and in generated text."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tilewright import vendors
from tilewright.kernel import BranchText, Kernel
from tilewright.launch import OPERATORS
from tilewright.ops import fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert as operator

NAME = operator.__name__
SHIPPED = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic")
KV, Q = 0, 1  # the branches of the kernel

# Tile sizes that are literals in the text; the others are parameters of the kernel.
BOUND: list[dict[str, int]] = [
    {},
    {"tokens": 1},
    {"kv_tokens": 1},
    {"heads": 1},
    {"tokens": 1, "heads": 1, "kv_tokens": 1},
    {"tokens": 1, "heads": 2, "kv_tokens": 1},
    {"tokens": 8, "heads": 1, "kv_tokens": 8},
    {"tokens": 4, "heads": 8, "kv_tokens": 2},
]

Found = Counter[tuple[str, str, frozenset[str]]]  # kind, parameter, conditions


def kernel() -> Kernel:
    return OPERATORS[NAME].kernel


def expected_kv(lowering: Any, bound: dict[str, int]) -> Found:
    """slot >= 0 and the lane limits; token < num_inserted where slots are read, if a program takes several."""
    pairs_apart = lowering["pair"] == "pair_address"
    quantised = "group < 7" if pairs_apart else "lane < 448"
    token = [] if bound.get("kv_tokens") == 1 else ["token < num_inserted"]
    return masks(
        ("index", "slot_mapping", *token),
        ("index", "position_ids", "slot >= 0"),
        ("load", "x", "slot >= 0", quantised),
        ("load", "turning", "slot >= 0"),
        ("load", "cos", "slot >= 0"),
        ("load", "sin", "slot >= 0"),
        ("store", "codes", "slot >= 0", quantised),
        ("store", "scales", "slot >= 0"),
        ("store", "tail", "slot >= 0"),
    )


def expected_q(bound: dict[str, int], exact: bool) -> Found:
    """token < num_tokens, if a program takes several; the tables' own limit, past which they read as 1 and 0."""
    token = [] if bound.get("tokens") == 1 else ["token < num_tokens"]
    head = [] if exact or bound.get("heads") == 1 else ["head < num_heads"]
    return masks(
        ("index", "position_ids", *token),
        ("load", "x", *token, *head),
        ("load", "cos", *token, "pair >= 224"),
        ("load", "sin", *token, "pair >= 224"),
        ("store", "out", *token, *head),
    )


def masks(*entries: tuple[str, ...]) -> Found:
    return Counter((kind, name, frozenset(conditions)) for kind, name, *conditions in entries)


def noted(branch: BranchText) -> Found:
    """The masks that the generator says it left."""
    for mask in branch.masks:
        assert len(mask.conditions) == len(mask.texts) == len(set(mask.texts))
    return Counter((mask.kind, mask.parameter, frozenset(mask.texts)) for mask in branch.masks)


def written(source: str) -> Found:
    """The masks in a device function's text."""
    tree = ast.parse(source)
    named = {
        node.targets[0].id: plain(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Compare)
        and isinstance(node.targets[0], ast.Name)
    }
    found: Found = Counter()
    for call in accesses(tree):
        where = call.args[0]
        while isinstance(where, ast.BinOp):
            where = where.left
        assert isinstance(where, ast.Name)
        kind, name = call.func.attr, where.id.removesuffix("_ptrs")  # type: ignore[attr-defined]
        if not where.id.endswith("_ptrs"):
            kind = "index"
        if (kind, name) == ("store", "x"):  # q in place: the output's pointers are the input's
            name = "out"
        mask = next((keyword.value for keyword in call.keywords if keyword.arg == "mask"), None)
        found[kind, name, frozenset(named.get(text, text) for text in conjuncts(mask))] += 1
    return found


def accesses(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "tl.store"):
            yield node


def conjuncts(mask: ast.expr | None) -> Iterator[str]:
    if isinstance(mask, ast.BinOp) and isinstance(mask.op, ast.BitAnd):
        yield from conjuncts(mask.left)
        yield from conjuncts(mask.right)
    elif mask is not None:
        yield plain(mask)


def plain(node: ast.expr) -> str:
    """The text without the [:, None] that line dimensions up."""

    class Bare(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            return self.visit(node.value)

    return ast.unparse(Bare().visit(ast.parse(ast.unparse(node), mode="eval").body))


def loose_comparisons(source: str) -> list[str]:
    """Comparisons that are neither part of a mask nor what a tl.where of the application chooses by, by name or not."""
    tree = ast.parse(source)
    wheres = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "tl.where"]
    chosen_by = {part.id for call in wheres for part in ast.walk(call.args[0]) if isinstance(part, ast.Name)}
    used = {id(node) for call in accesses(tree) for keyword in call.keywords for node in ast.walk(keyword.value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.where":
            used |= {id(part) for part in ast.walk(node.args[0])}
        if isinstance(node, ast.Assign) and (
            ast.unparse(node.targets[0]).endswith("_ok") or ast.unparse(node.targets[0]) in chosen_by
        ):
            used |= {id(part) for part in ast.walk(node.value)}
    return [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Compare) and id(node) not in used]


def variants() -> Iterator[Any]:
    for profile, bound, exact in itertools.product(SHIPPED, BOUND, (True, False)):
        tiles = ".".join(f"{name}{size}" for name, size in bound.items()) or "parameters"
        yield pytest.param(profile, bound, exact, id=f"{profile}-{tiles}-{'exact' if exact else 'masked'}")


@pytest.mark.parametrize(("profile", "bound", "exact"), list(variants()))
def test_masks(profile: str, bound: dict[str, int], exact: bool) -> None:
    lowering = vendors.load(profile).lowering
    for number, expected in ((KV, expected_kv(lowering, bound)), (Q, expected_q(bound, exact))):
        branch = kernel().branch(number, lowering, bound=bound, exact=exact)
        assert noted(branch) == expected
        assert written(branch.source) == expected
        assert loose_comparisons(branch.source) == []


@pytest.mark.parametrize("profile", SHIPPED)
def test_masks_of_the_module(profile: str) -> None:
    """The functions of the shipped text, its masked variant included, have the masks above and no others."""
    lowering, rules = vendors.load(profile).lowering, kernel().rules(profile).rules
    sizes = {tile: {rule.config[tile] for rule in rules} for tile in kernel().tiles}
    bound = {tile: next(iter(values)) for tile, values in sizes.items() if len(values) == 1}
    tree = ast.parse(OPERATORS[NAME].source(profile))
    functions = {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    expected = {"kv_row": expected_kv(lowering, bound), "q_head": expected_q(bound, exact=True)}
    if bound.get("heads") != 1:
        expected["q_head_masked"] = expected_q(bound, exact=False)
    assert {name for name, text in functions.items() if any(written(text))} == set(expected)
    assert {name: written(functions[name]) for name in expected} == expected


def test_no_mask_but_the_tables_own_where_nothing_is_left_over() -> None:
    """One token a program and a head tile that divides: the main load and store of q are bare."""
    branch = kernel().branch(Q, vendors.load("nvidia-h200").lowering, bound={"tokens": 1})
    bare = [mask for mask in branch.masks if not mask.conditions]
    assert sorted((mask.kind, mask.parameter) for mask in bare) == [
        ("index", "position_ids"),
        ("load", "x"),
        ("store", "out"),
    ]
    assert branch.source.count("mask=") == 2


def test_the_reader_of_masks_sees_a_mask_too_many() -> None:
    source = kernel().branch(Q, vendors.load("nvidia-h200").lowering, bound={"tokens": 1}).source
    more = source.replace("tl.load(x_ptrs)", "tl.load(x_ptrs, mask=(lane < 512)[None, :], other=0.0)")
    assert written(more) - written(source) == masks(("load", "x", "lane < 512"))
    loose = source.replace("    lane = ", "    odd = head > 3\n    lane = ", 1)
    assert loose_comparisons(loose) == ["head > 3"]
