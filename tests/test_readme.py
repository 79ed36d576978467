"""The examples of the README print what it shows."""

import contextlib
import io
import math
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n+```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


def same(got: str, shown: str) -> bool:
    """Equal words; a float may differ in its fifth digit, as XLA sums in an order of its own."""
    numbers = zip(NUMBER.findall(got), NUMBER.findall(shown), strict=False)
    words = [NUMBER.sub("#", text).split() for text in (got, shown)]
    return words[0] == words[1] and all(
        math.isclose(float(a), float(b), rel_tol=1e-4) for a, b in numbers
    )


def test_a_difference_shows():
    assert same("y  1.00001\n", "y 1.0 ")
    assert not same("y 1.001", "y 1.0")
    assert not same("y 1.0", "x 1.0")
    assert not same("1.0 2.0", "1.0")


def test_the_examples_print_what_the_readme_shows():
    examples = EXAMPLE.findall((ROOT / "README.md").read_text())
    assert examples
    names: dict[str, object] = {}
    for code, shown in examples:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(code, "README.md", "exec"), names)
        assert same(output.getvalue(), shown), f"shown:\n{shown}\nnow:\n{output.getvalue()}"
