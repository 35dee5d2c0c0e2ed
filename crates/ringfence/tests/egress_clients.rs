//! Egress policies with clients of several languages and protocols: an allowed name works, and a denied one fails by a
//! refusal that the client reports, not by a time limit.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod support;

use support::egress::{CURL, DNSMASQ, LONG, Net, OPENSSL};
use support::needs::Need;
use support::world::FAR_V4;

const NODE: Need = Need::Program("node", "nodejs");
const GO: Need = Need::Program("go", "golang-go");
const GIT: Need = Need::Program("git", "git");
const SSHD: Need = Need::Program("sshd", "openssh-server");
const PIP: Need = Need::Program("pip", "python3-pip");
const APT: Need = Need::Program("apt-get", "apt");
const DPKG_DEB: Need = Need::Program("dpkg-deb", "dpkg");
const GTLSCLIENT: Need = Need::Program("gtlsclient", "ngtcp2-client");

/// Writes a shared file.
fn write(net: &Net, name: &str, text: &str) {
    std::fs::write(net.world.file(name), text).unwrap();
}

#[test]
fn http2_and_fetch_reach_allowed_name_only() {
    require!(CURL, OPENSSL, DNSMASQ, NODE);
    let net = net!();
    write(&net, "http2.mjs", include_str!("support/http2.mjs"));
    let server = net.world.outside(&["node", "http2.mjs", "serve", FAR_V4, "8443"]);
    server.wait_for_output("listening");
    let script = format!(
        "curl -sS --max-time 20 --http2 --cacert cert.pem -w '%{{http_version}}\\n' https://a.test:8443/; \
         NODE_EXTRA_CA_CERTS=cert.pem node http2.mjs fetch https://a.test:8443/ https://b.test:8443/ \
             http://{FAR_V4}:8081/; \
         set +e; curl -sS --max-time 20 --http2 -k https://b.test:8443/; echo \"b $?\"; \
         curl -sS --max-time 20 --http2 -k --resolve b.test:8443:{FAR_V4} https://b.test:8443/; echo \"shared $?\"; \
         curl -sS --max-time 20 --http2-prior-knowledge http://a.test/; echo \"plain $?\""
    );
    let output = net.guest("--allow a.test:80,8443", &script);
    assert_eq!(output.matches("page\n").count(), 2, "{output}");
    assert!(output.contains("page\n2\n"), "{output}");
    // The stub answers REFUSED, which Node reports as a failure of the name server. The address is refused by a reset.
    let errors: Vec<&str> = output.lines().filter(|line| line.starts_with("error ")).collect();
    assert_eq!(errors.len(), 2, "{output}");
    assert!(["error EAI_AGAIN", "error ENOTFOUND"].contains(&errors[0]), "{output}");
    assert_eq!(errors[1], "error ECONNREFUSED", "{output}");
    for line in ["b 6\n", "shared 35\n"] {
        assert!(output.contains(line), "{line}: {output}");
    }
    // The reset meets curl while it sends or while it receives.
    assert!(["plain 55\n", "plain 56\n"].iter().any(|line| output.contains(line)), "{output}");
    assert!(!server.stdout.text().contains("b.test"), "{}", server.stdout.text());
    drop(server.end());
    net.end();
}

/// The documented limit: nothing reads the streams inside TLS.
#[test]
fn coalesced_http2_request_for_denied_authority_is_not_seen() {
    require!(OPENSSL, DNSMASQ, NODE);
    let net = net!();
    write(&net, "http2.mjs", include_str!("support/http2.mjs"));
    let server = net.world.outside(&["node", "http2.mjs", "serve", FAR_V4, "8443"]);
    server.wait_for_output("listening");
    let output =
        net.guest("--allow a.test:8443", "node http2.mjs coalesce a.test:8443 b.test:8443");
    assert_eq!(output.matches("page\n").count(), 2, "{output}");
    server.wait_for_output("authority b.test:8443");
    drop(server.end());
    net.end();
}

#[test]
fn go_client_reaches_allowed_name_only() {
    require!(GO, OPENSSL, DNSMASQ);
    let net = net!();
    write(&net, "client.go", include_str!("support/client.go"));
    // The resolver of Go itself, beside that of the C library in other tests.
    let build =
        "GOFLAGS= CGO_ENABLED=0 GO111MODULE=off GOTOOLCHAIN=local go build -o client client.go";
    net.world.host(&["sh", "-ec", build]).succeed(4 * LONG);
    let script = format!(
        "./client http://a.test/ https://a.test/ https://b.test/ http://{FAR_V4}:8081/ \
         http://a.test:8080/"
    );
    let output = net.guest("--allow a.test:80,443", &script);
    assert_eq!(output.matches("page\n").count(), 2, "{output}");
    let errors: Vec<&str> = output.lines().filter(|line| line.starts_with("error ")).collect();
    assert_eq!(errors.len(), 3, "{output}");
    assert!(errors[0].contains("lookup b.test") && !errors[0].contains("timeout"), "{output}");
    assert!(errors[1..].iter().all(|line| line.contains("connection refused")), "{output}");
    net.end();
}

#[test]
fn git_over_ssh_reaches_allowed_name_only() {
    require!(GIT, SSHD, OPENSSL, DNSMASQ, Need::Root);
    let net = net!();
    let files = net.world.file("").display().to_string();
    let config = format!(
        "Port 2222\nListenAddress {FAR_V4}\nHostKey {files}/host\nAuthorizedKeysFile {files}/user.pub\n\
         PermitRootLogin yes\nStrictModes no\nUsePAM no\nPidFile none\n"
    );
    write(&net, "sshd.conf", &config);
    let prepare = "ssh-keygen -q -t ed25519 -N '' -f host; ssh-keygen -q -t ed25519 -N '' -f user; \
                   git init -q --bare repo.git; git init -q work; cd work; \
                   git -c user.name=x -c user.email=x@a.test commit -q --allow-empty -m first; \
                   git push -q ../repo.git HEAD:refs/heads/main";
    net.world.host(&["sh", "-ec", prepare]).succeed(LONG);
    // The daemon wants a directory in /run, which is one of its own here.
    let serve = format!(
        "mount -t tmpfs none /run; mkdir /run/sshd; echo started; \
         exec $(command -v sshd || echo /usr/sbin/sshd) -D -e -f {files}/sshd.conf"
    );
    let server = net.world.outside(&["unshare", "--mount", "sh", "-ec", &serve]);
    let wait = "for i in $(seq 200); do ss -Hltn 'sport = :2222' | grep -q . && exit 0; sleep 0.05; done; exit 1";
    net.world.outside(&["sh", "-c", wait]).succeed(LONG);
    let ssh = "export GIT_SSH_COMMAND='ssh -F /dev/null -i user -o StrictHostKeyChecking=no \
               -o UserKnownHostsFile=/dev/null -o BatchMode=yes'";
    let script = format!(
        "{ssh}; git ls-remote ssh://root@a.test:2222{files}/repo.git; set +e; \
         git ls-remote ssh://root@b.test:2222{files}/repo.git 2>&1; echo \"b $?\"; \
         git ls-remote ssh://root@{FAR_V4}:2223{files}/repo.git 2>&1; echo \"port $?\""
    );
    let output = net.guest("--allow a.test:2222/tcp", &script);
    assert!(output.contains("refs/heads/main"), "{output}{}", server.stderr.text());
    assert!(output.contains("b 128\n") && output.contains("port 128\n"), "{output}");
    assert!(output.contains("Could not resolve hostname b.test"), "{output}");
    assert!(output.contains("Connection refused"), "{output}");
    drop(server.end());
    net.end();
}

#[test]
fn pip_and_apt_reach_allowed_mirror_only() {
    require!(PIP, APT, DPKG_DEB, OPENSSL, DNSMASQ);
    let net = net!();
    let prepare = "
        mkdir -p mirror/simple/tiny mirror/apt package/DEBIAN apt/state/lists/partial apt/cache/archives/partial
        python3 - <<END
import zipfile
with zipfile.ZipFile('mirror/simple/tiny/tiny-1.0-py3-none-any.whl', 'w') as wheel:
    wheel.writestr('tiny.py', 'x = 1\\n')
    wheel.writestr('tiny-1.0.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n')
    wheel.writestr('tiny-1.0.dist-info/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
    wheel.writestr('tiny-1.0.dist-info/RECORD', '')
END
        printf 'Package: tiny\\nVersion: 1.0\\nArchitecture: all\\nMaintainer: x <x@a.test>\\nDescription: tiny\\n' \
            > package/DEBIAN/control
        dpkg-deb --build --root-owner-group package mirror/apt/tiny.deb >/dev/null
        (cat package/DEBIAN/control; echo Filename: tiny.deb; echo Size: $(stat -c %s mirror/apt/tiny.deb)
         echo SHA256: $(sha256sum mirror/apt/tiny.deb | cut -d' ' -f1)) > mirror/apt/Packages
        for host in a b; do echo \"deb [trusted=yes] http://$host.test:8081/apt ./\" > $host.list; done";
    net.world.host(&["sh", "-ec", prepare]).succeed(LONG);
    let words = ["python3", "-m", "http.server", "--bind", FAR_V4, "--directory", "mirror", "8081"];
    let server = net.world.outside(&words);
    let wait = "for i in $(seq 200); do ss -Hltn 'sport = :8081' | grep -q . && exit 0; sleep 0.05; done; exit 1";
    net.world.outside(&["sh", "-c", wait]).succeed(LONG);
    let pip = |host: &str| {
        format!(
            "env -u PIP_FIND_LINKS -u PIP_CERT PIP_CONFIG_FILE=/dev/null pip download -q --retries 0 --no-cache-dir \
             --no-deps --index-url http://{host}:8081/simple --trusted-host {host} -d got tiny 2>&1; \
             echo \"pip {host} $?\"; "
        )
    };
    let apt = |host: &str, action: &str| {
        format!(
            "apt-get -qq -o Dir::State=$PWD/apt/state -o Dir::Cache=$PWD/apt/cache \
             -o Dir::Etc::sourcelist=$PWD/{host}.list -o Dir::Etc::sourceparts=/dev/null \
             -o APT::Sandbox::User=root -o Acquire::Retries=0 -o APT::Update::Error-Mode=any {action} 2>&1; \
             echo \"apt {host} $?\"; "
        )
    };
    let script = format!(
        "set +e; {}{}{}{}{} ls got tiny*.deb",
        pip("a.test"),
        pip("b.test"),
        apt("a", "update"),
        apt("a", "download tiny"),
        apt("b", "update"),
    );
    let output = net.guest("--allow a.test:8081/tcp", &script);
    assert!(output.contains("pip a.test 0\n") && output.contains("pip b.test 1\n"), "{output}");
    assert!(output.contains("tiny-1.0-py3-none-any.whl"), "{output}");
    assert!(output.contains("tiny_1.0_all.deb"), "{output}");
    assert_eq!(output.matches("apt a 0\n").count(), 2, "{output}");
    assert!(output.contains("apt b 100\n"), "{output}");
    // The messages name the host, and none speaks of a time limit.
    assert!(output.contains("resolving 'b.test'"), "{output}");
    assert!(!output.contains("timed out"), "{output}");
    assert!(!net.was_asked_for("b.test"), "a denied name left the host");
    drop(server.end());
    net.end();
}

/// The server is an echo of datagrams, which no client takes for QUIC: the test is about the client's hello.
#[test]
fn initial_packets_of_an_http3_client_reach_allowed_name_only() {
    require!(GTLSCLIENT, OPENSSL, DNSMASQ);
    let net = net!();
    // By its address, the client calls the server `localhost`; only the hello tells that from `a.test`.
    let client = |host: &str| {
        format!(
            "python3 -c 'import socket; socket.gethostbyname(\"a.test\")'; \
             gtlsclient -q --handshake-timeout=2s --timeout=2s {host} 443 https://{host}/ 2>&1 || true"
        )
    };
    let arrived = || net.servers.stdout.text().matches("datagram").count();
    let denied = net.guest("--allow a.test:443", &client(FAR_V4));
    assert_eq!(arrived(), 0, "{denied}");
    let allowed = net.guest("--allow a.test:443", &client("a.test"));
    assert!(arrived() > 0, "{allowed}");
    net.end();
}
