"""Putting an SVG file into a page: nothing loaded from elsewhere, no clashing names, colours that follow the theme."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from foreseed.report.colours import variables

_UNWANTED = {"metadata", "script", "style", "foreignObject"}
_THEME = {light: f"var(--{name})" for name, (light, _) in variables().items()}


def inline_svg(text: str, prefix: str, themed: bool) -> str:
    """An SVG file as an element of a page; raises ElementTree.ParseError if it is not XML.

    Every id gets `prefix`, as the figures of a page share one name space. With `themed`, the report's own colours
    become the page's, which change with light and dark.
    """
    root = ElementTree.fromstring(text)
    _clean(root)
    for element in root.iter():
        element.tag = _local(element.tag)
        attributes = {_local(key): value for key, value in element.attrib.items()}
        element.attrib.clear()
        for key, value in attributes.items():
            if not key.startswith("on") and (key != "href" or value.startswith(("#", "data:image/"))):
                element.set(key, _themed(_prefixed(key, value, prefix), themed))
    # The page gives the width; the height follows from the view box.
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{prefix}-caption")
    root.tail = None
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: ElementTree.Element) -> None:
    for child in list(element):
        if _local(child.tag) in _UNWANTED:
            element.remove(child)
        else:
            _clean(child)


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _prefixed(key: str, value: str, prefix: str) -> str:
    if key == "id":
        return f"{prefix}-{value}"
    if key == "href" and value.startswith("#"):
        return f"#{prefix}-{value[1:]}"
    return re.sub(r"url\(#([^)]*)\)", rf"url(#{prefix}-\1)", value)


def _themed(value: str, themed: bool) -> str:
    return re.sub("#[0-9a-f]{6}", lambda m: _THEME.get(m[0], m[0]), value) if themed else value
