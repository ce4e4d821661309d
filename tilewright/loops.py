"""A loop over steps: from an application's `for k in steps(x)` to the loop of a device function."""

from __future__ import annotations

import ast
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilewright.access import Definition
from tilewright.expr import Index, Named, top
from tilewright.language import Step, Steps, Value, mentions, named, number_text, shape_text

if TYPE_CHECKING:
    from tilewright.translate import Translator


@dataclass(frozen=True)
class Loop:
    """A `for` of an application, written by its translator."""

    translator: Translator
    node: ast.For

    def write(self) -> None:
        """Writes the loop, after trying it once to learn what a step makes of the variables that it carries on."""
        translator, frame = self.translator, self.translator.frames[-1]
        over = self._over()
        stored = [n for part in self.node.body for n in ast.walk(part) if isinstance(n, ast.Name) and _is_stored(n)]
        for target in stored:
            if translator.is_tile(target):
                translator.node = target
                raise translator.refuse(f"{target.id} is stored in a loop; a tile is stored once, after it")
        carried = [name for name in frame.values if name in {target.id for target in stored}]
        before = self._state()
        self._steps(over)
        after = {name: frame.values[name] for name in carried}
        self._restore(before)
        for name in carried:
            self._carry(name, after[name])
        outer, at = dict(frame.values), len(translator.body)
        loaded, kept = set(translator.loaded), dict(translator.kept)
        variable = self._steps(over)
        for name in carried:
            self._carry_on(name, outer[name], frame.values[name])
        translator.body[at:] = [
            f"for {variable} in range(0, {translator.places.text(over.axis.size)}):",
            *(f"    {line}" for line in translator.body[at:]),
        ]
        # What a step computed is of no use after the loop; what it found loaded before the loop stays.
        frame.values = outer
        translator.loaded = {k: v for k, v in translator.loaded.items() if k in loaded or not k[-1]}
        names = [outer[name].code for name in carried]
        translator.kept = {code: v for code, v in kept.items() if not any(mentions(code, name) for name in names)}

    def _over(self) -> Steps:
        translator, call = self.translator, self.node.iter
        named = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "steps"
        if not named or not isinstance(self.node.target, ast.Name) or self.node.orelse:
            raise translator.refuse("a for goes over the steps of a tile: for k in steps(x)")
        if translator.in_loop:
            raise translator.refuse("a loop over steps within another has no meaning yet")
        over: Steps = translator.value(call)
        return over

    def _steps(self, over: Steps) -> str:
        """Writes the body, and returns the name of the loop's variable."""
        translator, places = self.translator, self.translator.places
        assert isinstance(self.node.target, ast.Name)
        variable = places.fresh(self.node.target.id)
        index = Index(str(over.axis.name), over.axis.size, "step")
        places.steps[index] = places.named[index] = Named(variable, top(over.axis.size))
        places.definitions[variable] = Definition(variable, (), variable, variable)
        translator.in_loop = True
        translator.frames[-1].values[self.node.target.id] = Step(over.axis)
        for statement in self.node.body:
            translator.node = statement
            translator.statement(statement)
        translator.in_loop = False
        places.steps.clear()
        return variable

    def _state(self) -> list[dict[str, Any]]:
        """All that writing changes, so that it can be undone."""
        return [
            {name: copy(value) for name, value in vars(what).items() if isinstance(value, dict | list | set)}
            for what in (self.translator.places, self.translator, self.translator.frames[-1])
        ]

    def _restore(self, state: list[dict[str, Any]]) -> None:
        for what, saved in zip(
            (self.translator.places, self.translator, self.translator.frames[-1]), state, strict=True
        ):
            vars(what).update(saved)

    def _carry(self, name: str, after: Any) -> None:
        """Makes a variable of what a loop carries on; a number takes the axes and dtype that a step gives it."""
        translator, frame = self.translator, self.translator.frames[-1]
        before = frame.values[name]
        if not isinstance(before, Value) or not isinstance(after, Value):
            raise translator.refuse(f"a loop carries values on, {name} is none")
        if before.literal is not None:
            code = number_text(before.literal)
            if after.dims and before.literal == 0:
                code = f"tl.zeros({shape_text(translator, after.dims)}, dtype=tl.{after.dtype})"
            elif after.dims:
                code = f"tl.full({shape_text(translator, after.dims)}, {code}, dtype=tl.{after.dtype})"
            before = named(after, code)
        generated = translator.places.fresh(name)
        translator.body.append(f"{generated} = {before.code}")
        frame.names[name] = generated
        frame.values[name] = named(before, generated)

    def _carry_on(self, name: str, before: Value, after: Any) -> None:
        """Ends a step with the variable as the next one expects it."""
        if type(after) is not type(before) or (before.dims, before.dtype) != (after.dims, after.dtype):
            raise self.translator.refuse(f"{name} is {_described(before)} before a step, {_described(after)} after it")
        if after.code != before.code:
            self.translator.body.append(f"{before.code} = {after.code}")


def _is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _described(value: Any) -> str:
    if not isinstance(value, Value):
        return "no value"
    return f"{value.dtype} [{', '.join(map(str, value.names))}]"
