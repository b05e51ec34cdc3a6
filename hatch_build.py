"""The README as the package index shows it, where a relative link would lead nowhere."""

import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

# Code, which stays as it is, or the beginning of a link and a relative target.
LINK = re.compile(
    r"```.*?```|`[^`\n]*`"
    r"|(?P<start>\]\(|(?:href|src|srcset)=\")(?!https?://|#)(?P<target>[^)\"\s]+)",
    re.DOTALL,
)
PICTURE = re.compile(r"\.(png|svg|jpe?g|gif)$")


class Readme(MetadataHookInterface):
    """Makes the README's links lead to the repository, at the tag of this version."""

    def update(self, metadata):
        """Sets `readme`; without an address in `[project.urls]` the links stay relative."""
        text = (pathlib.Path(self.root) / "README.md").read_text()
        repository = metadata.get("urls", {}).get("Repository")
        if repository:
            tag = f"v{metadata['version']}"

            def absolute(link):
                if link["target"] is None:
                    return link[0]
                kind = "raw" if PICTURE.search(link["target"]) else "blob"
                return f"{link['start']}{repository}/{kind}/{tag}/{link['target']}"

            text = LINK.sub(absolute, text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
