"""What docs/check_site.py finds in the files of a site; .ci/run lets it look in a browser too."""

import pathlib
import runpy

import pytest

CHECK = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "docs/check_site.py"))


def page(title, body="", description="What it is."):
    """A page as Sphinx would write it."""
    meta = f'<meta name="description" content="{description}">' if description else ""
    return (
        f"<!doctype html><head>{meta}<title>{title}</title></head><body>{body}</body>"
    )


def faults(folder, pages):
    """What the check says of these pages, each with the name of its file."""
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [
        f"{path.name}: {said}"
        for path, said in CHECK["faults_in_files"](CHECK["read"](folder))
    ]


def test_a_sound_site_has_no_faults(tmp_path):
    body = """<h1 id="top">Here</h1> <a href="#top">up</a> <a href="more/b.html#a%20name">there</a>
    <a href="https://far.example/#x">not followed</a> <img src="data:image/png;base64,AA==">"""
    other = (
        '<a name="a name"></a><a href="../a.html">back</a><svg><title>A</title></svg>'
    )
    site = {"a.html": page("A", body), "more/b.html": page("B", other)}
    assert faults(tmp_path, site) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (page("A", '<a href="gone.html">x</a>'), "a.html: a dead link: gone.html"),
        (page("A", '<img src="gone.png">'), "a.html: a dead link: gone.png"),
        (page("A", '<a href="#gone">x</a>'), "a.html: a dead anchor: #gone"),
        (
            page("A", '<a href="b.html#gone">x</a>'),
            "a.html: a dead anchor: b.html#gone",
        ),
        (page("A", description=""), "a.html: no description"),
        (page(""), "a.html: no title"),
        (
            page("A", '<script src="https://far.example/x.js"></script>'),
            "a.html: loads https://far.example/x.js from the network",
        ),
    ],
)
def test_a_fault_is_named_with_its_page(tmp_path, text, fault):
    assert faults(tmp_path, {"a.html": text, "b.html": page("B")}) == [fault]


def test_a_folder_without_pages_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"python docs/build\.py"):
        CHECK["main"](tmp_path)
