"""From a call to a launch: which module serves a device, loaded once, and what the last call used."""

from __future__ import annotations

import functools
import hashlib
import inspect
import linecache
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright import errors, repeat, vendors
from tilewright.kernel import Argument, Kernel, forced
from tilewright.module import module_text


@dataclass(frozen=True)
class Launch:
    """What a call used.

    Attributes:
        rule: the number of the dispatch rule, None for a configuration that the caller forced.
        compiled: False where the interpreter ran it.
        flags: the values of the operator's flags, computed ones included.
    """

    operator: str
    profile: str
    rule: int | None
    config: Mapping[str, int]
    kernel: str
    lowerings: Mapping[str, str]
    compiled: bool
    flags: Mapping[str, Any] = field(default_factory=dict)


OPERATORS: dict[str, Operator] = {}
_last: tuple[str, Any, bool, tuple[Any, ...]] | None = None  # operator, module, compiled, module.last_launch


class Operator:
    """An operator for all devices: generates, loads and calls the module of the device its tensors are on."""

    def __init__(self, kernel: Kernel, public: Callable[..., Any]):
        self.kernel, self.public = kernel, public
        self.name = kernel.name
        self._first = next(a.name for a in kernel.arguments if isinstance(a, Argument))
        self.call: Callable[..., Any] = self
        self._position = [a.name for a in kernel.arguments].index(self._first)
        self._modules: dict[tuple[Any, ...], types.ModuleType] = {}
        self._recorded = repeat.Recorded()

    def source(self, profile: str = "generic", config: Mapping[str, int] | None = None) -> str:
        """The text of the operator's module for a device; with `config`, for that configuration alone."""
        if config is None:
            return self._text(profile)
        rules = forced(self.kernel.checked_config(config))
        return module_text(self.kernel, self.public, vendors.load(profile), rules)

    @functools.cache  # noqa: B019  (an operator lives as long as the process)
    def _text(self, profile: str) -> str:
        loaded = vendors.load(profile)
        return module_text(self.kernel, self.public, loaded, self.kernel.rules(loaded.name))

    def module(self, profile: str, interpreted: bool, config: Mapping[str, int] | None = None) -> types.ModuleType:
        """The loaded module; a forced configuration that it cannot express has one of its own."""
        key: tuple[Any, ...] = (profile, interpreted, None)
        if key not in self._modules:
            self._modules[key] = self._loaded(profile, self.source(profile), interpreted)
        module = self._modules[key]
        if config is None or all(config.get(k) == v for k, v in module.FIXED.items()):
            return module
        key = (profile, interpreted, tuple(sorted(config.items())))
        if key not in self._modules:
            self._modules[key] = self._loaded(profile, self.source(profile, config), interpreted)
        return self._modules[key]

    def _loaded(self, profile: str, source: str, interpreted: bool) -> types.ModuleType:
        module = _load(self.name, profile, source, interpreted)
        if not interpreted and repeat.supported(self.kernel):
            for name, value in list(vars(module).items()):
                if name.startswith(f"{self.name}_kernel"):
                    setattr(module, name, repeat.Recorder(value, self._recorded))
        return module

    def first(self, *args: Any, **options: Any) -> tuple[Any, tuple[Any, ...] | None]:
        """A call through the module, and what a repeat of it needs, if it can be repeated."""
        self._recorded.launches = []
        try:
            result = self(*args, **options)
        finally:  # launches hold the caller's tensors
            launches, self._recorded.launches, last = self._recorded.launches, None, _last
        if not launches or options or last is None or getattr(last[1], "CHECK_SLOTS", False):
            return result, None

        def done() -> None:
            global _last
            _last = last

        names = [a.name for a in self.kernel.arguments]
        tensors = {a.name: args[names.index(a.name)] for a in self.kernel.tensors}
        return result, repeat.prepared(self.call, launches, tensors, done)

    def __call__(
        self,
        *args: Any,
        config: Mapping[str, int] | None = None,
        thresholds: int | None = None,
        profile: str | None = None,
        **kwargs: Any,
    ) -> Any:
        global _last
        first = args[self._position] if len(args) > self._position else kwargs.get(self._first)
        device = getattr(first, "device", None)
        kind = getattr(device, "type", "cpu")  # what is no tensor is for the module to refuse
        if kind == "meta":
            raise errors.DeviceError(f"{self.name}: {self._first} is on meta, where nothing can run")
        interpreted = kind == "cpu"
        name = vendors.load(profile).name if profile else vendors.detect("cpu" if interpreted else device)
        if config is not None:
            config = self.kernel.checked_config(config)
        module: Any = self.module(name, interpreted, config)
        module.last_launch = None
        result = getattr(module, self.name)(*args, config=config, thresholds=thresholds, **kwargs)
        if module.last_launch is not None:
            _last = (self.name, module, not interpreted, module.last_launch)
        return result


def operator(kernel: Kernel) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a public function, of which signature and docstring count, call `kernel` on the device of its tensors.

    The function takes three more keywords: `config` forces a configuration (a mapping of the arrangement's parameters,
    num_warps and num_stages), `thresholds` replaces every threshold of the dispatch rules, and `profile` names a vendor
    profile other than the detected one.
    """

    def decorate(public: Callable[..., Any]) -> Callable[..., Any]:
        made = OPERATORS[kernel.name] = Operator(kernel, public)

        @functools.wraps(public)
        def call(*args: Any, **kwargs: Any) -> Any:
            return made(*args, **kwargs)

        if repeat.supported(kernel):
            made.call = repeat.repeating(kernel, public, made.first)
            call = functools.wraps(public)(made.call)
        signature = inspect.signature(public)
        names = ("config", "thresholds", "profile")
        extra = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in names]
        call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *extra])  # type: ignore[attr-defined]
        return call

    return decorate


def last_launch() -> Launch | None:
    """What the last call in this process that launched anything used."""
    if _last is None:
        return None
    name, module, compiled, (rule, config, kernel, flags) = _last
    return Launch(name, module.PROFILE, rule, dict(config), kernel, dict(module.LOWERINGS), compiled, dict(flags))


def _load(operator_name: str, profile: str, source: str, interpreted: bool) -> types.ModuleType:
    name = f"tilewright.generated.{profile.replace('-', '_')}.{operator_name}"
    file = f"<tilewright {profile} {operator_name} {hashlib.sha256(source.encode()).hexdigest()[:8]}>"
    if interpreted:
        from tilewright import interpret

        module = interpret.load(source, name, file)
    else:
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        module = types.ModuleType(name)
        module.__file__ = file
        exec(compile(source, file, "exec"), module.__dict__)
    for error in ("ContractError", "ShapeError", "DtypeError", "LayoutError", "DeviceError"):
        setattr(module, error, getattr(errors, error))
    if hasattr(module, "CHECK_SLOTS"):
        vars(module)["CHECK_SLOTS"] = os.environ.get("TILEWRIGHT_CHECK_SLOTS", "") not in ("", "0")
    return module
