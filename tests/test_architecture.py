"""The shape of the source: who may import whom, what must not be needed, and how files are kept."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from localmoe import engine

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "localmoe"
LAYERS = (
    "core", "kernels", "hardware", "hub", "quant", "experts", "prefetch", "model", "vision", "speculative",
    "chat", "engine", "tables", "server", "cli",
)  # fmt: skip
MAX_LINES = 300
ENGINE = "localmoe.engine."
WEB = ("gradio", "fastapi", "uvicorn", "starlette", "pydantic")
MODULES = sorted(PACKAGE.rglob("*.py"))
OUTSIDE_APP = [
    *MODULES,
    *sorted((ROOT / "tools").rglob("*.py")),
    *sorted((ROOT / "benchmarks").rglob("*.py")),
    ROOT / "launch.py",
]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.Module, name: str) -> Iterator[str]:
    """Every module name that is imported anywhere, also in functions and under `if TYPE_CHECKING`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno} imports relatively"
            assert node.module is not None
            yield node.module
            if node.module == "localmoe":  # `from localmoe import core`
                yield from (f"localmoe.{alias.name}" for alias in node.names)


@cache
def imported_modules(path: Path) -> tuple[str, ...]:
    return tuple(imports_of(tree_of(path), name_of(path)))


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "localmoe" and len(parts) > 1 and parts[1] in LAYERS else None


def upward_imports(layer: str, modules: Iterable[str]) -> list[str]:
    order = LAYERS.index(layer)
    return [m for m in modules if (found := layer_of(m)) is not None and LAYERS.index(found) > order]


def test_every_package_has_a_place_in_the_order() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert packages <= set(LAYERS)
    assert {path.name for path in PACKAGE.glob("*.py")} <= {"__init__.py", "__main__.py"}


def test_imports_point_one_way() -> None:
    wrong = {}
    for path in MODULES:
        layer, modules = layer_of(dotted(path)), list(imported_modules(path))
        found = [module for module in modules if module.split(".")[0] == "app"]
        if layer is not None:
            found += upward_imports(layer, modules)
        elif path.name != "__main__.py":  # localmoe itself only names the version
            found += [module for module in modules if module.split(".")[0] == "localmoe"]
        if found:
            wrong[name_of(path)] = found
    assert wrong == {}


def test_the_one_way_rule_sees_an_import_inside_a_function() -> None:
    assert upward_imports("experts", ["localmoe.core.types", "localmoe.model.runner"]) == [
        "localmoe.model.runner"
    ]


def test_only_the_app_and_the_server_import_web_frameworks() -> None:
    found = [path for path in OUTSIDE_APP if set(WEB) & {m.split(".")[0] for m in imported_modules(path)}]
    assert [name_of(path) for path in found if path.parent != PACKAGE / "server"] == []
    assert all(name.startswith("localmoe.server.") for name in modules_that_need(*WEB))


def unlocked_imports(tree: ast.Module, heavy: Iterable[str] = ()) -> list[int]:
    """Lines of functions that import from the engine, or one of the `heavy` modules, without having called
    `import_all()` before."""
    names = {"torch", "transformers", *heavy}
    lines = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        body = list(ast.walk(function))
        named = [n for n in body if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "import_all"]
        calls = [n.lineno for n in named]
        late = [
            n.lineno
            for n in body
            if isinstance(n, ast.Import | ast.ImportFrom)
            for module in imports_of(ast.Module([n], []), "")
            if f"{module}.".startswith(ENGINE) or module in names or module.split(".")[0] in names
        ]
        lines += [line for line in late if not any(call < line for call in calls)]
    return lines


def at_once(tree: ast.Module) -> set[str]:
    """What a module takes from the engine by its own statements, but for type checkers."""
    found = [n for n in tree.body if isinstance(n, ast.ImportFrom) and f"{n.module}.".startswith(ENGINE)]
    return {f"{node.module}.{alias.name}" for node in found for alias in node.names}


def test_the_threads_of_the_page_import_the_engine_one_at_a_time() -> None:
    files = [*sorted((ROOT / "app").rglob("*.py")), PACKAGE / "cli" / "hub_process.py"]
    heavy = modules_that_need("torch", "transformers")
    found = {name_of(path): lines for path in files if (lines := unlocked_imports(tree_of(path), heavy))}
    assert found == {}
    assert set().union(*(at_once(tree_of(path)) for path in files)) == {f"{ENGINE}import_all"}
    heavy |= {"torch", "transformers"}
    assert {name_of(path): needed for path in files if (needed := heavy & set(imported_at_once(path)))} == {}


def test_what_policies_import_when_they_are_made_is_imported_with_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []
    monkeypatch.setattr(engine, "import_module", names.append)
    engine.import_all()
    late = {
        f"{module}.{alias.name}"
        for path in sorted((PACKAGE / "prefetch").rglob("*.py"))
        for function in ast.walk(tree_of(path))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and (module := node.module or "").startswith("localmoe")
        for alias in node.names
    }
    assert late == {"localmoe.prefetch.loops"} and late <= set(names)


def test_the_rule_for_threads_sees_an_import_that_does_not_wait() -> None:
    late = "    from localmoe.engine.fit import fit_model\n"
    assert unlocked_imports(ast.parse(f"def f():\n{late}    import_all()\n")) == [2]
    assert unlocked_imports(ast.parse(f"def f():\n    import_all()\n{late}")) == []
    assert unlocked_imports(ast.parse("def f():\n    import torch.nn\n")) == [2]


def test_imports_inside_functions_are_seen() -> None:
    source = 'def f():\n    """Late."""\n    import gradio.themes\n    from localmoe import engine\n'
    assert list(imports_of(ast.parse(source), "x")) == ["gradio.themes", "localmoe", "localmoe.engine"]


def test_the_core_imports_nothing_but_numpy_and_the_standard_library() -> None:
    for path in sorted((PACKAGE / "core").rglob("*.py")):
        foreign = {module.split(".")[0] for module in imported_modules(path)} - {"localmoe", "numpy"}
        assert foreign <= sys.stdlib_module_names, name_of(path)


def test_the_launcher_imports_nothing_but_the_standard_library() -> None:
    roots = {module.split(".")[0] for module in imported_modules(ROOT / "launch.py")}
    assert roots <= sys.stdlib_module_names


MAKERS = {"empty", "zeros", "ones", "full", "rand", "randn", "eye", "linspace", "normal"}


def default_floats(tree: ast.Module) -> list[int]:
    """Lines that make a tensor of PyTorch's default dtype."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {f"torch.{name}" for name in MAKERS}
        and not any(keyword.arg in ("dtype", None) for keyword in node.keywords)
    ]


def test_tensors_do_not_have_the_default_dtype() -> None:
    """transformers changes it for the whole process while it builds a model, as the page does at any time:
    kernels that write float32 to the address of such a tensor would write beyond its end."""
    assert not {name_of(path): lines for path in MODULES if (lines := default_floats(tree_of(path)))}


def test_the_rule_for_dtypes_sees_one_that_is_not_said() -> None:
    assert default_floats(ast.parse("a = torch.empty(2)\nb = torch.zeros(3, dtype=torch.int64)")) == [1]


def test_every_module_says_what_it_is_for() -> None:
    files = [*MODULES, *sorted((ROOT / "app").rglob("*.py"))]
    assert [name_of(path) for path in files if not (ast.get_docstring(tree_of(path)) or "").strip()] == []


def test_no_file_is_long() -> None:
    files = [*MODULES, *sorted((ROOT / "app").rglob("*.py"))]
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def module_containers(tree: ast.Module) -> set[str]:
    """Module-level names bound to a list, dict, set or another call that makes one."""
    displays = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    makers = {"list", "dict", "set", "defaultdict", "OrderedDict", "Counter", "deque"}
    names: set[str] = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        value = getattr(node, "value", None)
        made = isinstance(value, ast.Call) and getattr(value.func, "id", "") in makers
        if isinstance(value, displays) or made:
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


def mutations(tree: ast.Module) -> list[str]:
    """`global` statements, and writes into module-level containers from inside functions."""
    containers = module_containers(tree)
    methods = {"append", "extend", "add", "update", "pop", "clear", "setdefault", "insert", "remove"}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(f"line {node.lineno}: global {', '.join(node.names)}")
        owner = getattr(getattr(node, "value", None), "id", None)
        if owner not in containers:
            continue
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found.append(f"line {node.lineno}: {owner}[...] is written")
        if isinstance(node, ast.Attribute) and node.attr in methods:
            found.append(f"line {node.lineno}: {owner}.{node.attr}")
    return found


def test_no_module_keeps_state() -> None:
    written = {name_of(path): found for path in MODULES if (found := mutations(tree_of(path)))}
    assert written == {}
    names = {name_of(path): module_containers(tree_of(path)) - {"__all__"} for path in MODULES}
    assert {path: found for path, found in names.items() if not all(name.isupper() for name in found)} == {}


def test_the_state_check_sees_a_cache_that_a_function_fills() -> None:
    assert mutations(ast.parse("_CACHE = {}\ndef f(x):\n    _CACHE[x] = 1\n"))
    assert mutations(ast.parse("_SEEN = set()\ndef f(x):\n    _SEEN.add(x)\n"))
    assert mutations(ast.parse("_N = 0\ndef f():\n    global _N\n    _N += 1\n"))
    assert not mutations(ast.parse("_TABLE = {'a': 1}\ndef f(x):\n    return _TABLE[x]\n"))


BARE_START = """
import importlib, os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
blocked = ("gradio", "fastapi", "uvicorn", "starlette", "triton", "pynvml")
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
modules = sys.argv[1:]
for name in [m for m in modules if m.split(".")[1:2] in (["core"], ["prefetch"])]:
    importlib.import_module(name)
assert "torch" not in sys.modules, "the core, a policy or the simulator pulled torch in"
for name in modules:
    importlib.import_module(name)
import torch
assert not torch.cuda.is_initialized(), "importing touched CUDA"
assert not [m for m in sys.modules if m.split(".")[0] in blocked], "a blocked module was imported"
print(len(modules))
"""


def modules_that_need(*packages: str) -> set[str]:
    """What imports one of these, directly or not, when it is itself imported."""
    imports = {dotted(path): set(imported_at_once(path)) for path in MODULES}
    roots = {name: {module.split(".")[0] for module in found} for name, found in imports.items()}
    needing = {name for name in imports if name.startswith(packages) or roots[name] & set(packages)}
    while more := {name for name, found in imports.items() if found & needing} - needing:
        needing |= more
    return needing


@cache
def imported_at_once(path: Path) -> tuple[str, ...]:
    """What a module's own statements import: not those of its functions, nor for type checkers only."""
    own = [node for node in tree_of(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
    return tuple(imports_of(ast.Module(own, []), dotted(path)))


def test_only_passes_on_the_gpu_need_triton() -> None:
    on_gpu = ("localmoe.kernels.gpu", "localmoe.model.device_")
    assert all(name.startswith(on_gpu) for name in modules_that_need("localmoe.kernels.gpu"))


def names_that_triton_cannot_see(tree: ast.Module) -> list[str]:
    """Annotations of kernels that name something beside `tl`: Triton looks them up among what kernels may
    use, so the kernel would fail when it is first launched, which takes a GPU."""
    kernels = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    return [
        f"{kernel.name}({argument.arg})"
        for kernel in kernels
        for argument in (*kernel.args.args, *kernel.args.kwonlyargs)
        if argument.annotation is not None and not ast.unparse(argument.annotation).startswith("tl.")
    ]


def test_kernels_are_annotated_with_what_triton_knows() -> None:
    found = {name_of(path): names_that_triton_cannot_see(tree_of(path)) for path in OUTSIDE_APP}
    assert not {name: names for name, names in found.items() if names}


def test_the_rule_for_kernels_sees_an_annotation() -> None:
    kernel = "@triton.jit\ndef f(a: Any, b, C: tl.constexpr):\n    pass\ndef g(a: Any): pass\n"
    assert names_that_triton_cannot_see(ast.parse(kernel)) == ["f(a)"]


def test_every_module_imports_without_gradio_triton_and_cuda() -> None:
    needing = modules_that_need("localmoe.kernels.gpu", *WEB)  # imported where there is one
    names = [dotted(path) for path in MODULES if path.name != "__main__.py" and dotted(path) not in needing]
    done = subprocess.run(
        [sys.executable, "-c", BARE_START, *names], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(names))]
