"""The documents' code runs, and the API reference has every public name, with an example."""

import ast
import base64
import contextlib
import inspect
import io
import json
import pathlib
import re

import matplotlib.pyplot as plt
import pytest

import optax_lossscale as ols
from optax_lossscale import plot

ROOT = pathlib.Path(__file__).parents[2]


def code_of(text):
    return "".join(re.findall(r"^```python\n(.*?)^```", text, re.S | re.M))


def programs(path):
    """The programs of a document, one for each section that imports the library."""
    sections = re.split(r"^## ", (ROOT / path).read_text(), flags=re.M)
    codes = map(code_of, sections)
    return [code for code in codes if "import optax_lossscale" in code]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the frameworks', not ours
@pytest.mark.parametrize(
    "program", programs("docs/frameworks.md"), ids=["nnx", "linen", "equinox"]
)
def test_each_frameworks_program_runs(program):
    assert "assert_computes_in(" in program
    assert not re.search(r"astype|[^_]dtype=", program)
    exec(program, {})


SECTIONS = (ROOT / "docs/recipes.md").read_text().split("\n## ")
SETUP, *RECIPES = map(code_of, SECTIONS)
NAMES = [section.partition("\n")[0] for section in SECTIONS[1:]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the frameworks', not ours
@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_each_recipe_runs(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(SETUP + recipe, {})


@pytest.mark.parametrize("page", ["bfloat16", "migrating"])
def test_the_program_of_a_page_runs(page):
    exec(code_of((ROOT / f"docs/{page}.md").read_text()), {})


def test_what_diagnosis_prints_is_what_follows_the_program():
    """Under the name that the page gives to the program's file."""
    text = (ROOT / "docs/when_something_is_wrong.md").read_text()
    [code, expected] = re.findall(r"^```(?:python|text)\n(.*?)^```", text, re.S | re.M)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "train.py", "exec"), {})
    assert out.getvalue() == expected


def heading_anchors(text):
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    headings = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w -]", "", x).lower().replace(" ", "-") for x in headings}


PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    if "_build" not in path.parts
]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        path, _, anchor = target.partition("#")
        if not re.match("https?:", target):
            there = (ROOT / page).parent / path if path else ROOT / page
            assert there.exists(), target
            if anchor:
                assert anchor in heading_anchors(there.read_text()), target


def test_every_page_is_in_the_navigation():
    toctrees = re.findall(r"^[\w./]+$", (ROOT / "docs/index.md").read_text(), re.M)
    assert {path.stem for path in ROOT.glob("docs/*.md")} <= {"index", *toctrees}


def test_the_readme_links_to_no_page_of_directives():
    """They are Sphinx's, and a reader of the repository would see them raw."""
    pages = set(re.findall(r"\(([\w/]+\.md)", (ROOT / "README.md").read_text()))
    assert [page for page in sorted(pages) if "```{" in (ROOT / page).read_text()] == []


PHONE = 60  # characters of code that a phone shows


def test_the_landing_page_has_the_readmes_program_which_fits_a_phone():
    assert "```{include} ../README.md\n" in (ROOT / "docs/index.md").read_text()
    (program,) = programs("README.md")
    assert max(map(len, program.splitlines())) <= PHONE


NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


# Characters that a code box of the site shows at 1440 pixels. Reports of the library
# are as wide; code is narrower, as pyproject.toml has it.
CODE, OUTPUT = 88, 100


def cells(name, kind):
    notebook = json.loads((ROOT / "notebooks" / name).read_text())
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def source(cell):
    return "".join(cell["source"])


def outputs(name):
    return [output for cell in cells(name, "code") for output in cell["outputs"]]


def printed(name):
    """What a reader sees of the outputs that are text."""
    for output in outputs(name):
        data = output.get("data", {})
        if "image/png" not in data:
            yield "".join(output.get("text") or data["text/plain"])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_keep_clean_outputs_and_are_in_the_documentation(name):
    """That they run is shown by `.ci/run`, which executes them."""
    assert all(cell["execution_count"] for cell in cells(name, "code"))
    # When a cell ran would differ after each run.
    assert not any("execution" in cell["metadata"] for cell in cells(name, "code"))
    assert {output["output_type"] for output in outputs(name)} <= {
        "display_data",
        "execute_result",
        "stream",
    }
    assert {output.get("name", "stdout") for output in outputs(name)} == {"stdout"}
    assert not re.search(
        r"Warning|/(home|tmp|root|usr|work)/|\x1b", "".join(printed(name))
    )
    assert (
        f"../notebooks/{name.removesuffix('.ipynb')}\n"
        in (ROOT / "docs/index.md").read_text()
    )


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_begin_with_a_title_and_one_paragraph_that_says_how_long_they_take(
    name,
):
    title, paragraph = source(cells(name, "markdown")[0]).split("\n\n")
    assert re.fullmatch("# .+", title)
    assert re.search(r"\btakes\b.*\b(seconds|minute)\b", paragraph)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_name_nothing_private(name):
    nodes = [
        node
        for cell in cells(name, "code")
        for node in ast.walk(ast.parse(source(cell)))
    ]
    modules = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = [
        alias.name
        for node in nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    ]
    parts = [part for path in [*modules, *imported] for part in path.split(".")]
    attributes = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    public_in_spite_of_it = {"_replace"}  # of a NamedTuple
    private = {name for name in parts + attributes if re.match("_(?!_)", name)}
    assert private <= public_in_spite_of_it


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_lines_fit_the_page(name):
    code = [source(cell) for cell in cells(name, "code")]
    text = "\n".join(source(cell) for cell in cells(name, "markdown"))
    code += re.findall(r"^```.*?\n(.*?)^```", text, re.S | re.M)
    wide = [line for block in code for line in block.splitlines() if len(line) > CODE]
    wide += [
        line
        for text in printed(name)
        for line in text.splitlines()
        if len(line) > OUTPUT
    ]
    assert not wide


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_assert_what_they_claim(name):
    code = "\n".join(source(cell) for cell in cells(name, "code"))
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(code)))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_figures_have_a_background_for_a_dark_page_as_for_a_light_one(name):
    for output in outputs(name):
        if "image/png" in output.get("data", {}):
            png = base64.b64decode("".join(output["data"]["image/png"]))
            pixels = plt.imread(io.BytesIO(png), "png")
            assert pixels[..., 3:].min(initial=1) == 1  # opaque
            assert (pixels[0, 0] == 1).all()  # and white


def public(module):
    """The public things of a module under their full names, and those of its public modules."""
    functions = {
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    }
    names = getattr(
        module, "__all__", [name for name in functions if not name.startswith("_")]
    )
    for name in sorted(names):
        value = getattr(module, name)
        if isinstance(value, str):
            continue  # a color of `plot`, which its module documents
        yield f"{module.__name__}.{name}", value
        if inspect.ismodule(value):
            yield from public(value)


PUBLIC = dict([*public(ols), *public(plot)])
REFERENCE = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
DOCUMENTED = re.findall(r"^\.\. auto\w+:: ([\w.]+)", REFERENCE, re.M)
# What has its example with the function that returns it, raises it or takes it.
RESULTS = {
    f"optax_lossscale.{name}"
    for name in (
        "Diagnosis",
        "DtypeReport",
        "LossScaleError",
        "LossScaleState",
        "LossScaledTransformation",
        "MasterWeightsState",
    )
}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_api_reference_once(name):
    assert DOCUMENTED.count(name) == 1


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - RESULTS))
def test_every_public_name_has_a_docstring_with_an_example(name):
    documented = inspect.getdoc(PUBLIC[name])
    assert documented
    assert inspect.ismodule(PUBLIC[name]) or re.search(
        "^ *>>> .*import", documented, re.M
    )
