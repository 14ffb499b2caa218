"""Checks of the source tree by its syntax: who imports whom, sizes, and what is banned where.

Each checker takes one parsed `Source` and yields `Finding`s. `tests/test_architecture.py` runs them
over the tree and feeds each a bad snippet, so that none of them can pass without looking.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

PRODUCT = ("connector", "store_worker", "engine_shim")
LEAF_NAMES = "ids errors clock config session meta stats indexmsg lookup hints handoff"
LEAF = frozenset(f"connector.{name}" for name in LEAF_NAMES.split())
ADAPTER = "connector.vllm_adapter"
# Composition roots: the only modules that see both the connector's core and the store. The adapter
# is in parts (connector/vllm_*.py), of which it alone imports vllm.
ROOTS = frozenset({ADAPTER, "engine_shim.wiring", "engine_shim.proxy_store"})
ADAPTER_PARTS = "connector.vllm_"
# Not core: the package itself, what vLLM's plugin loader calls, and the adapter's parts.
CONNECTOR_EDGE = frozenset({"connector", "connector.plugin"})
# The command line shows tables and starts the embedded store; it stays away from everything else.
SHIM_CLI_USES = ("store_worker.cli", "store_worker.embedded")

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 400
TEST_FILE_LINES_MAX = 600
PARAMETERS_MAX = 6
LINE_CHARS_MAX = 100
# A word to a tool at a line's end is not counted, as ruff has it.
PRAGMA = re.compile(r"\s*#\s*(type: ignore|noqa|fmt:|pragma:)[^#]*$")


@dataclass(frozen=True)
class Source:
    """One file: its path relative to the repository (posix), its text, its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str) -> Source:
        return cls(path, text, ast.parse(text, filename=path))

    @cached_property
    def module(self) -> str:
        parts = list(PurePosixPath(self.path).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree, in no particular order."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def origins(self) -> dict[str, str]:
        """Local name -> dotted origin, for every import of the file."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.split(".")[0]
                    found[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return found

    @cached_property
    def is_product(self) -> bool:
        return self.module.split(".")[0] in PRODUCT


@dataclass(frozen=True)
class Finding:
    """One breach: the rule, where, the name that an exception row has to give, and what to do."""

    rule: str
    path: str
    line: int
    name: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.rule}] {self.name}: {self.message}"


@dataclass(frozen=True)
class Allowed:
    """A named exception: matches findings by rule, path and name; the reason is for readers."""

    rule: str
    path: str
    name: str
    reason: str

    def covers(self, finding: Finding) -> bool:
        return (self.rule, self.path, self.name) == (finding.rule, finding.path, finding.name)


Checker = Callable[[Source], Iterator[Finding]]


def load_tree(root: Path) -> list[Source]:
    """Every Python file of the product and the tests, generated code left out."""
    found = []
    for top in (*PRODUCT, "tests"):
        for path in sorted((root / top).rglob("*.py")):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                name = path.relative_to(root).as_posix()
                found.append(Source.parse(name, path.read_text(encoding="utf-8")))
    return found


# ---- imports ----------------------------------------------------------------------------------


def imported(source: Source) -> Iterator[tuple[str, int]]:
    """(module, line) of every import, at any depth, relative ones resolved.

    `from a import b` gives `a.b`: if b is a name and not a module, its prefix still decides.
    """
    package = source.module.split(".")
    if not source.path.endswith("__init__.py"):
        package = package[:-1]
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                yield f"{stem}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and dotted(node.func) in (
            "importlib.import_module",
            "import_module",
            "__import__",
        ):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value, node.lineno


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute chain, else an empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def is_leaf(module: str) -> bool:
    return any(within(module, leaf) for leaf in LEAF)


def is_edge(module: str) -> bool:
    """A module of `connector` that belongs to an engine, not to the neutral half."""
    edge = any(within(module, name) for name in CONNECTOR_EDGE - {"connector"})
    return module == "connector" or edge or module.startswith(ADAPTER_PARTS)


def is_core(module: str) -> bool:
    """A module of `connector` that is neither leaf nor edge."""
    return within(module, "connector") and not is_leaf(module) and not is_edge(module)


def is_stdlib(module: str) -> bool:
    return module.split(".")[0] in sys.stdlib_module_names


def check_imports(source: Source) -> Iterator[Finding]:
    """The one direction of imports (docs/ARCHITECTURE.md)."""
    if not source.is_product:
        return
    for target, line in imported(source):
        breach = import_breach(source.module, target)
        if breach:
            yield Finding("import", source.path, line, target, breach)


def import_breach(module: str, target: str) -> str:
    """Why `module` may not import `target`; empty if it may."""
    top = target.split(".")[0]
    if top == "tests":
        return "the product never imports tests"
    if top == "vllm":
        return "" if module == ADAPTER else f"only {ADAPTER} imports vllm"
    if top == "engine_shim":
        return "" if within(module, "engine_shim") else "nothing imports engine_shim"
    if is_leaf(module) or is_core(module):
        return inner_breach(module, target)
    if within(module, "store_worker"):
        outside = within(target, "connector") and not is_leaf(target)
        return "store_worker uses only the leaf modules of connector" if outside else ""
    if within(module, "engine_shim") and module not in ROOTS:
        return shim_breach(module, target)
    return ""


def inner_breach(module: str, target: str) -> str:
    """The rule for connector's leaf and core: both are free of engines, stores and tensors."""
    if is_stdlib(target) or within(target, "msgspec") or is_leaf(target):
        return ""
    if is_leaf(module):
        return "a leaf module uses the standard library, msgspec and other leaf modules only"
    if is_core(target):
        return ""
    return "connector's core uses the standard library, msgspec, leaf and core modules only"


def shim_breach(module: str, target: str) -> str:
    if within(target, "store_worker"):
        allowed = module == "engine_shim.cli" and any(within(target, u) for u in SHIM_CLI_USES)
        return "" if allowed else "only engine_shim.wiring sees the store"
    if within(target, "connector") and not is_leaf(target):
        return "only engine_shim.wiring sees the connector's core"
    return ""


# ---- sizes ------------------------------------------------------------------------------------


def check_sizes(source: Source) -> Iterator[Finding]:
    """Lines of a file and of a function, parameters, characters of a line."""
    lines = source.text.splitlines()
    most = FILE_LINES_MAX if source.is_product else TEST_FILE_LINES_MAX
    if len(lines) > most:
        yield Finding("file-lines", source.path, 1, source.path, f"{len(lines)} lines > {most}")
    for number, line in enumerate(lines, start=1):
        line = PRAGMA.sub("", line)
        if len(line) > LINE_CHARS_MAX:
            what = f"{len(line)} characters > {LINE_CHARS_MAX}"
            yield Finding("line-chars", source.path, number, str(number), what)
    for name, node in functions(source.tree):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > FUNCTION_LINES_MAX:
            what = f"{length} lines > {FUNCTION_LINES_MAX}"
            yield Finding("function-lines", source.path, node.lineno, name, what)
        count = parameter_count(node)
        if count > PARAMETERS_MAX:
            what = f"{count} parameters > {PARAMETERS_MAX}: group them in a struct"
            yield Finding("parameters", source.path, node.lineno, name, what)


def functions(
    node: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(qualified name, node) of every function and method, nested ones too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from functions(child, f"{prefix}{child.name}." if named else prefix)


def parameter_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Named parameters; self and cls don't count."""
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (bool(names) and names[0] in ("self", "cls"))


# ---- bans -------------------------------------------------------------------------------------

BOUNDED_QUEUES = frozenset(
    f"{package}.{name}"
    for package in ("queue", "asyncio", "multiprocessing")
    for name in ("Queue", "LifoQueue", "PriorityQueue", "JoinableQueue")
)
UNBOUNDABLE_QUEUES = frozenset(
    {"queue.SimpleQueue", "multiprocessing.SimpleQueue", "_queue.SimpleQueue"}
)
THREADS = frozenset(
    {
        "threading.Thread",
        "threading.Timer",
        "_thread.start_new_thread",
        "concurrent.futures.ThreadPoolExecutor",
        "asyncio.to_thread",
    }
)
CLOCK_READS = frozenset(
    {f"time.{name}" for name in ("time", "time_ns", "monotonic", "monotonic_ns", "sleep")}
    | {f"time.{name}" for name in ("perf_counter", "perf_counter_ns", "process_time")}
    | {f"datetime.datetime.{name}" for name in ("now", "utcnow", "today")}
)
THREAD_HOME = "store_worker/executor.py"
CLOCK_HOME = "connector/clock.py"
# The one place where a test may sleep: between two looks at an effect, up to a deadline.
WAITING_HOME = "tests/waiting.py"
DEQUE_MARK = "bounded"


def origin(node: ast.expr, names: dict[str, str]) -> str:
    """What an expression names: `threading.Thread` for `T`, after `import Thread as T`."""
    local = dotted(node)
    first, _, rest = local.partition(".")
    resolved = names.get(first, "")
    return f"{resolved}.{rest}" if resolved and rest else resolved


def check_queues(source: Source) -> Iterator[Finding]:
    """Every queue has a bound."""
    if not source.is_product:
        return
    names, lines = source.origins, source.text.splitlines()
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        what = origin(node.func, names)
        if what in UNBOUNDABLE_QUEUES:
            yield Finding("queue", source.path, node.lineno, what, "it can't be bounded")
        elif what in BOUNDED_QUEUES and not has_bound(node, "maxsize", 0):
            yield Finding("queue", source.path, node.lineno, what, "give maxsize, above 0")
        elif what == "collections.deque" and not has_bound(node, "maxlen", 1):
            near = lines[max(0, node.lineno - 2) : node.end_lineno]
            if not any("#" in line and DEQUE_MARK in line.split("#", 1)[1] for line in near):
                hint = f"give maxlen, or say in a comment there what keeps it {DEQUE_MARK}"
                yield Finding("queue", source.path, node.lineno, what, hint)


def has_bound(call: ast.Call, keyword: str, position: int) -> bool:
    """Does the call give a bound: anything but a missing, None or non-positive literal?"""
    values = [k.value for k in call.keywords if k.arg == keyword] or call.args[position:][:1]
    if not values:
        return False
    try:
        literal = ast.literal_eval(values[0])
    except ValueError:
        return True
    return isinstance(literal, int) and literal > 0


def check_threads(source: Source) -> Iterator[Finding]:
    """Threads are made in one place (a default executor of asyncio is a thread pool too)."""
    if not source.is_product or source.path == THREAD_HOME:
        return
    names = source.origins
    for node in source.nodes:
        if isinstance(node, ast.Call):
            what = origin(node.func, names)
            if isinstance(node.func, ast.Attribute) and node.func.attr == "run_in_executor":
                what = "run_in_executor"
            made = [what] if what in THREADS or what == "run_in_executor" else []
        elif isinstance(node, ast.ClassDef):
            made = [o for base in node.bases if (o := origin(base, names)) in THREADS]
        else:
            continue
        for what in made:
            hint = f"threads are made only in {THREAD_HOME}"
            yield Finding("thread", source.path, node.lineno, what, hint)


def check_clock(source: Source) -> Iterator[Finding]:
    """Product code reads no clock and never sleeps; a test sleeps only in `eventually`."""
    if source.path in (CLOCK_HOME, WAITING_HOME):
        return
    names = source.origins
    banned = CLOCK_READS if source.is_product else frozenset({"time.sleep"})
    hint = f"take a Clock ({CLOCK_HOME})" if source.is_product else f"use {WAITING_HOME}"
    for node in source.nodes:
        # Any mention counts, called or passed on; an inner part of a chain is not a mention.
        if isinstance(node, ast.Attribute | ast.Name) and (what := origin(node, names)) in banned:
            yield Finding("clock", source.path, node.lineno, what, hint)


def check_print(source: Source) -> Iterator[Finding]:
    """Only the command line prints."""
    cli = within(source.module, "store_worker.cli") or source.module == "engine_shim.cli"
    if not source.is_product or cli:
        return
    for node in source.nodes:
        if isinstance(node, ast.Call) and dotted(node.func) == "print":
            yield Finding("print", source.path, node.lineno, "print", "log, or return it")


def check_docstring(source: Source) -> Iterator[Finding]:
    """Every public module of the product says what it is for."""
    private = source.module.split(".")[-1].startswith("_")
    missing = source.tree.body and not ast.get_docstring(source.tree)
    if source.is_product and not private and missing:
        yield Finding("docstring", source.path, 1, source.module, "add a module docstring")


CHECKERS: tuple[Checker, ...] = (
    check_imports,
    check_sizes,
    check_queues,
    check_threads,
    check_clock,
    check_print,
    check_docstring,
)


def check(source: Source) -> list[Finding]:
    """All findings of all checkers for one file."""
    return [finding for checker in CHECKERS for finding in checker(source)]
