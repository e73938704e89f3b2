"""A double of the Hub on 127.0.0.1, in memory, for the real clients of repo_type="kernel".

Requests and answers are those that huggingface_hub 2.4.0 and kernels 0.17.2 exchange with the Hub,
as read in their source. Faults can be laid: a status, a connection cut, an answer lost.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_write"
CUT, LOST = "cut", "lost"  # faults: half of the answer or request; done, but the answer is lost


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Repo:
    """Branches of commits, each {path: content} whole."""

    def __init__(self):
        self.commits, self.branches, self.pull_requests = {}, {}, []
        self.branches["main"] = self.commit({".gitattributes": b""}, None)

    def commit(self, files, parent):
        text = json.dumps([parent, len(self.commits), {p: blob_id(d) for p, d in files.items()}])
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha] = dict(files)
        return sha

    def resolve(self, revision):
        sha = self.branches.get(revision.removeprefix("refs/heads/"), revision)
        return sha if sha in self.commits else None

    def files(self, revision):
        return self.commits[self.resolve(revision)]


class Refusal(Exception):
    def __init__(self, status, message="", code=None):
        self.status, self.message, self.code = status, message, code


class Hub:
    """The store, the faults and the server. `log` holds (method, path) of every request."""

    def __init__(self):
        self.repos, self.log, self.faults = {}, [], []
        self.organisations = {"org": True, "untrusted": False}  # trusted publisher?
        self.may_write = {"org", "untrusted"}
        self.lock = threading.Lock()
        handler = type("BoundHandler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        serve = self.server.serve_forever
        threading.Thread(target=serve, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def fault(self, method, path, what, after=0, times=1):
        """The requests `method` on paths that match get a status, CUT or LOST, `after` some."""
        self.faults.append([method, re.compile(path), what, after, times])

    def fault_for(self, method, path):
        for fault in self.faults:
            if fault[0] == method and fault[1].search(path):
                if fault[3] > 0:
                    fault[3] -= 1
                elif fault[4] > 0:
                    fault[4] -= 1
                    return fault[2]
        return None

    def writes(self):
        return [entry for entry in self.log if entry[0] in ("POST", "DELETE")]


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body of an answer are two writes

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.serve()

    do_HEAD = do_POST = do_DELETE = do_GET

    def serve(self):
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            self.hub.log.append((self.command, path))
            fault = self.hub.fault_for(self.command, path)
            length = int(self.headers.get("Content-Length") or 0)
            if fault == CUT and self.command == "POST":
                self.rfile.read(length // 2)
                return self.cut()
            body = self.rfile.read(length)
            try:
                if isinstance(fault, int):
                    raise Refusal(fault, "the double was told to")
                status, headers, content = self.answer(path, body)
            except Refusal as refusal:
                status, headers = refusal.status, {"X-Error-Message": refusal.message}
                if refusal.code:
                    headers["X-Error-Code"] = refusal.code
                if status == 429:
                    headers["Retry-After"] = "0"
                content = json.dumps({"error": refusal.message, "url": self.hub.url}).encode()
        if fault == LOST:
            return self.cut()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            if fault == CUT:
                self.wfile.write(content[: len(content) // 2])
                return self.cut()
            self.wfile.write(content)

    def cut(self):
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def answer(self, path, body):
        """(status, headers, content); Refusal for the rest."""
        query = parse_qs(urlsplit(self.path).query)
        for method, pattern, serve in ROUTES:
            match = re.fullmatch(pattern, urlsplit(self.path).path)
            if match and self.command in method.split():
                names = [group and unquote(group) for group in match.groups()]
                result = serve(self, *names, body=body, query=query)
                if isinstance(result, tuple):
                    return result
                return 200, {"Content-Type": "application/json"}, json.dumps(result).encode()
        raise Refusal(404, f"no route for {self.command} {path}")

    def authorised(self, organisation=None):
        """Refuses a request without a valid token, or without write access to the organisation."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token != TOKEN:
            raise Refusal(401, "Invalid credentials in Authorization header")
        if organisation is not None and organisation not in self.hub.may_write:
            raise Refusal(403, "You don't have the rights")

    def repo(self, repo_id, revision=None):
        if repo_id not in self.hub.repos:
            raise Refusal(404, "Repository not found", "RepoNotFound")
        repo = self.hub.repos[repo_id]
        if revision is not None and repo.resolve(revision) is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repo

    # who and what

    def whoami(self, body, query):
        self.authorised()
        return {"type": "user", "name": "maintainer", "orgs": []}

    def overview(self, organisation, body, query):
        if organisation not in self.hub.organisations:
            raise Refusal(404, "no such organisation")
        trusted = self.hub.organisations[organisation]
        return {"name": organisation, "fullname": organisation, "trustedKernelPublisher": trusted}

    def create_repo(self, body, query):
        asked = json.loads(body)
        organisation = asked["organization"] or "maintainer"
        self.authorised(organisation)
        repo_id = f"{organisation}/{asked['name']}"
        url = f"{self.hub.url}/kernels/{repo_id}"
        if asked["type"] != "kernel" or repo_id in self.hub.repos:
            content = json.dumps({"url": url, "error": "You already created this"}).encode()
            return 409, {}, content
        self.hub.repos[repo_id] = Repo()
        return {"url": url}

    def validate_yaml(self, body, query):
        good = json.loads(body)["content"].startswith("---\n")
        errors = [] if good else [{"message": "no metadata"}]
        return 200 if good else 400, {}, json.dumps({"errors": errors, "warnings": []}).encode()

    # reading

    def info(self, repo_id, revision, body, query):
        repo = self.repo(repo_id, revision or "main")
        sha = repo.resolve(revision or "main")
        siblings = [{"rfilename": path} for path in repo.files(sha)]
        return {"id": repo_id, "sha": sha, "siblings": siblings, "private": False, "tags": []}

    def refs(self, repo_id, body, query):
        branches = self.repo(repo_id).branches.items()
        return {
            "branches": [
                {"name": n, "ref": f"refs/heads/{n}", "targetCommit": sha} for n, sha in branches
            ],
            "tags": [], "converts": [],
        }  # fmt: skip

    def tree(self, repo_id, revision, folder, body, query):
        files = self.repo(repo_id, revision).files(revision)
        folder = (folder or "").strip("/")
        prefix = folder + "/" if folder else ""
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        found = {}
        for path, data in files.items():
            if not path.startswith(prefix):
                continue
            parts = path[len(prefix) :].split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                name = prefix + "/".join(parts[:depth])
                found[name] = {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
            if recursive or len(parts) == 1:
                found[path] = {
                    "type": "file", "path": path, "oid": blob_id(data), "size": len(data),
                }  # fmt: skip
        if folder and not found:
            raise Refusal(404, f"{folder} does not exist", "EntryNotFound")
        return sorted(found.values(), key=lambda entry: entry["path"])

    def resolve(self, repo_id, revision, path, body, query):
        repo = self.repo(repo_id, revision)
        sha = repo.resolve(revision)
        data = repo.files(sha).get(path)
        if data is None:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        return 200, {"ETag": f'"{blob_id(data)}"', "X-Repo-Commit": sha}, data

    # writing

    def branch(self, repo_id, name, body, query):
        self.authorised(repo_id.split("/")[0])
        repo = self.repo(repo_id)
        if self.command == "DELETE":
            if name not in repo.branches:
                raise Refusal(404, "no such branch", "RevisionNotFound")
            del repo.branches[name]
            return {}
        if name in repo.branches:
            raise Refusal(409, "Reference already exists")
        start = json.loads(body or b"{}").get("startingPoint", "main")
        if repo.resolve(start) is None:
            raise Refusal(404, "no such starting point", "RevisionNotFound")
        repo.branches[name] = repo.resolve(start)
        return {}

    def preupload(self, repo_id, revision, body, query):
        self.authorised(repo_id.split("/")[0])
        files = self.repo(repo_id, revision).files(revision)
        answer = []
        for file in json.loads(body)["files"]:
            known = files.get(file["path"])
            oid = {"oid": blob_id(known)} if known is not None else {}
            answer.append(
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, **oid}
            )
        return {"files": answer}

    def commit(self, repo_id, revision, body, query):
        proposed = "create_pr" in query
        self.authorised(None if proposed else repo_id.split("/")[0])
        repo = self.repo(repo_id, revision)
        files, head = dict(repo.files(revision)), repo.resolve(revision)
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header" and value.get("parentCommit", head) != head:
                raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            if entry["key"] == "deletedFile":
                del files[value["path"]]
        sha = repo.commit(files, head)
        answer = {"commitUrl": f"{self.hub.url}/kernels/{repo_id}/commit/{sha}", "commitOid": sha}
        if proposed:
            repo.pull_requests.append((revision, sha))
            number = len(repo.pull_requests)
            url = f"{self.hub.url}/kernels/{repo_id}/discussions/{number}"
            return {**answer, "pullRequestUrl": url}
        repo.branches[revision] = sha
        return answer


REPO = r"/api/kernels/([^/]+/[^/]+)"
ROUTES = [
    ("GET", r"/api/whoami-v2", Handler.whoami),
    ("GET", r"/api/organizations/([^/]+)/overview", Handler.overview),
    ("POST", r"/api/repos/create", Handler.create_repo),
    ("POST", r"/api/validate-yaml", Handler.validate_yaml),
    ("GET", REPO + r"(?:/revision/(.+))?", Handler.info),
    ("GET", REPO + r"/refs", Handler.refs),
    ("GET", REPO + r"/tree/([^/]+)(/.*)?", Handler.tree),
    ("POST DELETE", REPO + r"/branch/(.+)", Handler.branch),
    ("POST", REPO + r"/preupload/(.+)", Handler.preupload),
    ("POST", REPO + r"/commit/(.+)", Handler.commit),
    ("GET HEAD", r"/kernels/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", Handler.resolve),
]
