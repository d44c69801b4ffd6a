"""The links of the project's page on an index, made from the one address of its repository when it is built."""

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ProjectUrls(MetadataHookInterface):  # type: ignore[misc, unused-ignore]  # hatchling may be missing
    """Adds `urls` if TORUSGD_URL has the address: `make dist URL=https://...`."""

    def update(self, metadata: dict[str, Any]) -> None:
        url = os.environ.get("TORUSGD_URL", "").rstrip("/")
        metadata["urls"] = (
            {"Source": url, "Documentation": f"{url}/tree/main/docs", "Issues": f"{url}/issues",
             "Changes": f"{url}/blob/main/CHANGELOG.md"}
            if url
            else {}
        )  # fmt: skip
