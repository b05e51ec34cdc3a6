"""What a release needs: `.ci/release` refuses what lacks it. (`.ci/run` shows that it builds.)"""

import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = (
    ".ci/release",
    "CHANGELOG.md",
    "CITATION.cff",
    "optax_lossscale/__init__.py",
    "pyproject.toml",
)
ADDRESS = 'Repository = "https://example.org/owner/optax_lossscale"'
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(checkout, *arguments):
    settings = ["user.name=test", "user.email=test@localhost", "commit.gpgsign=false"]
    command = [
        "git",
        *(word for setting in settings for word in ("-c", setting)),
        *arguments,
    ]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True)


def edit(checkout, file, pattern, replacement):
    path = checkout / file
    text, count = re.subn(pattern, replacement, path.read_text(), flags=re.M)
    assert count == 1
    path.write_text(text)


def complaints(checkout, *arguments):
    command = [sys.executable, ".ci/release", *arguments]
    result = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert result.returncode == 1
    return re.findall("^release: (.*)", result.stderr, re.M)


@pytest.fixture
def ready(tmp_path):
    """The files that `.ci/release` reads before it builds, with what is still missing here."""
    for file in FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    edit(tmp_path, "pyproject.toml", r"^(# )?Repository = .*", ADDRESS)
    [version] = re.findall(
        '^__version__ = "(.*)"', (tmp_path / FILES[3]).read_text(), re.M
    )
    (tmp_path / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## [{version}] - 2026-01-31\n"
    )
    edit(tmp_path, "CITATION.cff", "^date-released: .*", "date-released: 2026-01-31")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "ready")
    return tmp_path


@needs_git
def test_what_is_ready_is_refused_for_its_tag_alone(ready):
    [complaint] = complaints(ready, "v0.0.0")
    assert complaint.startswith("the tag is v0.0.0")


@needs_git
@pytest.mark.parametrize(
    ("file", "pattern", "replacement", "complaint"),
    [
        (
            "pyproject.toml",
            "^Repository.*",
            "",
            "fill in `Repository` under [project.urls]",
        ),
        (
            "pyproject.toml",
            "https://example",
            "example",
            "from https:// to the repository",
        ),
        (
            "CITATION.cff",
            "^date-released: .*",
            "date-released: 2026-02-01",
            "CITATION.cff",
        ),
    ],
    ids=["no address", "no https", "citation"],
)
def test_what_is_not_ready_is_refused(ready, file, pattern, replacement, complaint):
    edit(ready, file, pattern, replacement)
    git(ready, "commit", "-qam", "not ready")
    [found] = complaints(ready)
    assert complaint in found


@needs_git
@pytest.mark.parametrize(
    ("file", "pattern", "replacement"),
    [
        ("optax_lossscale/__init__.py", '^(__version__ = ").*"', r'\g<1>9.9.9"'),
        ("CHANGELOG.md", r"^(# Changelog)", r"\1\n\n## [Unreleased]"),
        ("CHANGELOG.md", r"^(## .*) - .*", r"\1"),
    ],
    ids=["version", "unreleased", "no date"],
)
def test_a_changelog_of_another_version_or_without_a_date_is_refused(
    ready, file, pattern, replacement
):
    edit(ready, file, pattern, replacement)
    git(ready, "commit", "-qam", "not ready")
    changelog, citation = complaints(ready)
    assert "first section" in changelog
    assert "with a date" in changelog
    assert citation.startswith("CITATION.cff")


@needs_git
def test_what_is_not_committed_is_refused(ready):
    (ready / "more.py").touch()
    [complaint] = complaints(ready)
    assert complaint.startswith("not everything is committed")


def test_no_dependency_has_an_upper_bound_but_linters_are_pinned():
    extras = PROJECT["optional-dependencies"].values()
    requirements = map(
        Requirement, [*PROJECT["dependencies"], *(r for e in extras for r in e)]
    )
    bounds = {r.name: s.operator for r in requirements for s in r.specifier}
    pinned = {name for name, operator in bounds.items() if operator == "=="}
    assert pinned == {"basedpyright", "pyrefly", "ruff"}
    assert {*bounds.values()} == {"==", ">="}
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    for name, version in re.findall(r"(ruff|pyrefly)==([\d.]+)", hooks):
        assert f"{name}=={version}" in PROJECT["optional-dependencies"]["dev"]


def test_the_oldest_versions_that_are_tried_are_the_lower_bounds():
    oldest = (ROOT / ".ci/oldest.txt").read_text().splitlines()
    assert {r.replace(">=", "==") for r in PROJECT["dependencies"]} <= set(oldest)


def test_the_pythons_that_are_claimed_are_those_that_are_tried():
    claimed = re.findall(r":: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    workflows = [path.read_text() for path in (ROOT / ".github/workflows").iterdir()]
    [matrix] = set(re.findall(r"python: \[(.*)\]", "".join(workflows)))
    assert claimed == re.findall(r"[\d.]+", matrix)
    assert PROJECT["requires-python"] == f">={claimed[0]}"


def test_only_pyproject_names_the_repository():
    folders = [
        ".ci",
        ".github",
        "benchmarks",
        "docs",
        "examples",
        "notebooks",
        "optax_lossscale",
    ]
    files = [p for p in ROOT.iterdir() if p.is_file()]
    files += [p for folder in folders for p in (ROOT / folder).rglob("*")]
    texts = {
        ".py",
        ".md",
        ".toml",
        ".yml",
        ".yaml",
        ".html",
        ".css",
        ".ipynb",
        ".svg",
        "",
    }
    naming = [
        str(p.relative_to(ROOT))
        for p in files
        if p.is_file() and p.suffix in texts and "_build" not in p.parts
        if re.search(
            r"https?://(?!example\.org)[^\s/]+/[^\s\"')]*/optax_lossscale\b",
            p.read_text(errors="ignore"),
        )
    ]
    assert set(naming) <= {"pyproject.toml"}
