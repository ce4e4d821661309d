"""Standalone modules: one file an operator and device, and a manifest."""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tilewright
from tilewright import binaries, flaggems, handwritten, vendors
from tilewright.errors import BuildError
from tilewright.files import write
from tilewright.launch import OPERATORS, Operator
from tilewright.lint import lint

LAYOUTS = ("plain", "flaggems")


@dataclass(frozen=True)
class Built:
    """One written module; `file` is relative to the output folder, the hashes are of SHA-256.

    A module written by hand has no arrangements and no applications.

    Attributes:
        inputs: hash of all that the text is made of; a build that finds it unchanged makes nothing again.
        status: what was run, from the device's rules.
        linted: how many of the device's facts the text breaks: 0, or it is not written; None where nothing was asked.
        compiled: the target and toolchain that made the binaries, "" without any.
        binaries: their files, with the hash of each and of its launch facts.
    """

    operator: str
    device: str
    file: str
    text: str
    profile: str
    arrangements: str
    applications: str
    inputs: str
    status: str
    linted: int | None
    compiled: str = ""
    binaries: Mapping[str, str] = field(default_factory=dict)


def operators(names: Sequence[str] = ()) -> list[Operator]:
    """The operators of these names, all if none is given, in order of their names."""
    _ = tilewright.ops  # declares them
    unknown = sorted(set(names) - set(OPERATORS))
    if unknown:
        raise BuildError(f"unknown operator {', '.join(unknown)}; known are {', '.join(sorted(OPERATORS))}")
    return [OPERATORS[name] for name in sorted(names or OPERATORS)]


def chosen(names: Sequence[str] = ()) -> tuple[list[Operator], list[str]]:
    """The operators of these names, and which of the names are modules written by hand; all if none is given."""
    by_hand = [name for name in handwritten.MODULES if not names or name in names]
    rest = [name for name in names if name not in by_hand]
    return operators(rest) if rest or not names else [], by_hand


@dataclass(frozen=True)
class Task:
    """One module to make, in a process of its own perhaps."""

    operator: str
    device: str
    layout: str
    arch: str | None  # of the binaries, None for none
    cache: str

    @property
    def file(self) -> str:
        profile = vendors.load(self.device)
        folder = profile.name if self.layout == "plain" else flaggems.folder(profile)
        return f"{folder}/{self.operator}.py"


def build(
    devices: Sequence[str], out: Path, names: Sequence[str] = (), *, layout: str = "plain", with_binaries: bool = False,
    jobs: int = 1, progress: Callable[[], None] = lambda: None,
) -> Iterator[Built]:  # fmt: skip
    """Writes a module for each operator and device into `out`, then `out/manifest.json`.

    Yields each module as it is written. Every text is made and linted before the first is written, so nothing is left
    half done; the same input gives the same bytes. A module of the last build's manifest that nothing has changed is
    not made again.

    Args:
        devices: names or files of profiles, or ("all",).
        layout: plain, `<device>/<operator>.py`; or flaggems, `_<vendor>/fused/<operator>.py` with its `__init__.py`.
        with_binaries: also `binaries/<target>/<operator>/`, for devices that upstream Triton compiles for.
        jobs: processes that share the work.
        progress: called when a module is made.

    Raises:
        BuildError: an unknown operator, a text that its device cannot run, or a layout that the devices do not fit.
        ProfileError: an unknown device.
    """
    is_all = tuple(devices) == ("all",)
    given = {device: vendors.load(device) for device in (vendors.names() if is_all else devices)}
    if layout == "flaggems":
        kept_profiles = flaggems.one_a_vendor(list(given.values()), is_all)
        given = {device: profile for device, profile in given.items() if profile in kept_profiles}
    toolchain = binaries.toolchain() if with_binaries else ""
    generated, by_hand = chosen(names)
    tasks = [
        Task(name, device, layout, binaries.target(p) if with_binaries else None, str(out / "triton-cache"))
        for device, p in given.items() for name in (*(op.name for op in generated), *by_hand)
    ]  # fmt: skip
    known = _known(out)
    kept = {task: entry for task in tasks if (entry := _unchanged(task, known, toolchain, out))}
    made = dict(_made([task for task in tasks if task not in kept], jobs, progress))
    broken = [f"{task.file}: {violation}" for task, (_, found, _) in made.items() for violation in found]
    if broken:
        raise BuildError("texts that their devices cannot run:\n  " + "\n  ".join(broken))
    built: list[Built] = []
    for task in tasks:
        if task in kept:
            progress()
            built.append(kept[task])
        else:
            text, _, compiled = made[task]
            write(out / task.file, text)
            built.append(_entry(task, text, list(_written(compiled, out, task)), toolchain))
        yield built[-1]
    if layout == "flaggems":
        for folder in dict.fromkeys(Path(entry.file).parent for entry in built):
            own = [e.operator for e in built if Path(e.file).parent == folder and e.operator not in handwritten.MODULES]
            write(out / folder / "__init__.py", flaggems.formatted(flaggems.registration(own)))
    entries = [{k: v for k, v in asdict(entry).items() if k not in ("compiled", "binaries") or v} for entry in built]
    manifest = {"tilewright": tilewright.__version__, "layout": layout, "modules": entries}
    write(out / "manifest.json", json.dumps(manifest, indent=1) + "\n")


Made = tuple[str, list[str], list[binaries.Binary]]  # a text, what its device cannot do, its binaries


def _made(tasks: Sequence[Task], jobs: int, progress: Callable[[], None]) -> Iterator[tuple[Task, Made]]:
    jobs = min(jobs, len(tasks))
    if jobs <= 1:
        results: Iterable[Made] = map(_make, tasks)
        yield from _counted(tasks, results, progress)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from _counted(tasks, pool.map(_make, tasks), progress)


def _counted(
    tasks: Sequence[Task], results: Iterable[Made], progress: Callable[[], None]
) -> Iterator[tuple[Task, Made]]:
    for task, result in zip(tasks, results, strict=True):
        progress()
        yield task, result


def _make(task: Task) -> Made:
    if task.operator in handwritten.MODULES:  # the same kernels for every device: no fact chose them, so none is asked
        text = handwritten.source(task.operator, task.device)
        return (flaggems.formatted(text) if task.layout == "flaggems" else text), [], []
    (operator,) = operators([task.operator])
    text = operator.source(task.device)
    found = [str(violation) for violation in lint(text, vendors.load(task.device))]
    made = []
    if task.arch and not found:
        made = list(binaries.compiled(task.operator, text, task.arch, Path(task.cache)))
    return (flaggems.formatted(text) if task.layout == "flaggems" else text), found, made


def _written(made: Sequence[binaries.Binary], out: Path, task: Task) -> Iterator[tuple[str, str]]:
    device = vendors.load(task.device).name
    for binary in made:
        file = f"binaries/{device}/{task.operator}/{binary.name}"
        write(out / f"{file}.{binary.suffix}", binary.code)
        write(out / f"{file}.json", binary.text)
        yield f"{file}.{binary.suffix}", binary.hash


def _entry(task: Task, text: str, made: Sequence[tuple[str, str]], toolchain: str) -> Built:
    profile, by_hand = vendors.load(task.device), task.operator in handwritten.MODULES
    kernel = None if by_hand else operators([task.operator])[0].kernel
    return Built(
        operator=task.operator,
        device=profile.name,
        file=task.file,
        text=_hash(text.encode()),
        profile=profile.hash,
        arrangements=kernel.arrangement_hash() if kernel else "",
        applications=kernel.application_hash() if kernel else "",
        inputs=_inputs(task),
        status=kernel.rules(profile.name).status if kernel else handwritten.STATUS,
        linted=0 if kernel else None,
        compiled=f"{task.arch}, {toolchain}" if made else "",
        binaries=dict(made),
    )


# -- what is there already
def _known(out: Path) -> dict[str, Any]:
    """The modules of the last build's manifest by their files."""
    try:
        found = json.loads((out / "manifest.json").read_text())
        return {entry["file"]: entry for entry in found["modules"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _unchanged(task: Task, known: Mapping[str, Any], toolchain: str, out: Path) -> Built | None:
    """The entry of a module that would be made again as it lies there."""
    entry = known.get(task.file, {})
    compiled = f"{task.arch}, {toolchain}" if task.arch else ""
    if entry.get("inputs") != _inputs(task) or (compiled and entry.get("compiled", "") != compiled):
        return None
    if not task.arch:
        entry = {key: value for key, value in entry.items() if key not in ("compiled", "binaries")}
    try:
        if _hash((out / task.file).read_bytes()) != entry["text"]:
            return None
        for name, wanted in entry.get("binaries", {}).items():
            facts = (out / name).with_suffix(".json").read_bytes()
            if _hash((out / name).read_bytes() + facts) != wanted:
                return None
        return Built(**entry)
    except (OSError, KeyError, TypeError):
        return None


def _inputs(task: Task) -> str:
    """Hash of everything a text is made of: the project's own text, the profile, the rules and the layout."""
    profile, rules = vendors.load(task.device), ""
    if task.operator not in handwritten.MODULES:
        rules = repr(operators([task.operator])[0].kernel.rules(profile.name))
    parts = [sources(), task.operator, profile.name, profile.hash, rules, task.layout]
    if task.layout == "flaggems":
        parts.append(flaggems.formatter())
    return _hash("\n".join(parts).encode())


@functools.cache
def sources() -> str:
    """Hash of the text of the engine, the arrangements, the applications and the operators."""
    import tilewright.applications
    import tilewright.arrangements

    rooms: list[Any] = [tilewright, tilewright.arrangements, tilewright.applications, tilewright.ops]
    text = hashlib.sha256()
    for room in rooms:
        folder = Path(room.__file__).parent
        for path in sorted(p for p in folder.rglob("*.py") if p.is_file()):
            if "generated" not in path.relative_to(folder).parts:
                text.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return text.hexdigest()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
