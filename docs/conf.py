"""Sphinx's configuration. The source root is the repository, so links work as on GitHub."""

import optax_lossscale as ols

project = "optax_lossscale"
author = project_copyright = "The optax_lossscale authors"
version = release = ols.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "notebooks/*.ipynb"]
exclude_patterns = [".*", "**/.*", "docs/_build"]

nb_execution_mode = "off"  # notebooks keep their outputs; .ci/run executes them
nb_merge_streams = True
myst_heading_anchors = 3

default_role = "py:obj"  # docstrings put code in single backquotes
add_module_names = False
python_maximum_signature_line_length = 120
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # the docstrings say them, with shapes and dtypes
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_title = project
html_extra_path = ["redirect/index.html"]  # from the site's root to docs/index.html
html_theme_options = {"navbar_persistent": [], "show_toc_level": 2}


def setup(app):
    """Finds what docstrings of presets and methods name without its module."""
    app.connect("missing-reference", in_the_package)


def in_the_package(app, env, node, contnode):
    """The reference, looked up as if written in the package itself; None if it is not there."""
    if node.get("refdomain") != "py":
        return None
    node["py:module"], node["py:class"] = project, None
    where = env, node["refdoc"], app.builder, node["reftype"], node["reftarget"]
    return env.domains["py"].resolve_xref(*where, node, contnode)
