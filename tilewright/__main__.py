"""`python -m tilewright`: generate, look at and check operators on a machine with no GPU."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tilewright import handwritten, vendors
from tilewright.build import LAYOUTS, build, chosen, operators
from tilewright.check import check
from tilewright.errors import TilewrightError
from tilewright.explain import explain
from tilewright.inspection import add_commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; a mistake of the user's prints its message and gives exit code 2."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except TilewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tilewright", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        return made

    made = command("build", _build, "write standalone modules, checked against their devices, and a manifest")
    devices = made.add_mutually_exclusive_group(required=True)
    devices.add_argument("--vendor", nargs="+", metavar="NAME", help="devices or their aliases")
    devices.add_argument("--all", action="store_true", help="every device")
    made.add_argument("--out", type=Path, required=True, metavar="DIR")
    made.add_argument("--op", nargs="+", default=(), metavar="OP", help="these operators only")
    made.add_argument("--layout", choices=LAYOUTS, default="plain", help="<device>/, or _<vendor>/fused/ for FlagGems")
    made.add_argument("--binaries", action="store_true", help="also compile, where upstream Triton knows the device")
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes, one a core")

    made = command("source", _source, "print the module of an operator for a device")
    _operator_on_device(made)

    made = command("explain", _explain, "print what an operator's programs hold, move and mask on a device")
    _operator_on_device(made)

    made = command("devices", _devices, "list the vendor profiles, or print one")
    made.add_argument("name", nargs="?", metavar="NAME")

    command("ops", _ops, "list the operators")
    made = command("check", _check, "run operators on the CPU against their references")
    made.add_argument("--device", metavar="NAME", help="with the text for this device, not generic's")
    add_commands(command)
    return parser


def _operator_on_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP")
    parser.add_argument("--device", default="generic", metavar="NAME")
    parser.add_argument("--config", type=_config, metavar="tokens=8,...", help="this configuration, not the rules'")


def _config(text: str) -> dict[str, int]:
    try:
        return {name: int(value) for name, value in (part.split("=") for part in text.split(","))}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form tokens=8,heads=1") from error


def _build(options: argparse.Namespace) -> int:
    devices = ["all"] if options.all else options.vendor
    count = len(vendors.names() if options.all else devices) * sum(len(names) for names in chosen(options.op))
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("compiling" if options.binaries else "generating", total=count)
        made = build(
            devices, options.out, options.op, layout=options.layout, with_binaries=options.binaries, jobs=options.jobs,
            progress=lambda: progress.advance(task),
        )  # fmt: skip
        built = list(made)
    for module in built:
        print(f"{options.out / module.file}  ({module.status})")
    return 0


def _source(options: argparse.Namespace) -> int:
    if options.op in handwritten.MODULES and options.config is None:
        print(handwritten.source(options.op, options.device), end="")
        return 0
    (operator,) = operators([options.op])
    print(operator.source(options.device, options.config), end="")
    return 0


def _explain(options: argparse.Namespace) -> int:
    (operator,) = operators([options.op])
    profile = vendors.load(options.device)
    kernel = operator.kernel
    configs = [options.config] if options.config else [rule.config for rule in kernel.rules(profile.name).rules]
    for config in configs:
        print(explain(kernel, profile, kernel.checked_config(config)))
    return 0


def _devices(options: argparse.Namespace) -> int:
    if options.name:
        print(vendors.load(options.name).describe())
        return 0
    for name in vendors.names():
        profile = vendors.load(name)
        print(f"{name:<20} {profile.compute_arch or 'unknown':<12} {', '.join(profile.aliases)}")
    return 0


def _ops(options: argparse.Namespace) -> int:
    for operator in operators():
        print(f"{operator.name}\n    {(operator.public.__doc__ or '').splitlines()[0]}")
    return 0


def _check(options: argparse.Namespace) -> int:
    rows = list(check(options.device))
    for row in rows:
        state = "equal" if not row.differing else f"{row.differing} apart by rounding" if row.fits else "WRONG"
        print(f"{row.operator}: {row.tensor} {row.dtype}, {row.elements} elements: {state}")
    return 0 if all(row.fits for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
