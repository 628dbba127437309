"""The methods' colours can be told apart, also by readers who see colours differently."""

import itertools

import numpy as np
import pytest

from foreseed.report.colours import METHODS, OTHER, SURFACES, method_variable, variables

VISIONS = {
    "usual": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""Machado, Oliveira and Fernandes (2009), full severity, on linear RGB."""

XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])


def linear(colour):
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    t = XYZ @ np.clip(rgb, 0, 1) / WHITE
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_methods_stay_apart(theme, vision):
    seen = {name: lab(np.array(VISIONS[vision]) @ linear(pair[theme])) for name, pair in METHODS.items()}
    nearest = min(itertools.combinations(seen, 2), key=lambda pair: np.linalg.norm(seen[pair[0]] - seen[pair[1]]))
    assert np.linalg.norm(seen[nearest[0]] - seen[nearest[1]]) > 12, nearest


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_lines_and_letters_stand_out_from_their_paper(theme):
    def contrast(colour, paper):
        dark, light = sorted(float(XYZ[1] @ linear(c)) for c in (colour, paper))
        return (light + 0.05) / (dark + 0.05)

    paper = SURFACES["paper"][theme]
    for name, pair in {**METHODS, "other": OTHER}.items():
        assert contrast(pair[theme], paper) >= 3, name
    for name in ("ink", "muted"):
        assert contrast(SURFACES[name][theme], paper) >= 4.5
        assert contrast(SURFACES[name][theme], SURFACES["page"][theme]) >= 4.5


def test_no_two_colours_are_equal_as_the_page_finds_its_variables_by_them():
    lights = [light for light, _ in variables().values()]
    assert len(lights) == len(set(lights))
    assert {method_variable(name) for name in (*METHODS, "unheard-of")} <= set(variables())
