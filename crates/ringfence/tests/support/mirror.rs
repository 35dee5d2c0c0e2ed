//! Clients of package registries and servers, and their mirrors (`mirror.py`).

use super::Running;
use super::egress::LONG;
use super::needs::{Need, skip_what_is_not_installed};
use super::world::{FAR_V4, World};

/// Client of a mirror of `mirror.py`.
pub struct Client {
    pub name: &'static str,
    need: Need,
    pub port: u16,
    /// Command without retries of its own, with `{host}` and `{port}` for the mirror and `{at}` for a directory of its own.
    command: &'static str,
}

impl Client {
    /// Returns the command for a mirror at `host`. It still has `{at}` for its directory.
    pub fn command_for(&self, host: &str, port: u16) -> String {
        self.command.replace("{host}", host).replace("{port}", &port.to_string())
    }
}

const CLIENTS: [Client; 11] = [
    Client {
        name: "curl",
        need: Need::Program("curl", "curl"),
        port: 8101,
        command: "curl -sSf --max-time 60 http://{host}:{port}/page",
    },
    Client {
        name: "git",
        need: Need::Program("git", "git"),
        port: 8102,
        command: "git clone -q -b main http://{host}:{port}/repo.git {at}/clone",
    },
    Client {
        name: "pip",
        need: Need::Program("pip", "python3-pip"),
        port: 8103,
        command: "env -u PIP_FIND_LINKS -u PIP_CERT PIP_CONFIG_FILE=/dev/null pip download -q --retries 0 \
                  --no-cache-dir --no-deps --disable-pip-version-check --index-url http://{host}:{port}/simple \
                  --trusted-host {host} -d {at} tiny",
    },
    Client {
        name: "npm",
        need: Need::Program("npm", "npm"),
        port: 8104,
        command: "npm install --no-audit --no-fund --no-update-notifier --fetch-retries 0 --prefix {at} \
                  --cache {at}/cache --registry http://{host}:{port}/ tiny",
    },
    Client {
        name: "cargo",
        need: Need::Program("cargo", "cargo"),
        port: 8105,
        command: "sh -c 'cp -r rust {at} && cd {at}/rust && CARGO_HOME=$PWD/home CARGO_NET_RETRY=0 \
                  exec cargo --config source.m.registry=\\\"sparse+http://{host}:{port}/\\\" \
                  --config source.crates-io.replace-with=\\\"m\\\" fetch'",
    },
    Client {
        name: "go",
        need: Need::Program("go", "golang-go"),
        port: 8106,
        command: "sh -c 'cp -r module {at} && cd {at}/module && GOPATH=$PWD/path GOFLAGS=-modcacherw GOTOOLCHAIN=local \
                  GOSUMDB=off GOPROXY=http://{host}:{port} exec go mod download tiny.test/tiny@v1.0.0'",
    },
    Client {
        name: "apt",
        need: Need::Program("apt-get", "apt"),
        port: 8107,
        command: "sh -c 'mkdir -p {at}/state/lists/partial {at}/cache/archives/partial && \
                  echo \"deb [trusted=yes] http://{host}:{port}/apt ./\" > {at}/list && \
                  exec apt-get -qq -o Dir::State=$PWD/{at}/state -o Dir::Cache=$PWD/{at}/cache \
                  -o Dir::Etc::sourcelist=$PWD/{at}/list -o Dir::Etc::sourceparts=/dev/null -o APT::Sandbox::User=root \
                  -o Acquire::Retries=0 -o APT::Update::Error-Mode=any update'",
    },
    Client {
        name: "mvn",
        need: Need::Program("mvn", "maven"),
        port: 8108,
        command: "sh -c 'sed \"s|MIRROR|http://{host}:{port}|\" child.xml > {at}/pom.xml && \
                  exec mvn -q -B -s settings.xml -Dmaven.repo.local=$PWD/{at}/repository -f {at}/pom.xml validate'",
    },
    Client {
        name: "skopeo",
        need: Need::Program("skopeo", "skopeo"),
        port: 8109,
        command: "skopeo --policy policy.json copy -q --src-tls-verify=false docker://{host}:{port}/tiny:1 dir:{at}/image",
    },
    Client {
        name: "requests",
        need: Need::Program("pip", "python3-pip"),
        port: 8110,
        command: "python3 session.py http://{host}:{port}/page",
    },
    Client {
        name: "node",
        need: Need::Program("node", "nodejs"),
        port: 8111,
        command: "env NODE_EXTRA_CA_CERTS=cert.pem node --no-warnings http2.mjs fetch2 https://{host}:{port}/page",
    },
];

/// Two requests of a session, which keeps its connection.
const SESSION_PY: &str = "
import sys
try:
    import requests
except ImportError:
    from pip._vendor import requests
session = requests.Session()
for _ in range(2):
    assert session.get(sys.argv[1], timeout=60).text == 'page\\n'
";

/// Project whose parent is in the mirror.
const CHILD_XML: &str = "<project xmlns=\"http://maven.apache.org/POM/4.0.0\"><modelVersion>4.0.0</modelVersion>\
    <parent><groupId>test</groupId><artifactId>parent</artifactId><version>1.0</version><relativePath/></parent>\
    <artifactId>child</artifactId><packaging>pom</packaging>\
    <repositories><repository><id>central</id><url>MIRROR</url></repository></repositories></project>";

/// Returns the clients that are installed. Prints the others.
pub fn installed_clients() -> Vec<&'static Client> {
    let is_installed = |client: &&Client| match client.need.missing() {
        None => true,
        Some(reason) => {
            skip_what_is_not_installed(&format!("{}: {reason}", client.name));
            false
        }
    };
    CLIENTS.iter().filter(is_installed).collect()
}

/// Writes what the clients start from, and starts the mirrors outside. Clients know them as `host`.
pub fn start(world: &World, host: &str) -> Running {
    let write = |name: &str, text: &str| std::fs::write(world.file(name), text).unwrap();
    write("mirror.py", include_str!("mirror.py"));
    write("session.py", SESSION_PY);
    write("child.xml", CHILD_XML);
    world.host(&["python3", "mirror.py", "prepare", host]).succeed(LONG);
    let mirror = world.outside(&["python3", "mirror.py", "serve", FAR_V4, host]);
    mirror.wait_for_output("listening");
    mirror
}
