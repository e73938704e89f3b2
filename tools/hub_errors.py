"""One clear line for whatever the Hub, the network or the disk answers."""

import errno

from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


def status_line(status, repo_id, message):
    organisation = repo_id.split("/")[0]
    if status == 401:
        return f"the Hub refuses the token (401): {LOG_IN}"
    if status == 403:
        return (
            f"this account may not do that in {organisation} (403): ask its owners for write"
            " access, and the Hub for the approval that publishing kernels needs"
        )
    if status == 404:
        return f"the Hub knows no such thing (404): check {repo_id}, and that the token may see it"
    if status in (409, 412):
        return f"somebody else changed {repo_id} meanwhile ({status}): run this again"
    if status == 429:
        return "the Hub has had too many requests (429): wait some minutes and run this again"
    if status in (413, 507):
        return f"the Hub has no room for this ({status}): {message}"
    if status >= 500:
        return f"the Hub failed ({status}): run this again later"
    return f"the Hub refuses this ({status}): {message}"


def line(error, repo_id, endpoint):
    """Why `error` came, in one line; None for an error that is ours to see whole."""
    for cause in (error, error.__cause__, error.__context__):
        found = cause and cause_line(cause, repo_id, endpoint)
        if found:
            return found
    return None


def cause_line(error, repo_id, endpoint):
    if isinstance(error, LocalTokenNotFoundError):
        return f"there is no token: {LOG_IN}"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set: publishing needs the network"
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        message = error.server_message or "it does not say why"
        return status_line(error.response.status_code, repo_id, " ".join(message.split()))
    if type(error).__module__.split(".")[0].startswith("httpx"):  # huggingface_hub's own choice
        if type(error).__name__ in ("ConnectError", "ConnectTimeout", "UnsupportedProtocol"):
            return f"cannot reach the Hub at {endpoint}: no network, or HF_ENDPOINT is wrong"
        return f"the connection to the Hub broke ({type(error).__name__}): run this again"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" ({error.filename})" if error.filename else ""
        return f"the disk is full{where}: make room and run this again"
    if isinstance(error, ValueError) and "README.md" in str(error):
        return "the Hub refuses the card: " + " ".join(str(error).split())
    return None
