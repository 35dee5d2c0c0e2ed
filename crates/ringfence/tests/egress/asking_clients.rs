//! Approval while a guest runs (`--ask`), with real clients: each waits for the answer, then goes on or fails.

use std::collections::BTreeMap;

use crate::support::egress::{DNSMASQ, LONG, OPENSSL};
use crate::support::needs::{Need, skip_what_is_not_installed};
use crate::support::world::FAR_V4;
use crate::{net, require};

/// Client of a mirror of `mirror.py`.
struct Client {
    name: &'static str,
    need: Need,
    port: u16,
    /// Command without retries of its own, with `{host}` and `{port}` for the mirror and `{at}` for a directory of its own.
    command: &'static str,
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

/// Approves `a.test` at the mirrors' first ports. Denies the second ports, and all other names.
const ANSWER_SH: &str = "#!/bin/sh
case $RINGFENCE_ASK_RULE in a.test:82*) answer=deny ;; a.test:*) answer=run ;; *) answer=deny ;; esac
echo \"$(date +%s%N) $RINGFENCE_ASK_RULE $answer\" >> answers
echo $answer
";

#[test]
#[ignore = "long: each client in turn, three times"]
fn each_client_waits_for_the_answer_and_goes_on_or_fails() {
    require!(OPENSSL, DNSMASQ, Need::Program("git", "git"), Need::Program("dpkg-deb", "dpkg"));
    require!(Need::Program("python3", "python3"));
    let clients: Vec<&Client> = CLIENTS
        .iter()
        .filter(|client| match client.need.missing() {
            None => true,
            Some(reason) => {
                skip_what_is_not_installed(&format!("{}: {reason}", client.name));
                false
            }
        })
        .collect();
    let net = net!();
    let write = |name: &str, text: &str| std::fs::write(net.world.file(name), text).unwrap();
    write("mirror.py", include_str!("../support/mirror.py"));
    write("session.py", SESSION_PY);
    write("http2.mjs", include_str!("../support/http2.mjs"));
    write("child.xml", CHILD_XML);
    write("answer.sh", ANSWER_SH);
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(net.world.file("answer.sh"), executable).unwrap();
    net.world.host(&["python3", "mirror.py", "prepare", "a.test"]).succeed(LONG);
    let mirror = net.world.outside(&["python3", "mirror.py", "serve", FAR_V4, "a.test"]);
    mirror.wait_for_output("listening");
    let has_node = clients.iter().any(|client| client.name == "node");
    let over_http2 =
        has_node.then(|| net.world.outside(&["node", "http2.mjs", "log", FAR_V4, "8111", "8211"]));
    if let Some(server) = &over_http2 {
        server.wait_for_output("listening");
    }
    let mut script = "set +e\n".to_owned();
    for Client { name, port, command, .. } in &clients {
        for (kind, host, port) in [
            ("allowed", "a.test".to_owned(), *port),
            ("name", format!("{name}.wild.test"), *port),
            ("port", "a.test".to_owned(), *port + 100),
        ] {
            let at = format!("at-{name}-{kind}");
            let command = command.replace("{host}", &host).replace("{at}", &at);
            let command = command.replace("{port}", &port.to_string());
            script += &format!(
                "mkdir {at}; {command} >said 2>&1; status=$?\n\
                 echo \"{name} {kind} $status $(date +%s%N) $(tail -n 1 said)\"\n"
            );
        }
    }
    let output =
        net.world.lone_guest("--name asks --ask exec:./answer.sh", &script).finish(4 * LONG);
    let answers = net.world.lab.read("answers");
    let of_node = over_http2.as_ref().map_or(String::new(), |server| server.stdout.text());
    let asked = mirror.stdout.text() + &of_node;
    let shown = format!("{}{}{answers}{asked}", output.stdout, output.stderr);
    let answered: BTreeMap<&str, u64> = answers
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>())
        .map(|words| (words[1], words[0].parse().unwrap()))
        .collect();
    let requests: Vec<Vec<String>> = asked
        .lines()
        .filter(|line| *line != "listening")
        .map(|line| line.split(' ').map(str::to_owned).collect())
        .collect();
    // Neither a denied name nor a denied port had a request.
    assert!(requests.iter().all(|words| !words[2].contains("wild")), "{shown}");
    assert!(requests.iter().all(|words| words[1].starts_with("81")), "{shown}");
    let is_of_node = |words: &&Vec<String>| words[1] == "8111";
    let versions = requests.iter().filter(is_of_node).map(|words| words[4].as_str());
    assert_eq!(versions.collect::<Vec<_>>(), ["2.0"; 1][..usize::from(has_node)], "{shown}");
    let lines: Vec<Vec<&str>> =
        output.stdout.lines().map(|line| line.splitn(5, ' ').collect()).collect();
    assert_eq!(lines.len(), 3 * clients.len(), "{shown}");
    let ms = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e6;
    for (client, lines) in clients.iter().zip(lines.chunks(3)) {
        let Client { name, port, .. } = client;
        for line in lines {
            let (kind, status) = (line[1], line[2]);
            let rule = match kind {
                "allowed" => format!("a.test:{port}"),
                "name" => format!("{name}.wild.test:443"),
                _ => format!("a.test:{}", port + 100),
            };
            let asked = answered.get(rule.as_str());
            let asked = *asked.unwrap_or_else(|| panic!("{rule} was not asked for: {shown}"));
            assert_eq!(status == "0", kind == "allowed", "{line:?}: {shown}");
            let ended: u64 = line[3].parse().unwrap();
            assert!(ended > asked, "{line:?}: {shown}");
            if kind == "allowed" {
                let port = port.to_string();
                let first = requests.iter().find(|words| words[1] == port);
                let first: u64 = first.unwrap()[0].parse().unwrap();
                assert!(first > asked, "{name} did not wait for the answer: {shown}");
                println!("{name}: request {:.1} ms after the approval", ms(asked, first));
            } else {
                println!(
                    "{name}: end {:.1} ms after the denied {kind}: {:?}",
                    ms(asked, ended),
                    line.get(4)
                );
            }
        }
    }
    drop((mirror.end(), over_http2.map(crate::support::Running::end)));
    net.end();
}
