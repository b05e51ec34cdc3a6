"""Looks at the built site, docs/_build/html, and says what is wrong with its pages.

What the files themselves show is always checked: a link or an anchor that leads nowhere, two pages
of one title, a page without a description, a picture or a script that comes from the network.
Where Chrome or Chromium and its chromedriver are installed, each page is also opened, on a screen
as wide as a phone's and on one as wide as a desktop's: an error in the console, a request to the
network, a page that scrolls sideways, a name in code that is broken in two. Links to other sites
are not followed.

    python docs/build.py -q && python docs/check_site.py

The browser is driven by Selenium, which the extra `dev` installs. In Debian the two programs are
installed by `apt-get install chromium chromium-driver`.
"""

import collections
import html.parser
import itertools
import json
import pathlib
import shutil
import sys
import tempfile
import urllib.parse
from collections.abc import Iterator

SITE = pathlib.Path(__file__).parent / "_build/html"
WIDTHS = (390, 1280)  # pixels: a phone's and a desktop's
SCHEMES = ("light", "dark")
LOADS = {
    "img": "src",
    "script": "src",
    "link": "href",
    "iframe": "src",
    "source": "src",
}


class Page(html.parser.HTMLParser):
    """What a page is called, what it links to and loads, and what in it can be linked to."""

    def __init__(self, path: pathlib.Path):
        super().__init__()
        self.title = self.description = ""
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self._tag = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
        """Keeps what a tag says."""
        self._tag = tag
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if LOADS.get(tag) in given and given.get("rel") != "canonical":
            self.loads.append(given[LOADS[tag]])
        if tag == "meta" and given.get("name") == "description":
            self.description = given.get("content", "")

    def handle_data(self, data: str):
        """Keeps the title, which comes before any picture that has one."""
        if self._tag == "title" and not self.title:
            self.title = data.strip()


def read(site: pathlib.Path) -> dict[pathlib.Path, Page]:
    """The pages of a site; what lies in `_static` are parts of the theme."""
    paths = sorted(site.resolve().rglob("*.html"))
    return {path: Page(path) for path in paths if "_static" not in path.parts}


def faults_in_files(
    pages: dict[pathlib.Path, Page],
) -> Iterator[tuple[pathlib.Path, str]]:
    """What is wrong with the pages as they are written: each page with a sentence about it."""
    titles = collections.Counter(page.title for page in pages.values())
    for path, page in pages.items():
        if not page.title:
            yield path, "no title"
        elif titles[page.title] > 1:
            yield path, f"the title {page.title!r} is another page's too"
        if not page.description:
            yield path, "no description"
        for address in page.links + page.loads:
            to = urllib.parse.urlsplit(address)
            if to.scheme or to.netloc:
                if address in page.loads and to.scheme != "data":
                    yield path, f"loads {address} from the network"
                continue
            target = (
                (path.parent / urllib.parse.unquote(to.path)).resolve()
                if to.path
                else path
            )
            if not target.is_file():
                yield path, f"a dead link: {address}"
            elif target in pages and to.fragment:
                anchor = urllib.parse.unquote(to.fragment)
                if anchor not in pages[target].anchors:
                    yield path, f"a dead anchor: {address}"


# What sticks out of the window and is in nothing that scrolls by itself.
TOO_WIDE = """
const scrolls = e => getComputedStyle(e).overflowX != "visible";
const fixed = e => getComputedStyle(e).position == "fixed";
const apart = e => e && (scrolls(e) || fixed(e) || apart(e.parentElement));
const right = e => {
  const box = e.getBoundingClientRect();
  return scrolls(e) ? box.right : Math.max(box.right, box.left + e.scrollWidth);
};
const wide = [...document.querySelectorAll("body *")].filter(
  e => right(e) > arguments[0] + 1 && !fixed(e) && !apart(e.parentElement));
const innermost = wide.filter(e => !wide.some(other => other != e && e.contains(other)));
return innermost.slice(0, 3).map(
  e => `<${e.tagName.toLowerCase()}> ${e.textContent.trim().replace(/\\s+/g, " ").slice(0, 60)}`);
"""

# The names in code that are on two lines.
BROKEN = """
const words = [];
for (const code of document.querySelectorAll("code, .sig")) {
  const texts = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    for (const word of text.data.matchAll(/\\w+/g)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const tops = [...range.getClientRects()].map(r => Math.round(r.top));
      if (new Set(tops).size > 1) words.push(word[0]);
    }
  }
}
return words;
"""


def browser(profile: str):
    """A Chrome without a window; None where there is none."""
    chromes = map(shutil.which, ("google-chrome", "chromium"))
    chrome, driver = next(filter(None, chromes), None), shutil.which("chromedriver")
    if not chrome or not driver:
        return None
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chrome
    for argument in (
        "headless",
        "no-sandbox",  # which a container does not let it have
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        "hide-scrollbars",
        f"user-data-dir={profile}",
    ):
        options.add_argument(f"--{argument}")
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    return webdriver.Chrome(options, webdriver.ChromeService(driver))


# Which scheme the page's background belongs to
SCHEME = """
const [r, g, b] = getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).map(Number);
return r + g + b > 384 ? "light" : "dark";
"""


def faults_in_browser(chrome, path: pathlib.Path) -> Iterator[str]:
    """What is wrong with a page as a browser shows it."""
    for width, scheme in itertools.product(WIDTHS, SCHEMES):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        screen = {
            "width": width,
            "height": 900,
            "deviceScaleFactor": 1,
            "mobile": False,
        }
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        chrome.get(path.as_uri())
        for entry in chrome.get_log("browser"):
            if entry["level"] == "SEVERE":
                yield f"at {width} px, an error in the console: {entry['message']}"
        for entry in chrome.get_log("performance"):
            event = json.loads(entry["message"])["message"]
            if event["method"] == "Network.requestWillBeSent":
                address = event["params"]["request"]["url"]
                if urllib.parse.urlsplit(address).scheme in (
                    "http",
                    "https",
                    "ws",
                    "wss",
                ):
                    yield f"at {width} px, a request to the network: {address}"
        if chrome.execute_script(SCHEME) != scheme:
            yield f"at {width} px, it is not {scheme}"
        if chrome.execute_script("return document.documentElement.scrollWidth") > width:
            wide = ", ".join(chrome.execute_script(TOO_WIDE, width))
            yield f"at {width} px, the page scrolls sideways, because of {wide}"
        if words := chrome.execute_script(BROKEN):
            yield f"at {width} px, names broken in two: {', '.join(words)}"


def main(site: pathlib.Path) -> bool:
    """Prints what is wrong with the site; whether anything is."""
    pages = read(site)
    if not pages:
        sys.exit(f"{site} has no pages; build it first: python docs/build.py")
    faults = list(faults_in_files(pages))
    with tempfile.TemporaryDirectory() as profile:
        chrome = browser(profile)
        if chrome is None:
            looked = "but NOT IN A BROWSER: here is no Chrome or Chromium with its chromedriver"
        else:
            widths = " and ".join(map(str, WIDTHS))
            looked = f"also in a browser, {widths} px wide, {' and '.join(SCHEMES)}"
            with chrome:
                faults += [
                    (path, said)
                    for path in pages
                    for said in faults_in_browser(chrome, path)
                ]
    for path, fault in sorted(faults):
        print(f"{path.relative_to(site.resolve())}: {fault}")
    print(f"{len(pages)} pages looked at, {looked}: {len(faults) or 'no'} faults.")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]) if sys.argv[1:] else SITE))
