"""The wheel and the source distribution, built and installed into an environment that has nothing else of ours.

torch and its like are too large to be installed for this: the environment finds them where this one has them, through a path
file, which does not lead to the checkout.
"""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import promoe

ROOT = Path(__file__).resolve().parent.parent
NAME = f"promoe-{promoe.__version__}"
# What setuptools reads; the rest of a checkout (models, environments) is left out to be quick.
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "promoe", "predictors", "training")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="not a checkout: nothing to build from"),
]


def run(*words: object, cwd: Path) -> str:
    """Run a command outside of the checkout and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        [str(w) for w in words], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built, links as links: setuptools leaves folders of its own in it."""
    copy = tmp_path_factory.mktemp("tree")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def built(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, and the wheel built from it."""
    out = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return built / f"{NAME}-py3-none-any.whl"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        folder,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "heavy.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder


def modules() -> set[str]:
    """Every module of the checkout, by its place in an installed package."""
    found = {}
    for folder in (
        "promoe",
        "promoe/predictors",
        "promoe/training",
    ):  # the last two are links, which rglob does not follow
        found |= {
            f"{folder}/{path.relative_to(ROOT / folder).as_posix()}": path for path in (ROOT / folder).rglob("*.py")
        }
    return {name for name in found if "__pycache__" not in name}


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name for name in names if not name.startswith(f"{NAME}.dist-info/")}
    assert {"promoe/predictors/trained.py", "promoe/training/fit.py", "promoe/scheduler/scheduler.py"} <= inside
    charts = {"promoe/commands/charts/report.css", "promoe/commands/charts/report.js"}
    assert inside == modules() | charts | {"promoe/py.typed"}
    assert f"{NAME}.dist-info/licenses/LICENSE" in names


def test_the_checkout_builds_the_same_wheel_as_the_source_distribution(tree: Path, wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, tree, cwd=tmp_path)
    ours, theirs = (zipfile.ZipFile(folder / wheel.name) for folder in (tmp_path, wheel.parent))
    assert sorted(ours.namelist()) == sorted(theirs.namelist())
    assert [name for name in ours.namelist() if ours.read(name) != theirs.read(name)] == []


def test_the_source_distribution_holds_no_links_and_no_models(built: Path) -> None:
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    assert sum(member.size for member in members) < 5e6
    assert {f"{NAME}/README.md", f"{NAME}/LICENSE", f"{NAME}/promoe/py.typed"} <= {member.name for member in members}


def test_the_metadata_says_what_pyproject_says(wheel: Path) -> None:
    metadata = email.message_from_bytes(zipfile.ZipFile(wheel).read(f"{NAME}.dist-info/METADATA"))
    assert metadata["Version"] == promoe.__version__
    assert {"train", "viz", "examples"} <= set(metadata.get_all("Provides-Extra", []))
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    assert {requirement.name for requirement in required if requirement.marker is None} == {
        *("torch", "transformers", "safetensors", "huggingface_hub", "numpy", "tqdm", "jsonargparse")
    }
    assert {"lightning", "datasets", "pyarrow", "scikit-learn"} == wanted_by("train", required)
    assert {"matplotlib"} == wanted_by("viz", required)


def wanted_by(extra: str, required: list[Requirement]) -> set[str]:
    """The libraries that an extra adds."""
    return {
        requirement.name
        for requirement in required
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra})
    }


def test_the_installed_library_and_commands_work_outside_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    script = """
        import sys
        from importlib.metadata import version
        from pathlib import Path
        import promoe
        assert Path(promoe.__file__).is_relative_to(sys.prefix), promoe.__file__
        assert version("promoe") == promoe.__version__
        for name in promoe.__all__:
            getattr(promoe, name)
        import promoe.predictors, promoe.training
        print(promoe.__version__)
    """
    assert run(installed / "bin/python", "-c", textwrap.dedent(script), cwd=tmp_path).strip() == promoe.__version__
    for program in ("promoe", "promoe-train"):
        assert run(installed / "bin" / program, "--help", cwd=tmp_path).startswith(f"usage: {program} ")
        assert run(installed / "bin" / program, "--version", cwd=tmp_path).strip() == f"promoe {promoe.__version__}"


USER = """
import promoe

config = promoe.PromoeConfig(lookahead=2, eviction="lru")
model = promoe.from_pretrained("folder", cache="25%", config=config)
rate: float = promoe.Stats.from_json({}).decode.hit_rate
link = promoe.EmulatedLink(bandwidth_bytes_per_s=12e9)
"""
MISTAKES = USER.replace("lookahead=2", 'lookahead="two"').replace('"lru"', '"fifo"').replace("rate: float", "rate: str")


def test_type_checkers_see_the_installed_librarys_types(installed: Path, tmp_path: Path) -> None:
    # The types of torch and its like would take minutes to read.
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = True\n[mypy-torch.*,transformers.*,numpy.*,safetensors.*,huggingface_hub.*,tqdm.*]\n"
        "follow_imports = skip\nignore_missing_imports = True\n",
        encoding="utf-8",
    )
    (tmp_path / "user.py").write_text(USER, encoding="utf-8")
    (tmp_path / "mistakes.py").write_text(MISTAKES, encoding="utf-8")
    mypy = [sys.executable, "-m", "mypy", "--python-executable", installed / "bin/python"]
    assert "Success" in run(*mypy, "user.py", cwd=tmp_path)
    done = subprocess.run([*map(str, mypy), "mistakes.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    for wrong in ('Argument "lookahead"', 'Argument "eviction"', "Incompatible types in assignment"):
        assert wrong in done.stdout
