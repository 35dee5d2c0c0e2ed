//! Egress policies with clients of several languages and protocols: an allowed name works, and a denied one fails by a
//! refusal that the client reports, not by a time limit.

use crate::support::egress::{CURL, DNSMASQ, LONG, Net, OPENSSL, THIRD_V4};
use crate::support::needs::{Need, skip_what_is_not_installed};
use crate::support::world::FAR_V4;
use crate::support::write_noise;
use crate::{net, require};

const WGET: Need = Need::Program("wget", "wget");
const NODE: Need = Need::Program("node", "nodejs");
const GO: Need = Need::Program("go", "golang-go");
const GIT: Need = Need::Program("git", "git");
const SSHD: Need = Need::Program("sshd", "openssh-server");
const PIP: Need = Need::Program("pip", "python3-pip");
const APT: Need = Need::Program("apt-get", "apt");
const DPKG_DEB: Need = Need::Program("dpkg-deb", "dpkg");
const GTLSCLIENT: Need = Need::Program("gtlsclient", "ngtcp2-client");
const GTLSSERVER: Need = Need::Program("gtlsserver", "ngtcp2-server");

/// Time in milliseconds after which a connection or a query without an answer is tried again (RFC 6298: 1 s; resolvers wait
/// longer). The fastest of five denied requests ends before it, so it had an answer.
const RETRY_MS: u32 = 1000;

/// Writes a shared file.
fn write(net: &Net, name: &str, text: &str) {
    std::fs::write(net.world.file(name), text).unwrap();
}

#[test]
fn http2_and_fetch_reach_allowed_name_only() {
    require!(CURL, OPENSSL, DNSMASQ, NODE);
    let net = net!();
    write(&net, "http2.mjs", include_str!("../support/http2.mjs"));
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
    write(&net, "http2.mjs", include_str!("../support/http2.mjs"));
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
    write(&net, "client.go", include_str!("../support/client.go"));
    // The resolver of Go itself, beside that of the C library in other tests.
    let build =
        "GOFLAGS= CGO_ENABLED=0 GO111MODULE=off GOTOOLCHAIN=local go build -o client client.go";
    net.world.host(&["sh", "-ec", build]).succeed(4 * LONG);
    let script = format!(
        "./client http://a.test/ https://a.test/ https://b.test/ http://{FAR_V4}:8081/ \
         http://a.test:8080/; for i in 1 2 3 4 5; do ./client https://b.test/ http://{FAR_V4}:8081/; done"
    );
    let output = net.guest("--allow a.test:80,443", &script);
    assert_eq!(output.matches("page\n").count(), 2, "{output}");
    let errors: Vec<&str> = output.lines().filter(|line| line.starts_with("error ")).collect();
    assert_eq!(errors.len(), 13, "{output}");
    assert!(errors[0].contains("lookup b.test") && !errors[0].contains("timeout"), "{output}");
    assert!(errors[1..3].iter().all(|line| line.contains("connection refused")), "{output}");
    for part in ["lookup b.test", "connection refused"] {
        let times = errors[3..].iter().filter(|line| line.contains(part));
        let times = times.map(|line| line.split(' ').nth(1).unwrap().parse::<u32>().unwrap());
        assert!(times.min().unwrap() < RETRY_MS, "{output}");
    }
    net.end();
}

/// Serves the files of this directory by HTTPS, at an address and a port.
const HTTPS_PY: &str = "
import http.server, ssl, sys
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain('cert.pem', 'key.pem')
server = http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), http.server.SimpleHTTPRequestHandler)
server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
print('listening', flush=True)
server.serve_forever()
";

/// Measures denied requests in the program itself, so that its start does not count.
const DENIED_PY: &str = "
import sys, time, urllib.request
try:
    import requests
except ImportError:
    from pip._vendor import requests
for name, get in (('requests', requests.get), ('urllib', urllib.request.urlopen)):
    for url in sys.argv[1:]:
        times = []
        for _ in range(5):
            start = time.monotonic()
            try:
                get(url, timeout=20)
                error = 'none'
            except Exception as failure:
                error = str(failure)
            times.append(time.monotonic() - start)
        print(name, url, round(min(times) * 1000), error.replace('\\n', ' '))
print('page', requests.get('http://a.test/', timeout=20).text.strip())
";

/// The same for Node's `fetch`, which npm 11 uses, and for its `https`, which npm's own client uses.
const DENIED_JS: &str = "
import http from 'node:http';
const get = (url) => new Promise((done, failed) => http.get(url, done).on('error', failed));
for (const [name, request] of [['fetch', fetch], ['http', get]]) {
    for (const url of process.argv.slice(2)) {
        const times = [];
        let code = 'none';
        for (let i = 0; i < 5; i++) {
            const start = performance.now();
            await request(url).catch((error) => { code = (error.cause ?? error).code; });
            times.push(performance.now() - start);
        }
        console.log(name, url, Math.round(Math.min(...times)), code);
    }
}
";

#[test]
#[ignore = "long: each client in turn"]
fn denied_request_of_each_client_fails_within_100_ms() {
    require!(CURL, WGET, GIT, NODE, PIP, OPENSSL, DNSMASQ);
    let net = net!();
    write(&net, "denied.py", DENIED_PY);
    write(&net, "denied.mjs", DENIED_JS);
    let (name, address) = ("http://b.test/", format!("http://{FAR_V4}:8081/"));
    let best = |program: &str, url: &str, command: &str| {
        format!(
            "best=9999; for i in 1 2 3 4 5; do start=$(date +%s%N); {command} {url} >said 2>&1 && echo reached; \
             took=$(( ($(date +%s%N) - start) / 1000000 )); [ $took -lt $best ] && best=$took; done; \
             echo {program} {url} $best $(tail -n 1 said); "
        )
    };
    let mut script = "set +e; ".to_owned();
    for url in [name, &address] {
        script += &best("curl", url, "curl -sS --max-time 20");
        script += &best("wget", url, "wget -nv -T 20 -t 1 -O -");
        script += &best("git", url, "env GIT_TERMINAL_PROMPT=0 git ls-remote");
    }
    script += &best("curl", "https://b.test/", &format!("curl -sS --resolve b.test:443:{FAR_V4}"));
    script += &format!("python3 denied.py {name} {address}; node denied.mjs {name} {address}");
    let output = net.guest("--allow a.test:80,443", &script);
    assert!(output.contains("page page\n") && !output.contains("reached"), "{output}");
    let lines: Vec<Vec<&str>> = output
        .lines()
        .filter(|line| !line.starts_with("page"))
        .map(|line| line.splitn(4, ' ').collect())
        .collect();
    assert_eq!(lines.len(), 15, "{output}");
    for line in &lines {
        assert!(line[2].parse::<u32>().unwrap() < RETRY_MS, "{line:?}: {output}");
        let message = line[3].to_lowercase();
        let says = ["resol", "refused", "connect", "reset", "eai_again", "econnrefused"];
        assert!(says.iter().any(|part| message.contains(part)), "{line:?}");
        assert!(!message.contains("timed out"), "{line:?}");
    }
    println!("{output}");
    net.end();
}

#[test]
fn git_over_https_and_ssh_reaches_allowed_name_only() {
    require!(GIT, OPENSSL, DNSMASQ, Need::Root);
    if let Some(reason) = SSHD.missing() {
        return skip_what_is_not_installed(&reason);
    }
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
                   git push -q ../repo.git HEAD:refs/heads/main; git -C ../repo.git update-server-info";
    net.world.host(&["sh", "-ec", prepare]).succeed(LONG);
    // The daemon wants a directory in /run, which is one of its own here.
    let serve = format!(
        "mount -t tmpfs none /run; mkdir /run/sshd; echo started; \
         exec $(command -v sshd || echo /usr/sbin/sshd) -D -e -f {files}/sshd.conf"
    );
    let server = net.world.outside(&["unshare", "--mount", "sh", "-ec", &serve]);
    let wait = "for i in $(seq 200); do ss -Hltn 'sport = :2222' | grep -q . && exit 0; sleep 0.05; done; exit 1";
    net.world.outside(&["sh", "-c", wait]).succeed(LONG);
    write(&net, "https.py", HTTPS_PY);
    let files_server = net.world.outside(&["python3", "https.py", FAR_V4, "8443"]);
    files_server.wait_for_output("listening");
    let ssh = "export GIT_SSH_COMMAND='ssh -F /dev/null -i user -o StrictHostKeyChecking=no \
               -o UserKnownHostsFile=/dev/null -o BatchMode=yes'";
    let script = format!(
        "{ssh}; git ls-remote ssh://root@a.test:2222{files}/repo.git; export GIT_SSL_CAINFO=$PWD/cert.pem; \
         git clone -q -b main https://a.test:8443/repo.git cloned; git -C cloned log --format=%s; set +e; \
         git clone -q https://b.test:8443/repo.git other 2>&1; echo \"https $?\"; \
         git -c http.curloptResolve=b.test:8443:{FAR_V4} clone -q https://b.test:8443/repo.git other 2>&1; \
         echo \"shared $?\"; \
         git ls-remote ssh://root@b.test:2222{files}/repo.git 2>&1; echo \"b $?\"; \
         git ls-remote ssh://root@{FAR_V4}:2223{files}/repo.git 2>&1; echo \"port $?\""
    );
    let output = net.guest("--allow a.test:2222,8443/tcp", &script);
    assert!(output.contains("refs/heads/main"), "{output}{}", server.stderr.text());
    assert!(output.contains("first\n") && output.contains("https 128\n"), "{output}");
    assert!(output.contains("Could not resolve host: b.test"), "{output}");
    assert!(output.contains("shared 128\n") && output.contains("reset by peer"), "{output}");
    assert!(output.contains("b 128\n") && output.contains("port 128\n"), "{output}");
    assert!(output.contains("Could not resolve hostname b.test"), "{output}");
    assert!(output.contains("Connection refused"), "{output}");
    drop((server.end(), files_server.end()));
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

#[test]
fn http3_transfer_reaches_allowed_name_only() {
    require!(GTLSCLIENT, GTLSSERVER, OPENSSL, DNSMASQ);
    let net = net!();
    write_noise(&net.world.file("noise"), 1);
    let serve = |port: &str, options: &str| {
        let program = "$(command -v gtlsserver || echo /usr/sbin/gtlsserver)";
        let words = format!("exec {program} {options} -d . {THIRD_V4} {port} key.pem cert.pem");
        net.world.outside(&["sh", "-c", &words])
    };
    net.world.etc("hosts", &format!("127.0.0.1 localhost\n{THIRD_V4} d.test\n"));
    // The second one validates addresses: a Retry packet precedes the handshake.
    let servers = [serve("443", ""), serve("8443", "--validate-addr")];
    for server in &servers {
        server.wait_for_error("Using document root");
    }
    let arrived = || servers.iter().any(|server| server.stderr.text().contains("Received packet"));
    // Nobody answers a denied client.
    let within = |limit: &str, options: &str, host: &str, port: &str| {
        format!(
            "echo {options} {host} {port}; gtlsclient -q --handshake-timeout={limit} --timeout=20s --exit-on-all-streams-close \
             --download=. {options} {host} {port} https://{host}/noise 2>&1 || true; "
        )
    };
    let client = |options: &str, host: &str, port: &str| within("3s", options, host, port);
    let denied = [
        "mkdir got; cd got; python3 -c 'import socket; socket.gethostbyname(\"c.test\")'; "
            .to_owned(),
        client("", "e.test", "443"),
        // No name server tells their address. It is that of `c.test`.
        client("", "d.test", "443"),
        client("", "d.test", "8443"),
        // By its address, the client calls the server `localhost`.
        client("", THIRD_V4, "443"),
        // A version that nobody knows, whose hello cannot be read.
        client("--version=0xfaceb00c", "c.test", "443"),
        "ls".to_owned(),
    ];
    let output = net.guest("--allow c.test", &denied.concat());
    assert!(output.contains("getaddrinfo: "), "{output}");
    assert!(!arrived() && !output.contains("noise"), "{output}");
    let allowed = ["443", "8443"].map(|port| {
        let client = within("20s", "", "c.test", port);
        format!("{client}cmp noise ../noise && echo equal; rm noise; ")
    });
    let script = format!("mkdir -p got; cd got; {}", allowed.concat());
    let output = net.guest("--allow c.test:443,8443", &script);
    assert_eq!(output.matches("equal\n").count(), 2, "{output}");
    assert!(arrived());
    drop(servers.map(crate::support::Running::end));
    net.end();
}
