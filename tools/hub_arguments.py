"""What must be right of a repository id, the address of the Hub and the token before their use."""

from urllib.parse import urlsplit

from huggingface_hub import get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id


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
    return [
        *repo_id_problems(repo_id),
        *endpoint_problems(api.endpoint),
        *token_problems(api.token),
    ]
