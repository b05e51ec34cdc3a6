"""Sphinx's configuration. The source root is the repository, so links work as on GitHub."""

import html
import pathlib
import re
import sys
import textwrap
import tomllib
from typing import get_type_hints

import jax
from docutils import nodes
from sphinx.builders.html import StandaloneHTMLBuilder
from sphinx.util import inspect
from sphinx.util.typing import stringify_annotation

import optax_lossscale as ols
from optax_lossscale._arrays.stateful import Stateful

ROOT = pathlib.Path(__file__).parents[1]
ABOUT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = "optax_lossscale"
author = project_copyright = "the optax_lossscale authors"
version = release = ols.__version__
html_baseurl = ABOUT.get("urls", {}).get("Documentation", "")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/**.md",
    "notebooks/*.ipynb",
]
exclude_patterns = [".*", "**/.*", "docs/_build"]

nb_execution_mode = "off"  # notebooks keep their outputs; .ci/run executes them
nb_merge_streams = True
myst_heading_anchors = 3
suppress_warnings = ["toc.not_included"]  # benchmarks are behind one link
autosummary_generate = False  # tables alone; the pages have the rest

default_role = "py:obj"  # docstrings put code in single backquotes
add_module_names = False
html_domain_indices = False
python_maximum_signature_line_length = 120
python_use_unqualified_type_names = True
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
copybutton_exclude = ".linenos, .gp, .go"  # what is copied from a doctest runs

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_title = project
html_context = {"default_mode": "auto"}  # light or dark as the reader's system is
html_favicon = "_static/favicon.png"
# from docs/index.html, where the search finds it, to the home page
html_extra_path = ["redirect"]
html_theme_options = {
    "logo": {
        "image_light": "_static/logo-light.svg",
        "image_dark": "_static/logo-dark.svg",
        "text": project,
    },
    "navbar_persistent": [],
    "show_toc_level": 2,
}
if repository := ABOUT.get("urls", {}).get("Repository"):
    link = {"name": "Repository", "url": repository, "icon": "fa-solid fa-code-branch"}
    html_theme_options["icon_links"] = [link]


class Site(StandaloneHTMLBuilder):
    """Puts the home page at the root of the site, where its address is shortest."""

    name = "html"

    def get_target_uri(self, docname, typ=None):
        """The address of a page."""
        return super().get_target_uri(_home(docname), typ)

    def get_output_path(self, page_name, /):
        """The file of a page."""
        return super().get_output_path(_home(page_name))


def _home(docname):
    return "index" if docname == root_doc else docname


def setup(app):
    """What no extension does; each is described below."""
    app.add_builder(Site, override=True)
    app.connect("source-read", the_readme_is_the_home_page)
    app.connect("source-read", the_names_come_first)
    app.connect("doctree-resolved", raise_powers)
    app.connect("missing-reference", in_the_package)
    app.connect("autodoc-process-signature", tidy_signatures)
    # after autodoc's
    app.connect("object-description-transform", tidy_types, priority=900)
    app.connect("viewcode-follow-imported", where_it_is_written)
    app.connect("html-page-context", describe)
    app.connect("html-page-context", let_long_names_break)


def the_readme_is_the_home_page(app, page, source):
    """Links to the README, where a reader of the repository finds it, lead to the home page."""
    source[0] = source[0].replace("](../README.md", "](index.md")


def the_names_come_first(app, page, source):
    """A page of the reference begins with a table of the names that it describes."""
    names = re.findall(
        r"^\.\. auto(?:function|class|exception):: ([\w.]+)", source[0], re.M
    )
    if page.startswith("docs/api_"):
        rows = "".join(f"   ~{name}\n" for name in names)
        table = f"```{{eval-rst}}\n.. autosummary::\n   :nosignatures:\n\n{rows}```\n\n"
        source[0] = re.sub(
            r"^(?=## |```)", lambda _: table, source[0], count=1, flags=re.M
        )


def where_it_is_written(app, module, name):
    """The private module that defines what is public, for the link to its source.

    There is none for a module of which the reference names other things by their private
    places: Sphinx would lead back to those as if they were public.
    """
    reference = "".join(path.read_text() for path in ROOT.glob("docs/api_*.md"))
    named = set(re.findall(r":: (optax_lossscale\._[\w.]+)\.\w+", reference))
    outermost = re.escape(name.partition(".")[0])
    definition = re.compile(rf"^(?:class|def) {outermost}\b", re.M)
    for path, candidate in sorted(sys.modules.items()):
        is_private = path.startswith("optax_lossscale.") and "._" in path
        if is_private:
            source = pathlib.Path(candidate.__file__).read_text()
            if definition.search(source):
                return module if path in named else path
    return None


def raise_powers(app, doctree, page):
    """Sets the exponent of 2^15 in text, though not in code, as a superscript."""
    for text in list(doctree.findall(nodes.Text)):
        parts = re.split(r"(?<=\d)\^(-?\w+)", text)
        in_code = isinstance(text.parent, (nodes.literal, nodes.literal_block))
        if len(parts) > 1 and not in_code:
            kinds = [nodes.Text, lambda exponent: nodes.superscript(exponent, exponent)]
            text.parent.replace(
                text, [kinds[i % 2](part) for i, part in enumerate(parts)]
            )


def in_the_package(app, env, node, contnode):
    """The reference, looked up as if written in the package itself; None if it is not there.

    It finds what docstrings of methods name without its module.
    """
    if node.get("refdomain") != "py":
        return None
    node["py:module"], node["py:class"] = project, None
    where = env, node["refdoc"], app.builder, node["reftype"], node["reftarget"]
    return env.domains["py"].resolve_xref(*where, node, contnode)


def tidy_signatures(app, what, name, obj, options, signature, returns):
    """The arguments of loss scales and rules, not of their `__new__`."""
    if what == "class" and issubclass(obj, Stateful):
        signature = inspect.stringify_signature(
            inspect.signature(obj), show_annotation=False
        )
    return signature, returns


TREE = "PyTree | Callable[[Any], PyTree] | None"
ALIASES = {
    stringify_annotation(annotation, "smart"): name
    for annotation, name in [
        (get_type_hints(ols.with_loss_scale)["mask"], TREE),
        (jax.typing.ArrayLike, "ArrayLike"),
        (jax.typing.DTypeLike, "DTypeLike"),
    ]
}


def tidy_types(app, domain, objtype, content):
    """Gives long unions short names, leaves out `Any`, and puts what is returned in one place."""
    for fields in [child for child in content if isinstance(child, nodes.field_list)]:
        for field in list(fields):
            label, body = (child.astext() for child in field)
            if not re.match("type |rtype$", label):
                continue
            fields.remove(field)
            if body in ("Any", "~typing.Any", "None"):
                continue
            for union, name in ALIASES.items():
                body = body.replace(union, name)
            field[1].children = [
                nodes.paragraph("", body.replace("~typing.Any", "Any"))
            ]
            returns = [
                i for i, other in enumerate(fields) if other[0].astext() == "returns"
            ]
            fields.insert(
                returns[0] + 1 if label == "rtype" and returns else len(fields), field
            )


def describe(app, page, template, context, doctree):
    """Gives a page its description: its first paragraph, or its title where it has none."""
    first = next(doctree.findall(nodes.paragraph), None) if doctree else None
    title = context.get("title", page.capitalize())
    text = first.astext() if first else f"{title} – {project}: {ABOUT['description']}"
    text = textwrap.shorten(text, 160, placeholder=" …")
    tag = f'<meta name="description" content="{html.escape(text)}" />\n'
    context["metatags"] = context.get("metatags", "") + tag


def let_long_names_break(app, page, template, context, doctree):
    """Lets names that may be wider than a phone break, at dots and the like, not within a word."""
    long_name_in_text = r"[\w.(,=/]{20,}(?=[^<>]*<)"
    breaks = lambda name: re.sub(r"(?<=[.(,=/])(?=\w)", "<wbr>", name[0])
    context["body"] = re.sub(long_name_in_text, breaks, context.get("body", ""))
