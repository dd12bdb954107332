"""What is shipped: the wheel's content, the extension's symbols, who imports whom, and which instructions."""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLAGS = json.loads((ROOT / "native" / "native_flags.json").read_text())
ISA_BEST_FIRST = ["avx512_vnni", "avx_vnni", "avx2", "scalar"]


def run(*command: str | Path, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **kwargs)


def output_of(*command: str | Path) -> str:
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- the wheel ----


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Without isolation: the build requirements are part of the dev extra, and nothing is downloaded.
    output_of(
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"),
        *("--no-build-isolation", "-C", f"build-dir={folder / 'build'}", "-w", folder, ROOT),
    )
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_only_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"coremill", "coremill-0.1.0.dist-info"}
    packaged = [name for name in names if name.startswith("coremill/")]
    unexpected = [name for name in packaged if Path(name).suffix in {".c", ".h", ".inc", ".cmake", ".pyc", ".o"}]
    assert unexpected == []
    assert not any(Path(name).name in {"CMakeLists.txt", "build_ffi.py"} for name in packaged)
    for folder in ("config", "native", "worker", "coordinator", "tools"):
        assert f"coremill/{folder}/__init__.py" in packaged
    assert "coremill/__init__.py" in packaged
    assert "coremill/native/_native.abi3.so" in packaged


def test_wheel_serves_every_python_and_carries_its_licence(wheel):
    assert re.fullmatch(r"coremill-0\.1\.0-cp311-abi3-\w*linux\w*_x86_64\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert "coremill-0.1.0.dist-info/licenses/LICENSE" in names


def test_extension_exports_only_its_init_function(wheel, tmp_path):
    extension = zipfile.ZipFile(wheel).extract("coremill/native/_native.abi3.so", tmp_path)
    symbols = [line.split()[-1] for line in output_of("nm", "-D", "--defined-only", extension).splitlines()]
    assert symbols == ["PyInit__native"]


def test_top_package_is_lazy():
    loaded = output_of(sys.executable, "-c", "import sys, coremill; print(coremill.__version__, *sys.modules)")
    version, *modules = loaded.split()
    assert version == "0.1.0"
    assert [name for name in modules if name.startswith("coremill.")] == []


def test_importing_native_does_not_load_the_extension():
    code = "import sys, coremill.native; print('coremill.native._native' in sys.modules)"
    assert output_of(sys.executable, "-c", code).strip() == "False"


# ---- who imports whom: config <- native <- {worker, coordinator} <- tools ----

MAY_IMPORT = {
    "config": {"config"},
    "native": {"config", "native"},
    "worker": {"config", "native", "worker"},
    "coordinator": {"config", "native", "coordinator"},
    "tools": {"config", "native", "worker", "coordinator", "tools"},
}


def imported_folders(source: str) -> set[str]:
    """Folders of ours that a module imports, at its top or inside any function."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            # `from coremill import config` names the folder in the alias.
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            first, *rest = target.split(".")
            assert first not in MAY_IMPORT, f"line {node.lineno}: {first} without coremill."
            if first == "coremill":
                found.add("coordinator" if rest[:1] == ["Coordinator"] else ".".join(rest[:1]))
    return found


def our_modules() -> list[Path]:
    return [path for folder in MAY_IMPORT for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("module", our_modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(module):
    folder = module.relative_to(ROOT).parts[0]
    # The empty name is `import coremill` itself, which hands out nothing eagerly.
    assert imported_folders(module.read_text()) - {""} <= MAY_IMPORT[folder]


def test_import_rule_sees_every_form_of_import():
    source = """
import coremill.worker.engine as e
def f():
    from coremill import native, Coordinator
    from coremill.config import errors
"""
    assert imported_folders(source) == {"worker", "native", "coordinator", "config"}
    for bad in ("from . import x", "import config", "from worker.engine import y"):
        with pytest.raises(AssertionError):
            imported_folders(bad)


# ---- the choice of instruction set ----

SHOW_ISA = """
from coremill.native import ffi, lib
print(ffi.string(lib.cm_isa_active()).decode())
print(*(ffi.string(lib.cm_isa_name(i)).decode() for i in range(lib.cm_isa_count()) if lib.cm_isa_supported(i)))
"""


def show_isa(**settings: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in ("COREMILL_ISA", "COREMILL_CPU_MASK")}
    return run(sys.executable, "-c", SHOW_ISA, env=environment | settings)


def supported_isas(**settings: str) -> tuple[str, list[str]]:
    done = show_isa(**settings)
    assert done.returncode == 0, done.stderr
    active, supported = done.stdout.splitlines()
    return active, supported.split()


def test_best_supported_isa_is_chosen():
    active, supported = supported_isas()
    assert supported == [isa for isa in ISA_BEST_FIRST if isa in supported]
    assert active == supported[0]
    assert supported[-1] == "scalar"
    # An empty setting is the same as none.
    assert supported_isas(COREMILL_ISA="", COREMILL_CPU_MASK="") == (active, supported)


def test_every_supported_isa_can_be_forced():
    for isa in supported_isas()[1]:
        assert supported_isas(COREMILL_ISA=isa)[0] == isa


@pytest.mark.parametrize(
    ("mask", "gone"),
    [
        *((feature, {"avx512_vnni"}) for feature in ("avx512vnni", "avx512dq", "avx512vl", "avx512bw", "avx512f")),
        ("avxvnni", {"avx_vnni"}),
        ("bmi2", {"avx_vnni", "avx2"}),
        *((feature, {"avx512_vnni", "avx_vnni", "avx2"}) for feature in ("f16c", "fma", "avx2")),
        ("avx512f,avxvnni", {"avx512_vnni", "avx_vnni"}),
    ],
)
def test_masked_features_take_their_isas_away(mask, gone):
    unmasked = supported_isas()[1]
    active, supported = supported_isas(COREMILL_CPU_MASK=mask)
    assert supported == [isa for isa in unmasked if isa not in gone]
    assert active == supported[0]


def test_unknown_isa_is_an_error_that_lists_the_known_ones():
    done = show_isa(COREMILL_ISA="avx3")
    assert done.returncode == 1
    assert "ConfigError: COREMILL_ISA: 'avx3' is unknown" in done.stderr
    assert f"known: {', '.join(ISA_BEST_FIRST)};" in done.stderr
    assert f"supported by this CPU: {', '.join(supported_isas()[1])}" in done.stderr


def test_unsupported_isa_is_an_error():
    done = show_isa(COREMILL_ISA="avx2", COREMILL_CPU_MASK="fma")
    assert done.returncode == 1
    assert "COREMILL_ISA: 'avx2' is not supported by this CPU" in done.stderr
    assert "supported by this CPU under COREMILL_CPU_MASK: scalar" in done.stderr


@pytest.mark.parametrize("mask", ["avx9", "avx2,avx9", "AVX2", "avx2,,fma", " avx2"])
def test_unknown_feature_in_the_mask_is_an_error(mask):
    done = show_isa(COREMILL_CPU_MASK=mask)
    assert done.returncode == 1
    assert "ConfigError: COREMILL_CPU_MASK: unknown feature" in done.stderr
    assert "known: avx2, fma, f16c, bmi2, avxvnni, avx512f" in done.stderr


def test_explicit_selection_before_first_use_stands():
    code = """
from coremill.native import select_isa
select_isa("scalar")
from coremill.native import ffi, lib
print(ffi.string(lib.cm_isa_active()).decode())
"""
    assert output_of(sys.executable, "-c", code).strip() == "scalar"


def test_failed_selection_keeps_the_previous_one():
    code = """
from coremill.config.errors import ConfigError
from coremill.native import ffi, lib, select_isa
select_isa("scalar")
try:
    select_isa("nonsense")
except ConfigError as e:
    print(str(e).startswith("instruction set: 'nonsense' is unknown"))
print(ffi.string(lib.cm_isa_active()).decode())
"""
    assert output_of(sys.executable, "-c", code).split() == ["True", "scalar"]


# ---- the instructions of each object ----


def compiler_is_gnu(compiler: str) -> bool:
    return "Free Software Foundation" in output_of(compiler, "--version")


@pytest.fixture(scope="module", params=ISA_BEST_FIRST)
def disassembly(request, tmp_path_factory) -> tuple[str, list[tuple[bytes, str]]]:
    """One instruction set's object, compiled with the flags of the build, as (bytes, text) per instruction."""
    isa = request.param
    compiler = os.environ.get("CC", "cc")
    native = ROOT / "native"
    target = tmp_path_factory.mktemp("isa") / f"{isa}.o"
    flags = FLAGS["common"] + FLAGS["isa"][isa] + (FLAGS["isa_gnu"] if compiler_is_gnu(compiler) else [])
    includes = [f"-I{native / folder}" for folder in FLAGS["include"]]
    output_of(compiler, *flags, *includes, "-c", native / "isa" / f"{isa}.c", "-o", target)
    listing = output_of("objdump", "-d", "--wide", target)
    lines = re.findall(r"^ +[0-9a-f]+:\t((?:[0-9a-f]{2} )+) *\t(.+)$", listing, re.M)
    assert lines
    return isa, [(bytes.fromhex(code), text.strip()) for code, text in lines]


def mnemonics(instructions) -> set[str]:
    # Encoding hints such as {vex} come before the name.
    return {re.sub(r"^(\{\w+\} ?)+", "", text).split()[0] for _, text in instructions}


def registers(instructions, kind: str) -> list[str]:
    return [text for _, text in instructions if re.search(rf"%{kind}\d", text)]


def evex_encoded(instructions) -> list[str]:
    # In 64-bit code 0x62 is nothing but the EVEX prefix.
    return [text for code, text in instructions if code.lstrip(b"\x64\x65\x67")[:1] == b"\x62"]


# Names that belong to extensions newer than those a row of the dispatch table asks for.
NEWER = re.compile(
    r"vdpbf16ps|vcvtne\w*bf16|vpdpb(ss|su|uu)ds?|vpdpw(us|su|uu)ds?"
    r"|vperm[bi2t]*b|vpmultishiftqb|vp(compress|expand)[bw]|vpsh[lr]d\w*|vpopcnt\w+|vpshufbitqmb"
    r"|vgf2p8\w+|vaes\w+|vpclmul\w+|vp2intersect\w+|vpmadd52\w+|vpconflict\w+|vplzcnt\w+|vpbroadcastm\w+"
    r"|v(add|mul|sub|div|fn?madd\d*|max|min)(ph|sh)|tdp\w+|tile\w+"
)


def test_no_instruction_newer_than_the_row_asks_for(disassembly):
    _, instructions = disassembly
    assert {name for name in mnemonics(instructions) if NEWER.fullmatch(name)} == set()


def test_instructions_are_those_of_the_isa(disassembly):
    isa, instructions = disassembly
    names = mnemonics(instructions)
    ymm, zmm = registers(instructions, "ymm"), registers(instructions, "zmm")
    if isa == "avx512_vnni":
        assert zmm
        assert "vpdpbusd" in names
        return
    assert zmm == []
    assert evex_encoded(instructions) == []
    if isa == "scalar":
        # Baseline SSE2 has no VEX encoding, so no name starts with v.
        assert ymm == []
        assert [name for name in names if name.startswith("v")] == []
    else:
        assert ymm
        assert ("vpdpbusd" in names) == (isa == "avx_vnni")
        assert [name for name in names if name.startswith("vpdp") and isa == "avx2"] == []


def test_flags_name_every_isa_file():
    assert sorted(FLAGS["isa"]) == sorted(path.stem for path in (ROOT / "native" / "isa").glob("*.c"))


def test_python_m_coremill_is_the_command():
    assert output_of(sys.executable, "-m", "coremill", "--version") == output_of(
        sys.executable, "-m", "coremill.tools", "--version"
    )
