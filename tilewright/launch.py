"""From a call to a launch: which module serves a device, loaded once, and what the last call used."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import linecache
import os
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright import cache, environment, errors, repeat, vendors
from tilewright.kernel import Kernel, forced
from tilewright.module import fake_text, module_text
from tilewright.packaged import text as packaged_text
from tilewright.recording import Recorded, Recorder, capturing


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
_last: list[Any] = [None]  # [None] or [(operator, module, compiled, module.last_launch)]


class Operator:
    """An operator for all devices: generates, loads and calls the module of the device its tensors are on.

    Attributes:
        call: the public function: repeats calls, and is an operator of torch to those who trace it.
        direct: the same below torch's dispatcher.
        registered: torch's operator, where `register` made one.
    """

    def __init__(self, kernel: Kernel, public: Callable[..., Any]):
        self.kernel, self.public = kernel, public
        self.name = kernel.name
        self.registered: Any = None
        self._names = [a.name for a in kernel.arguments]
        self._first = kernel.tensors[0].name
        self.position = self._names.index(self._first)
        self._modules: dict[tuple[Any, ...], types.ModuleType] = {}
        self._recorded = Recorded()
        self._lock = threading.RLock()
        kinds: dict[Any, Any] = {}
        self.call = repeat.repeating(kernel, public, self.first, kinds, _last)
        self.direct = repeat.repeating(kernel, public, self._recording, kinds, _last, traced=False)

    def source(self, profile: str = "generic", config: Mapping[str, int] | None = None) -> str:
        """The text of the operator's module for a device; with `config`, for that configuration alone."""
        if config is None:
            return self._text(profile)
        rules = forced(self.kernel.checked_config(config))
        return module_text(self.kernel, self.public, vendors.load(profile), rules)

    @functools.cache  # noqa: B019  (an operator lives as long as the process)
    def _text(self, profile: str) -> str:
        loaded = vendors.load(profile)
        packaged = packaged_text(self.kernel, loaded)
        return packaged or module_text(self.kernel, self.public, loaded, self.kernel.rules(loaded.name))

    def inputs(self, profile: str, config: Mapping[str, int] | None = None) -> dict[str, str] | None:
        """What the cache keeps a module by; None where it keeps none."""
        loaded = vendors.load(profile)
        return cache.inputs_of(self.public, loaded.name, loaded.hash, config)

    def module(self, profile: str, interpreted: bool, config: Mapping[str, int] | None = None) -> types.ModuleType:
        """The loaded module; a forced configuration that it cannot express has one of its own."""
        module = self._module(profile, interpreted, None)
        if config is None or all(config.get(k) == v for k, v in module.FIXED.items()):
            return module
        return self._module(profile, interpreted, config)

    def _module(self, profile: str, interpreted: bool, config: Mapping[str, int] | None) -> Any:
        key = (profile, interpreted, None if config is None else tuple(sorted(config.items())))
        found = self._modules.get(key)
        if found is None:
            with self._lock:
                found = self._modules.get(key)
                if found is None:
                    text = cache.source(
                        self.name, self.inputs(profile, config), lambda: self.source(profile, config)
                    )
                    found = self._modules[key] = self._loaded(profile, text, interpreted)
        return found

    def _loaded(self, profile: str, source: str, interpreted: bool) -> types.ModuleType:
        module = load(self.name, profile, source, interpreted)
        if not interpreted:
            for name, value in list(vars(module).items()):
                if name.startswith(f"{self.name}_kernel"):
                    setattr(module, name, Recorder(value, self._recorded, self.name))
        return module

    def fake(self, profile: str) -> Callable[..., Any]:
        """The checks of a call, and its outputs with nothing in them; runs on tensors without memory."""
        found = self._modules.get((profile, "fake"))
        if found is None:
            loaded = vendors.load(profile)
            text = fake_text(self.kernel, self.public, loaded, self.kernel.rules(loaded.name))
            found = self._modules[profile, "fake"] = load(self.name, f"{profile} checks", text, False)
        return getattr(found, self.name)

    # -- calling
    def first(self, *args: Any, **options: Any) -> tuple[Any, tuple[Any, ...] | None]:
        """A call that is no repeat: its result, and what a repeat of it needs, if it can be repeated."""
        if self.registered is not None and not options and _is_traced(args):
            return self.registered(*args), None
        return self._recording(*args, **options)

    def _recording(self, *args: Any, **options: Any) -> tuple[Any, tuple[Any, ...] | None]:
        self._recorded.launches = []
        try:
            result, launched = self._run(args, **options)
        finally:  # launches hold the caller's tensors
            launches, self._recorded.launches = self._recorded.launches, None
        if not launches or options or launched is None or getattr(launched[1], "CHECK_SLOTS", False):
            return result, None
        tensors = {a.name: args[self._names.index(a.name)] for a in self.kernel.tensors}
        kind = repeat.kind(self.kernel, launches, tensors, result, launched)
        if kind is not None:
            repeat.connect(self.kernel, self.call)
            repeat.connect(self.kernel, self.direct)
        return result, kind

    def __call__(self, *args: Any, **options: Any) -> Any:
        """A call through the module, with its checks and rules."""
        return self._run(args, **options)[0]

    def prepare(self, *args: Any, device: Any = None, **options: Any) -> Launch | None:
        """Checks a call and compiles and loads its kernel on its device, but runs nothing; None where it runs nothing.

        Takes what the operator takes. Tensors may be on "meta": they stand for tensors of `device` (by default the
        current one of the GPU) whose addresses are multiples of 16, and take no memory.
        """
        names = ("config", "thresholds", "profile")
        forced = {name: options.pop(name) for name in names if name in options}
        bound = inspect.signature(self.public).bind(*args, **options)
        bound.apply_defaults()
        given = [bound.arguments[name] for name in self._names]
        with _without_memory(given, device) as stand_ins:
            self._recorded.preparing = True
            try:
                launched = self._run(stand_ins, **forced)[1]
            finally:
                self._recorded.preparing = False
        return None if launched is None else _described(launched)

    def _run(
        self,
        args: Any,
        config: Mapping[str, int] | None = None,
        thresholds: int | None = None,
        profile: str | None = None,
        **kwargs: Any,
    ) -> tuple[Any, tuple[Any, ...] | None]:
        """The result of a call, and what `_last` says of it, None where it launched nothing."""
        first = args[self.position] if len(args) > self.position else kwargs.get(self._first)
        name, interpreted = placed(self.name, self._first, first, profile)
        if config is not None:
            config = self.kernel.checked_config(config)
        if interpreted and self._recorded.preparing:
            self.module(name, True, config)
            self.fake(name)(*args, **kwargs)
            return None, None
        module: Any = self.module(name, interpreted, config)
        if getattr(module, "CHECK_SLOTS", False) and not interpreted and capturing():
            raise errors.CaptureError(
                f"{self.name}: TILEWRIGHT_CHECK_SLOTS waits for the device, which the CUDA graph that is being "
                "captured cannot"
            )
        # One thread at a time compiles, and reads which of the module's launches was its own.
        with contextlib.nullcontext() if interpreted else self._lock:
            module.last_launch = None
            result = getattr(module, self.name)(*args, config=config, thresholds=thresholds, **kwargs)
            launched = None if module.last_launch is None else (self.name, module, not interpreted, module.last_launch)
        if launched is not None and not self._recorded.preparing:
            _last[0] = launched
        return result, launched

    def renew(self) -> None:
        """In a forked child: the lock may be held by a thread that the child does not have."""
        self._lock, self._recorded = threading.RLock(), self._recorded
        self._recorded.launches, self._recorded.preparing = None, False


def placed(operator: str, argument: str, first: Any, profile: str | None) -> tuple[str, bool]:
    """The vendor profile that a call goes by, and whether it is interpreted, from where its first tensor is.

    Raises:
        DeviceError: where nothing can run.
    """
    device = getattr(first, "device", None)
    kind = getattr(device, "type", "cpu")  # what is no tensor is for the module to refuse
    if kind == "meta":
        raise errors.DeviceError(f"{operator}: {argument} is on meta, where nothing can run")
    interpreted = kind == "cpu"
    return vendors.load(profile).name if profile else vendors.detect("cpu" if interpreted else device), interpreted


def operator(kernel: Kernel) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a public function, of which signature and docstring count, call `kernel` on the device of its tensors.

    The function takes three more keywords: `config` forces a configuration (a mapping of the arrangement's parameters,
    num_warps and num_stages), `thresholds` replaces every threshold of the dispatch rules, and `profile` names a vendor
    profile other than the detected one. Its attribute `prepare` is `Operator.prepare`.
    """

    def decorate(public: Callable[..., Any]) -> Callable[..., Any]:
        made = OPERATORS[kernel.name] = Operator(kernel, public)
        call: Any = functools.wraps(public)(made.call)
        signature = inspect.signature(public)
        names = ("config", "thresholds", "profile")
        extra = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in names]
        call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *extra])
        call.prepare = made.prepare
        return call

    return decorate


def last_launch() -> Launch | None:
    """What the last call in this process that launched anything used."""
    return None if _last[0] is None else _described(_last[0])


def _described(launched: tuple[Any, ...]) -> Launch:
    name, module, compiled, (rule, config, kernel, flags, *used) = launched  # used: lowerings that a call chooses
    lowerings = {**module.LOWERINGS, **(used[0] if used else {})}
    return Launch(name, module.PROFILE, rule, dict(config), kernel, lowerings, compiled, dict(flags))


def _is_traced(args: tuple[Any, ...]) -> bool:
    """Whether a dispatch mode, or a tensor of a class that takes calls apart, is to see an operator of torch."""
    import torch

    if torch._C._len_torch_dispatch_stack():
        return True
    plain = torch._C._disabled_torch_dispatch_impl
    return any(isinstance(a, torch.Tensor) and type(a).__torch_dispatch__ is not plain for a in args)


@contextlib.contextmanager
def _without_memory(given: list[Any], device: Any) -> Iterator[list[Any]]:
    """`given` with its tensors on meta as fake tensors of `device`, and a mode in which nothing takes memory."""
    import torch

    if not any(isinstance(a, torch.Tensor) and a.device.type == "meta" for a in given):
        yield given
        return
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    place = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    with FakeTensorMode() as mode:
        yield [
            FakeTensor(mode, a, place) if isinstance(a, torch.Tensor) and a.device.type == "meta" else a for a in given
        ]


def note(name: str, module: Any, compiled: bool) -> None:
    """Remembers what a call of a module launched, if it launched anything."""
    if module.last_launch is not None:
        _last[0] = (name, module, compiled, module.last_launch)


def load(operator_name: str, profile: str, source: str, interpreted: bool) -> types.ModuleType:
    """A module from its text, for a GPU or interpreted, with the package's own errors."""
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
        vars(module)["CHECK_SLOTS"] = environment.is_on("TILEWRIGHT_CHECK_SLOTS")
    return module


def _renew_all() -> None:
    for made in OPERATORS.values():
        made.renew()


os.register_at_fork(after_in_child=_renew_all)
