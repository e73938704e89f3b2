"""One clear line for what the Hub cannot be asked, and for what it, a network or a disk answers."""

import errno
from urllib.parse import urlsplit

from huggingface_hub import get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


def repo_id_problems(repo_id):
    try:
        validate_repo_id(repo_id)
        if repo_id.count("/") == 1:
            return []
    except HFValidationError:
        pass
    rule = "organisation/name, of letters, digits, '-', '_' and '.'"
    return [f"--repo-id must be {rule}, got {repo_id!r}"]


def endpoint_problems(endpoint):
    """Nothing of the address is shown: it may hold a password."""
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        return ["HF_ENDPOINT must be an address such as https://huggingface.co"]
    if parts.username is not None or parts.password is not None:
        return [
            "HF_ENDPOINT must hold no user and no password: they would be sent in the token's place"
        ]
    return []


def token_problems(token):
    """token: HfApi's; None stands for the one of HF_TOKEN or `hf auth login`, False for none."""
    try:
        token = get_token() if token is None else token
        usable = not token or (token.isascii() and token.isprintable() and " " not in token)
    except ValueError:  # the file that holds it is no text
        usable = False
    return [] if usable else ["the token (HF_TOKEN, or of `hf auth login`) must be ASCII text"]


def problems(repo_id, api):
    """Lists the faults of a repository id, the address of the Hub and the token."""
    return [
        *repo_id_problems(repo_id),
        *endpoint_problems(api.endpoint),
        *token_problems(api.token),
    ]


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
