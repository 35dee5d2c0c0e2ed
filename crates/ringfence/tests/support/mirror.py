"""Package mirrors for the tests of egress policies: one for each port, behind one address.

mirror.py prepare HOST           writes projects and repositories below this directory, and a gem where `ruby` is installed
mirror.py serve ADDRESS HOST     serves them, each at a second port, too, that is 100 higher;
                                 prints a line for each request: nanoseconds, port, host, path
mirror.py registries ADDRESS     serves them by HTTP and HTTPS in the place of the registries of presets; the certificate is cert.pem
"""

import hashlib
import http.server
import io
import json
import os
import shutil
import ssl
import subprocess
import sys
import tarfile
import threading
import time
import zipfile

PORTS = dict(curl=8101, git=8102, pip=8103, npm=8104, cargo=8105, go=8106, apt=8107, mvn=8108, skopeo=8109, requests=8110, gem=8112,
             hf=8113, conda=8114)
# Hosts of presets, and their mirrors.
REGISTRIES = {
    "archive.ubuntu.com": "apt",
    "pypi.org": "pip",
    "files.pythonhosted.org": "pip",
    "registry.npmjs.org": "npm",
    "index.crates.io": "cargo",
    "static.crates.io": "cargo",
    "proxy.golang.org": "go",
    "repo.maven.apache.org": "mvn",
    "registry-1.docker.io": "skopeo",
    "rubygems.org": "gem",
    "index.rubygems.org": "gem",
    "huggingface.co": "hf",
    "cdn-lfs.hf.co": "hf",
    "conda.anaconda.org": "conda",
}
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def archive(files, compression="gz"):
    """Returns a compressed tar archive of files given by name."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=f"w:{compression}") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    return packed.getvalue()


def zipped(files):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as target:
        for name, text in files.items():
            target.writestr(name, text)
    return packed.getvalue()


def digest(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def pages(wheels, packages, crates):
    """Returns the content of each mirror: type, bytes and more headers for each path. Wheels, packages and crates have other URLs."""
    found = {name: {} for name in PORTS}

    def add(name, path, data, kind="application/octet-stream", **headers):
        found[name][path] = (kind, data if isinstance(data, bytes) else data.encode(), headers)

    for name in ("curl", "requests"):
        add(name, "/page", "page\n")
    for folder, _, files in os.walk("repo.git"):
        for file in files:
            path = os.path.join(folder, file)
            with open(path, "rb") as source:
                add("git", "/" + path, source.read())
    wheel = "tiny-1.0-py3-none-any.whl"
    add("pip", "/simple/tiny/", f'<a href="{wheels}{wheel}">{wheel}</a>', "text/html")
    add("pip", f"/simple/tiny/{wheel}", zipped({
        "tiny.py": "x = 1\n",
        "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "tiny-1.0.dist-info/RECORD": "",
    }))
    package = archive({"package/package.json": '{"name": "tiny", "version": "1.0.0"}'})
    version = {
        "name": "tiny",
        "version": "1.0.0",
        "dist": {
            "tarball": f"{packages}/tiny-1.0.0.tgz",
            "shasum": hashlib.sha1(package).hexdigest(),
        },
    }
    add("npm", "/tiny", json.dumps(
        {"name": "tiny", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    ), "application/json")
    add("npm", "/tiny-1.0.0.tgz", package)
    crate = archive({
        "tiny-1.0.0/Cargo.toml": '[package]\nname = "tiny"\nversion = "1.0.0"\nedition = "2021"\n',
        "tiny-1.0.0/src/lib.rs": "",
    })
    add("cargo", "/config.json", json.dumps({"dl": f"{crates}/dl"}))
    add("cargo", "/ti/ny/tiny", json.dumps({
        "name": "tiny", "vers": "1.0.0", "deps": [], "features": {}, "yanked": False,
        "cksum": hashlib.sha256(crate).hexdigest(),
    }) + "\n")
    add("cargo", "/dl/tiny/1.0.0/download", crate)
    module, at = "tiny.test/tiny", "/tiny.test/tiny/@v/v1.0.0"
    add("go", at + ".info", '{"Version": "v1.0.0", "Time": "2026-01-01T00:00:00Z"}')
    add("go", at + ".mod", f"module {module}\n")
    add("go", at + ".zip", zipped({
        f"{module}@v1.0.0/go.mod": f"module {module}\n", f"{module}@v1.0.0/tiny.go": "package tiny\n",
    }))
    if os.path.exists("tiny.deb"):
        with open("tiny.deb", "rb") as source:
            package = source.read()
        with open("package/DEBIAN/control") as source:
            control = source.read()
        listed = f"{control}Filename: tiny.deb\nSize: {len(package)}\nSHA256: {digest(package)[7:]}\n"
        add("apt", "/apt/Packages", listed)
        add("apt", "/apt/tiny.deb", package)
    add("mvn", "/test/parent/1.0/parent-1.0.pom", pom("parent", ""))
    layer, config = archive({"file": "content"}), b"{}"
    manifest = json.dumps({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest(config), "size": len(config)},
        "layers": [{
            "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": digest(layer), "size": len(layer),
        }],
    })
    add("skopeo", "/v2/", "{}", "application/json")
    add("skopeo", "/v2/tiny/manifests/1", manifest, MANIFEST)
    add("skopeo", f"/v2/tiny/blobs/{digest(layer)}", layer)
    add("skopeo", f"/v2/tiny/blobs/{digest(config)}", config)
    if os.path.exists("gem"):
        with open("gem/tiny-1.0.gem", "rb") as gem, open("gem/tiny-1.0.gemspec.rz", "rb") as specification:
            package, described = gem.read(), specification.read()
        add("gem", "/", "index")
        add("gem", "/info/tiny", f"---\n1.0 |checksum:{digest(package)[7:]}\n", "text/plain")
        add("gem", "/quick/Marshal.4.8/tiny-1.0.gemspec.rz", described)
        add("gem", "/gems/tiny-1.0.gem", package)
    # The Hub answers for a large file by the address of its store.
    model = b"weights"
    add("hf", "/test/tiny/resolve/main/model.bin", "", **{
        "Location": "https://cdn-lfs.hf.co/model.bin",
        "X-Repo-Commit": "0123456789" * 4,
        "X-Linked-Etag": f'"{digest(model)[7:]}"',
        "X-Linked-Size": str(len(model)),
    })
    add("hf", "/model.bin", model, ETag=f'"{digest(model)[7:]}"')
    index = {"name": "tiny", "version": "1.0", "build": "0", "build_number": 0, "depends": [], "subdir": "noarch",
             "noarch": "generic"}
    content = "x"
    paths = {"paths_version": 1, "paths": [{"_path": "share/tiny", "path_type": "hardlink",
                                            "sha256": digest(content.encode())[7:], "size_in_bytes": len(content)}]}
    package = archive({"info/index.json": json.dumps(index), "info/paths.json": json.dumps(paths),
                       "info/files": "share/tiny\n", "share/tiny": content}, "bz2")
    entry = {**index, "sha256": digest(package)[7:], "size": len(package)}
    add("conda", "/conda-forge/noarch/repodata.json", json.dumps(
        {"info": {"subdir": "noarch"}, "packages": {"tiny-1.0-0.tar.bz2": entry}, "packages.conda": {}, "repodata_version": 1}
    ), "application/json")
    add("conda", "/conda-forge/noarch/tiny-1.0-0.tar.bz2", package)
    return found


def pom(name, more):
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        f"<groupId>test</groupId><artifactId>{name}</artifactId><version>1.0</version>"
        f"<packaging>pom</packaging>{more}</project>"
    )


def write(path, text):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w") as target:
        target.write(text)


def prepare(host):
    """Writes what the clients start from."""
    write("rust/Cargo.toml", '[package]\nname = "user"\nversion = "1.0.0"\nedition = "2021"\n[dependencies]\ntiny = "1"\n')
    write("rust/src/lib.rs", "")
    write("module/go.mod", "module user.test\n\ngo 1.18\n\nrequire tiny.test/tiny v1.0.0\n")
    write("settings.xml", "<settings><mirrors><mirror><id>maven-default-http-blocker</id><mirrorOf>none</mirrorOf>"
          "<url>http://127.0.0.1/</url></mirror></mirrors></settings>")
    write("policy.json", '{"default": [{"type": "insecureAcceptAnything"}]}')
    write("package/DEBIAN/control",
          "Package: tiny\nVersion: 1.0\nArchitecture: all\nMaintainer: x <x@a.test>\nDescription: tiny\n")
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", "package", "tiny.deb"], check=True,
                   stdout=subprocess.DEVNULL)
    if shutil.which("ruby"):
        # A gem, and its description as the index has it. gem would take a file of the current directory.
        script = ("require 'rubygems/package'; Dir.mkdir('gem'); Dir.chdir('gem'); s = Gem::Specification.new { |s| s.name = 'tiny'; s.version = '1.0'; "
                  "s.summary = 'x'; s.authors = ['x']; s.files = [] }; Gem::Package.build(s, true); "
                  "File.binwrite('tiny-1.0.gemspec.rz', Gem.deflate(Marshal.dump(s)))")
        subprocess.run(["ruby", "-e", script], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    script = ("git init -q --bare repo.git; git init -q work; cd work; "
              "git -c user.name=x -c user.email=x@a.test commit -q --allow-empty -m first; "
              "git push -q ../repo.git HEAD:refs/heads/main; git -C ../repo.git update-server-info")
    subprocess.run(["sh", "-ec", script], check=True)


class Mirror(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        port = self.server.server_address[1]
        path = self.page()
        print(time.time_ns(), port, self.headers["Host"], path, flush=True)
        kind, data, headers = self.mirror().get(path, (None, b"", {}))
        self.send_response(404 if kind is None else 302 if "Location" in headers else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind or "text/plain")
        self.send_header("Content-Length", str(len(data)))
        if kind == MANIFEST:
            self.send_header("Docker-Content-Digest", digest(data))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def page(self):
        return self.path.split("?")[0].replace("/./", "/")

    def mirror(self):
        return self.server.pages

    def log_message(self, *_):
        pass


class Registry(Mirror):
    def page(self):
        return super().page().replace("/maven2/", "/").replace("/v2/library/", "/v2/")

    def mirror(self):
        return self.server.pages[REGISTRIES[self.headers["Host"].split(":")[0]]]


def serve(address, host):
    for name, content in pages("", f"http://{host}:{PORTS['npm']}", f"http://{host}:{PORTS['cargo']}").items():
        for port in PORTS[name], PORTS[name] + 100:
            server = http.server.ThreadingHTTPServer((address, port), Mirror)
            server.pages = content
            threading.Thread(target=server.serve_forever).start()
    print("listening", flush=True)


def serve_registries(address):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain("cert.pem", "key.pem")
    for port in 80, 443:
        server = http.server.ThreadingHTTPServer((address, port), Registry)
        server.pages = pages("https://files.pythonhosted.org/simple/tiny/", "https://registry.npmjs.org", "https://static.crates.io")
        if port == 443:
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever).start()
    print("listening", flush=True)


if sys.argv[1] == "prepare":
    prepare(sys.argv[2])
elif sys.argv[1] == "registries":
    serve_registries(sys.argv[2])
else:
    serve(sys.argv[2], sys.argv[3])
