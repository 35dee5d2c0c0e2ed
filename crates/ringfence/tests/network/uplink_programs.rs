//! Common programs in a guest with an uplink, against servers outside of its host.

use std::time::Duration;

use crate::require;
use crate::support::needs::{Need, skip_what_is_not_installed};
use crate::support::world::{FAR_V4, FAR_V6, Families, OUTSIDE_V4, OUTSIDE_V6, World, dnsmasq};
use crate::support::{sha256, write_noise};

/// Time limit for a complete guest.
const LONG: Duration = Duration::from_secs(90);

const CURL: Need = Need::Program("curl", "curl");
const NGHTTPD: Need = Need::Program("nghttpd", "nghttp2-server");
const OPENSSL: Need = Need::Program("openssl", "openssl");
const GIT: Need = Need::Program("git", "git");
const DIG: Need = Need::Program("dig", "bind9-dnsutils");
const DNSMASQ: Need = Need::Program("dnsmasq", "dnsmasq-base");
const IPERF: Need = Need::Program("iperf3", "iperf3");
const PING: Need = Need::Program("ping", "iputils-ping");

/// Creates a world with both families, or returns from the test.
macro_rules! world {
    () => {
        match World::new(Families::Both) {
            Some(world) => world,
            None => return,
        }
    };
}

/// Waits until a process outside listens at the port.
fn wait_listening(world: &World, port: u16) {
    let script = format!(
        "for i in $(seq 400); do ss -Hltn 'sport = :{port}' | grep -q . && exit 0; sleep 0.05; done; exit 1"
    );
    world.outside(&["sh", "-c", &script]).succeed(LONG);
}

/// Creates `key.pem` and `cert.pem`.
fn make_certificate(world: &World) {
    let key = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 \
               -subj /CN=www.example -keyout key.pem -out cert.pem 2>/dev/null";
    world.outside(&["sh", "-ec", key]).succeed(LONG);
}

/// Uses ngtcp2's client and server, because few builds of curl support HTTP/3.
#[test]
fn http_3_transfer_succeeds() {
    require!(OPENSSL);
    // The server's package would start it as a service.
    for need in
        [Need::Program("gtlsclient", "ngtcp2-client"), Need::Program("gtlsserver", "ngtcp2-server")]
    {
        if let Some(reason) = need.missing() {
            return skip_what_is_not_installed(&reason);
        }
    }
    let world = world!();
    write_noise(&world.file("noise"), 4);
    make_certificate(&world);
    for (mtu, address, authority) in
        [("65520", FAR_V4, FAR_V4.to_owned()), ("1500", FAR_V6, format!("[{FAR_V6}]"))]
    {
        let serve = format!(
            "exec $(command -v gtlsserver || echo /usr/sbin/gtlsserver) -q -d . {address} 4433 key.pem cert.pem"
        );
        let server = world.outside(&["sh", "-ec", &serve]);
        let script = format!(
            "mkdir -p got; for i in $(seq 20); do timeout 60 gtlsclient -q --exit-on-all-streams-close \
               --download=got {address} 4433 https://{authority}:4433/noise || sleep 0.2; \
               [ -s got/noise ] && break; done"
        );
        world.lone_guest(&format!("--mtu {mtu}"), &script).succeed(LONG);
        assert_eq!(sha256(&world.file("got/noise")), sha256(&world.file("noise")), "{address}");
        std::fs::remove_file(world.file("got/noise")).unwrap();
        server.end();
    }
}

#[test]
fn curl_transfers_over_http_1_and_2() {
    require!(CURL, NGHTTPD, OPENSSL);
    let world = world!();
    write_noise(&world.file("noise"), 4);
    make_certificate(&world);
    let serve = format!(
        "import http.server as h; h.SimpleHTTPRequestHandler.protocol_version = 'HTTP/1.1'; \
         h.ThreadingHTTPServer(('{FAR_V4}', 8000), h.SimpleHTTPRequestHandler).serve_forever()"
    );
    let plain = world.outside(&["python3", "-c", &serve]);
    let second =
        world.outside(&["nghttpd", "-a", FAR_V6, "8443", "key.pem", "cert.pem", "-d", "."]);
    wait_listening(&world, 8000);
    wait_listening(&world, 8443);
    let script = format!(
        "curl -sS --max-time 60 --http1.1 -w '%{{http_version}} %{{http_code}}\\n' -o one http://{FAR_V4}:8000/noise; \
         curl -sSk --max-time 60 --http2 -w '%{{http_version}} %{{http_code}}\\n' -o two https://[{FAR_V6}]:8443/noise; \
         curl -sSk --max-time 60 --http2 --parallel --parallel-max 8 \
              $(for i in 1 2 3 4 5 6 7 8; do echo -o part$i https://[{FAR_V6}]:8443/noise; done); \
         curl --version"
    );
    let output = world.lone_guest("", &script).succeed(LONG);
    assert!(output.contains("1.1 200") && output.contains("2 200"), "{output}");
    let names = ["one".to_owned(), "two".to_owned()];
    for name in names.into_iter().chain((1..=8).map(|i| format!("part{i}"))) {
        assert_eq!(sha256(&world.file(&name)), sha256(&world.file("noise")), "{name}");
    }
    if !output.contains(" HTTP3") {
        skip_what_is_not_installed("HTTP/3: the curl that is installed cannot do it");
    }
    drop((plain.end(), second.end()));
}

#[test]
fn git_clone_succeeds() {
    require!(GIT);
    let world = world!();
    write_noise(&world.file("noise"), 2);
    let make = "export HOME=$PWD GIT_CONFIG_NOSYSTEM=1; mkdir -p repositories/one && cd repositories/one && git init -q && cp ../../noise . && \
                git add noise && git -c user.name=a -c user.email=a@example commit -qm one";
    world.outside(&["sh", "-ec", make]).succeed(LONG);
    let base = format!("--base-path={}", world.file("repositories").display());
    let listen = format!("--listen={OUTSIDE_V4}");
    let safe = "safe.directory=*";
    let server = world.outside(&[
        "git",
        "-c",
        safe,
        "daemon",
        "--export-all",
        "--reuseaddr",
        &listen,
        "--port=9418",
        &base,
    ]);
    wait_listening(&world, 9418);
    let script = format!("git clone -q git://{OUTSIDE_V4}/one cloned");
    world.lone_guest("", &script).succeed(LONG);
    assert_eq!(sha256(&world.file("cloned/noise")), sha256(&world.file("noise")));
    server.end();
}

#[test]
fn ssh_login_succeeds() {
    for need in [
        Need::Root,
        Need::Program("ssh", "openssh-client"),
        Need::Program("sshd", "openssh-server"),
    ] {
        if let Some(reason) = need.missing() {
            return skip_what_is_not_installed(&reason);
        }
    }
    let world = world!();
    write_noise(&world.file("noise"), 4);
    let keys = "ssh-keygen -q -t ed25519 -N '' -f host_key; ssh-keygen -q -t ed25519 -N '' -f id; \
                cp id.pub authorized; mkdir -p /run/sshd";
    world.outside(&["sh", "-ec", keys]).succeed(LONG);
    let file = |name: &str| world.file(name).display().to_string();
    let sshd = format!(
        "exec $(command -v sshd) -D -e -f /dev/null -h {} -p 2222 -o ListenAddress={FAR_V4} -o StrictModes=no \
         -o AuthorizedKeysFile={} -o PidFile=none -o UsePAM=no",
        file("host_key"),
        file("authorized")
    );
    let server = world.outside(&["sh", "-ec", &sshd]);
    wait_listening(&world, 2222);
    let script = format!(
        "ssh -F none -i id -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -p 2222 root@{FAR_V4} \
         sha256sum < noise"
    );
    let output = world.lone_guest("", &script).succeed(LONG);
    assert!(output.contains(&sha256(&world.file("noise"))), "{output}");
    server.end();
}

#[test]
fn dig_resolves_over_udp_and_tcp() {
    require!(DIG, DNSMASQ);
    let world = world!();
    let record = "--host-record=www.example,203.0.113.7";
    let server = world.outside(&dnsmasq(&[FAR_V4, FAR_V6], &[record]));
    wait_listening(&world, 53);
    let mut script = String::new();
    for server in [FAR_V4, FAR_V6] {
        script +=
            &format!("dig +short @{server} www.example; dig +tcp +short @{server} www.example; ");
    }
    let output = world.lone_guest("", &script).succeed(LONG);
    assert_eq!(output.matches("203.0.113.7").count(), 4, "{output}");
    server.end();
}

#[test]
fn iperf3_runs_in_both_directions() {
    require!(IPERF, PING);
    let world = world!();
    for (port, address) in [(5301, OUTSIDE_V4), (5302, OUTSIDE_V6)] {
        let text = port.to_string();
        let server = world.outside(&["iperf3", "-s", "-p", &text, "-B", address]);
        wait_listening(&world, port);
        let script = format!(
            "for options in '' -R '-P 4' '-P 4 -R' --bidir '-u -b 20M -l 1200' '-u -b 20M -l 1200 -R'; do \
               for i in $(seq 50); do iperf3 -c {address} -p {port} -t 1 $options > log 2>&1 && continue 2; \
                 grep -qE 'busy|unable to connect' log || break; sleep 0.2; done; cat log; exit 1; done; \
               ping -c 1 -W 20 {address}"
        );
        world.lone_guest("", &script).succeed(LONG);
        server.end();
    }
}
