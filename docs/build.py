"""Builds the documentation into docs/_build/html; takes further options of Sphinx, such as -q."""

import pathlib
import shutil
import subprocess
import sys

if __name__ == "__main__":
    sphinx = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-b",
        "html",
        *sys.argv[1:],
    ]
    # beside the site, not in it: they are not published
    sphinx += ["-d", "docs/_build/doctrees"]
    root = pathlib.Path(__file__).parents[1]
    site = root / "docs/_build/html"
    # pages that no longer have a source
    shutil.rmtree(root / "docs/_build", ignore_errors=True)
    failed = subprocess.call([*sphinx, "-c", "docs", ".", site], cwd=root)
    for file in site.rglob("*.map"):  # for debugging the theme
        file.unlink()
    sys.exit(failed)
