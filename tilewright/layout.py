"""Line breaking of generated text."""

from __future__ import annotations

from collections.abc import Iterator

WIDTH = 100


def wrapped(text: str) -> str:
    """`text` with lines over `WIDTH` broken at the commas or operators of their outermost brackets, docstrings not."""
    out, in_docstring = [], False
    for line in text.splitlines(keepends=True):
        quotes = line.count('"""')
        out.append(line if in_docstring or quotes else _line(line))
        in_docstring ^= quotes % 2 == 1
    return "".join(out)


def _line(line: str) -> str:
    bare = line.rstrip("\n")
    code, _, comment = bare.partition("  # ")
    if len(code) <= WIDTH or comment or bare.lstrip().startswith(("#", '"""')):
        return line
    indent = " " * (len(bare) - len(bare.lstrip()))
    target, equals, value = code.partition(" = ")
    terms = _terms(value, " + ", " - ")
    if len(terms) == 1 and len(choices := _terms(value, " else ")) > 2:
        terms = choices
    if equals and target.strip().isidentifier() and len(terms) > 1:
        return f"{target} = (\n{_filled(terms, indent + '    ')}{indent})\n"
    span = _outer(code)
    if span is None:
        return line
    start, end = span
    parts = _split(code[start + 1 : end], ",")
    if len(parts) > 1:
        body = _filled([part + "," for part in parts], indent + "    ")
    else:
        body = _line(indent + "    " + parts[0] + "\n")
    return f"{code[: start + 1]}\n{body}{indent}{code[end:]}\n"


def _outer(code: str) -> tuple[int, int] | None:
    """The bracket pair to open: the first that reaches furthest to the end of the line."""
    best = None
    depth: list[int] = []
    for i, c in _outside_strings(code):
        if c in "([{":
            depth.append(i)
        elif c in ")]}":
            start = depth.pop()
            if best is None or i - start > best[1] - best[0]:
                best = (start, i)
    return best if best and best[1] - best[0] > 20 else None


def _outside_strings(code: str) -> Iterator[tuple[int, str]]:
    quote = ""
    for i, c in enumerate(code):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        else:
            yield i, c


def _split(text: str, separator: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, c in _outside_strings(text):
        depth += (c in "([{") - (c in ")]}")
        if c == separator and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return parts + ([last] if last else [])


def _terms(text: str, *separators: str) -> list[str]:
    """`a + b`, outside brackets, as `a` and `+ b`."""
    parts, depth, start = [], 0, 0
    for i, c in _outside_strings(text):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0 and text.startswith(separators, i):
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]


def _filled(parts: list[str], indent: str) -> str:
    lines, current = [], indent
    for part in parts:
        if current != indent and len(current) + 1 + len(part) > WIDTH:
            lines.append(current)
            current = indent
        current += (" " if current != indent else "") + part
    lines.append(current)
    return "".join(_line(line + "\n") for line in lines)
