"""Whether the Hugging Face hub can be reached, asked once instead of retried for half a minute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_TIMEOUT_S = 5.0


def hub_problem() -> str | None:
    """Why the hub cannot be reached, through proxies where they are set; None: it answers."""
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT_S)
    except Exception as error:  # of whichever HTTP package huggingface_hub uses
        return f"the hub {constants.ENDPOINT} cannot be reached ({type(error).__name__})"
    return None


@contextmanager
def cache_only() -> Iterator[None]:
    """As if HF_HUB_OFFLINE were set: what has been downloaded before is used, and nothing is retried."""
    import datasets.config
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
