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
from pairs import quick

import optax_lossscale as ols
from optax_lossscale import plot

ROOT = pathlib.Path(__file__).parents[2]


def blocks(path):
    """The programs of a document, with the word after `python`; joined where it is `continued`."""
    found = []
    text = (ROOT / path).read_text()
    for info, code in re.findall(r"^```python(.*?)\n(.*?)^```", text, re.S | re.M):
        if "continued" in info:
            found[-1] = found[-1][0], found[-1][1] + code
        else:
            found.append((info.strip(), code))
    return found


def programs(path):
    return [code for _, code in blocks(path)]


FRAMEWORKS = programs("docs/frameworks.md")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the frameworks', not ours
@pytest.mark.parametrize(
    "program",
    FRAMEWORKS,
    ids=["nnx", "linen", "equinox"],
)
def test_each_frameworks_program_runs(program):
    assert "\nassert " in program
    assert "assert_computes_in(" in program
    assert not re.search(r"astype|[^_]dtype=", program)
    exec(program, {})


(_, SETUP), *RECIPES = blocks("docs/recipes.md")
RECIPES += blocks("docs/integrations.md")  # which continue the same program
NAMES = [
    "accumulation",
    "accumulation by hand",
    "clipping",
    "checkpoint",
    "msgpack",
    "gpus",
    "frozen",
    "inner",
    "logging",
    "flash",
    "ode",
    "numpyro",
    "brax",
    "nnx_trainer",
    "handed",
]
SLOW = ("flash", "ode", "nnx_trainer", "inner")
TOPICS = {
    page: re.findall(r"^## (.*)", (ROOT / f"docs/{page}.md").read_text(), re.M)
    for page in ("recipes", "integrations")
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the frameworks', not ours
@pytest.mark.parametrize(
    ("package", "recipe"),
    [
        pytest.param(*recipe, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, recipe in zip(NAMES, RECIPES, strict=True)
    ],
)
def test_each_recipe_runs(package, recipe, tmp_path, monkeypatch):
    """One that needs a package which the tests do not install names it, and runs where it is."""
    if package:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    exec(SETUP + recipe, {})


@pytest.mark.parametrize("page", TOPICS)
def test_the_readme_has_a_link_to_the_recipes(page):
    assert f"(docs/{page}.md)" in (ROOT / "README.md").read_text()


def test_the_readme_links_to_no_page_of_directives():
    """They are Sphinx's, and a reader of the repository would see them raw."""
    pages = set(re.findall(r"\(([\w/]+\.md)", (ROOT / "README.md").read_text()))
    assert len(pages) > 10
    assert [page for page in sorted(pages) if "```{" in (ROOT / page).read_text()] == []


def test_what_diagnosis_prints_is_what_follows_the_program():
    """Under the name that the page gives to the program's file."""
    text = (ROOT / "docs/diagnosis.md").read_text()
    block = r"((?:(?!```|>>>)[^\n]*\n)*)```\n"
    found = re.findall(rf"^```python\n{block}\n```text\n{block}", text, re.M)
    [(code, expected)] = found
    assert printed_by(code) == expected


def printed_by(code):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "train.py", "exec"), {})
    return out.getvalue()


STANDALONE = {
    "skipping": programs("docs/skipping.md")[:1],
    "from PyTorch": programs("docs/coming_from_pytorch.md"),
    "two networks": programs("docs/several_losses.md")[:1],
    "two losses": programs("docs/several_losses.md")[1:],
}


@quick("programs", STANDALONE, "skipping", "from PyTorch", "two losses")
def test_each_program_of_a_topic_runs(programs):
    [program] = programs
    assert "\nassert " in program
    exec(program, {})


PHONE = 60  # characters of code that a phone shows


def test_the_landing_page_has_the_readmes_program_which_fits_a_phone():
    assert "```{include} ../README.md\n" in (ROOT / "docs/index.md").read_text()
    (program,) = programs("README.md")
    assert max(map(len, program.splitlines())) <= PHONE


NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_all_four_notebooks_are_found():
    assert len(NOTEBOOKS) == 4


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
