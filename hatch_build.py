"""The README as the package index shows it, where a relative link would lead nowhere."""

import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

# Code, which stays as it is, or a link or a picture with a relative target.
LINK = re.compile(
    r"```.*?```|`[^`\n]*`"
    r"|(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<target>[^)\s]+)\)",
    re.DOTALL,
)


class Readme(MetadataHookInterface):
    """Makes the README's links lead to the repository, at the tag of this version."""

    def update(self, metadata):
        """Sets `readme`; without an address in `[project.urls]` only the links' words are left."""
        repository = metadata.get("urls", {}).get("Repository")

        def absolute(link):
            if link["target"] is None:
                return link[0]
            if not repository:
                return "" if link["picture"] else link["text"]
            kind = "raw" if link["picture"] else "blob"
            address = f"{repository}/{kind}/v{metadata['version']}/{link['target']}"
            return f"{link['picture']}[{link['text']}]({address})"

        text = LINK.sub(absolute, (pathlib.Path(self.root) / "README.md").read_text())
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
