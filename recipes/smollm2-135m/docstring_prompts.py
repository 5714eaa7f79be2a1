"""Signature-and-docstring prompts in HumanEval's form, from installed pure Python packages.

Sources are parsed, never imported or run. Only the signature and the docstring of a public
module-level function go into a prompt; what it does is left to the target.
"""

import ast
import random
import sysconfig
from importlib.util import find_spec
from pathlib import Path

TEMPLATE = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n\n{stub}\n```"
)
# Package: parts of it to read, and the most prompts to take.
PACKAGES: dict[str, tuple[tuple[str, ...], int]] = {
    "more_itertools": (("more.py", "recipes.py"), 100),
    "toolz": (("itertoolz.py", "functoolz.py", "dicttoolz.py", "recipes.py"), 60),
    "boltons": (("",), 80),
    "networkx": (("algorithms", "classes", "generators", "utils"), 140),
    "sympy": (
        (
            "ntheory",
            "utilities",
            "functions/combinatorial",
            "combinatorics",
            "geometry",
            "sets",
            "discrete",
            "calculus",
            "series",
            "logic",
            "matrices",
            "core",
            "simplify",
            "polys",
        ),
        120,
    ),
}
STDLIB = (
    "ast",
    "base64",
    "bdb",
    "binhex",
    "bisect",
    "calendar",
    "codecs",
    "colorsys",
    "compileall",
    "contextlib",
    "copy",
    "csv",
    "difflib",
    "dis",
    "email/utils.py",
    "email/header.py",
    "fileinput",
    "filecmp",
    "fnmatch",
    "fractions",
    "functools",
    "genericpath",
    "getopt",
    "gettext",
    "glob",
    "heapq",
    "html",
    "imghdr",
    "inspect",
    "ipaddress",
    "keyword",
    "linecache",
    "locale",
    "mimetypes",
    "operator",
    "posixpath",
    "pprint",
    "quopri",
    "random",
    "reprlib",
    "shlex",
    "shutil",
    "sndhdr",
    "stat",
    "statistics",
    "string",
    "struct",
    "textwrap",
    "token",
    "tokenize",
    "traceback",
    "types",
    "urllib/parse.py",
    "uuid",
    "warnings",
    "weakref",
)
STDLIB_LIMIT = 90
UNWANTED = ("deprecated", "versionadded", "versionchanged", "internal", "todo", "xxx", "__")


def _stub(function: ast.FunctionDef) -> str | None:
    """Return the signature with the docstring as it stands, or None where it does not suit."""
    docstring = ast.get_docstring(function)
    if docstring is None or '"""' in docstring or "\\" in docstring:
        return None
    if not docstring.replace("\n", "").isprintable():
        return None  # terminal codes
    if function.name.startswith(("_", "dup_", "dmp_", "gf_")) or any(
        word in docstring.lower() for word in UNWANTED
    ):
        return None
    if len(docstring.split()) < 8 or docstring.count(":func:") + docstring.count(":class:") > 2:
        return None
    indented = "\n".join(f"    {line}".rstrip() for line in docstring.split("\n"))
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    head = f"def {function.name}({ast.unparse(function.args)}){returns}:"
    return f'{head}\n    """{indented.lstrip()}\n    """\n'


def _files(root: Path, parts: tuple[str, ...]) -> list[Path]:
    found: list[Path] = []
    for part in parts:
        path = root / part if part else root
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [p for p in found if p.is_file() and "test" not in p.relative_to(root).as_posix()]


def _stubs(root: Path, parts: tuple[str, ...]) -> list[str]:
    stubs: dict[str, str] = {}  # one for each name
    for path in _files(root, parts):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and len(node.args.args) in range(1, 6):
                stub = _stub(node)
                if stub is not None:
                    stubs.setdefault(node.name, stub)
    return list(stubs.values())


def _choose(rng: random.Random, prompts: list[str], limit: int) -> list[str]:
    """Take those with examples first, then others, at most `limit`."""
    fitting = [p for p in prompts if 100 <= len(p) - len(TEMPLATE) + 6 <= 900]
    rng.shuffle(fitting)
    fitting.sort(key=lambda p: ">>>" not in p)
    return fitting[:limit]


def docstring_prompts(rng: random.Random) -> dict[str, list[str]]:
    """Return the prompts of each package; the key is the name of the source."""
    result: dict[str, list[str]] = {}
    for package, (parts, limit) in PACKAGES.items():
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise SystemExit(f"{package} is not installed; see requirements.txt of this recipe")
        stubs = _stubs(Path(spec.origin).parent, parts)
        prompts = [TEMPLATE.format(stub=stub) for stub in stubs]
        result[f"docstring-{package.replace('_', '-')}"] = _choose(rng, prompts, limit)
    parts = tuple(name if name.endswith(".py") else f"{name}.py" for name in STDLIB)
    stubs = _stubs(Path(sysconfig.get_paths()["stdlib"]), parts)
    prompts = [TEMPLATE.format(stub=stub) for stub in stubs]
    result["docstring-stdlib"] = _choose(rng, prompts, STDLIB_LIMIT)
    return result
