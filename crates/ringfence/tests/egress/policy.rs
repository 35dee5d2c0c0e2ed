//! Egress policies end to end: programs and adversaries in a guest, a DNS server and shared addresses outside.

use crate::support::egress::{CURL, DNSMASQ, LONG, OPENSSL, OTHER_V4};
use crate::support::needs::Need;
use crate::support::world::{FAR_V4, OUTSIDE_V4};
use crate::support::{Lab, eventually};
use crate::{net, require};

const WGET: Need = Need::Program("wget", "wget");
const GIT: Need = Need::Program("git", "git");
const DIG: Need = Need::Program("dig", "bind9-dnsutils");

#[test]
fn programs_reach_allowed_names_and_nothing_else() {
    require!(CURL, WGET, GIT, OPENSSL, DNSMASQ);
    let net = net!();
    let script = format!(
        "curl -sS --max-time 20 --cacert cert.pem https://a.test/; \
         curl -sS --max-time 20 --http1.1 http://a.test/; \
         wget -q -T 20 -t 1 -O - --ca-certificate cert.pem https://a.test/; \
         python3 -c 'import urllib.request as u; print(u.urlopen(\"http://a.test/\", timeout=20).read())'; \
         curl -sS --max-time 20 --cacert cert.pem https://x.wild.test/; \
         curl -sS --max-time 20 http://alias.test/; \
         head -c 4000000 /dev/zero | curl -sS --max-time 60 --cacert cert.pem --data-binary @- https://a.test/; \
         set +e; \
         start=$(date +%s%N); \
         curl -sS --max-time 20 https://b.test/; echo \"b $?\"; \
         curl -sS --max-time 20 http://other.test/; echo \"other $?\"; \
         curl -sS --max-time 20 http://{OTHER_V4}/; echo \"raw $?\"; \
         curl -sS --max-time 20 --resolve other.test:443:{OTHER_V4} https://other.test/; echo \"pinned $?\"; \
         curl -sS --max-time 20 --resolve b.test:443:{FAR_V4} https://b.test/; echo \"shared $?\"; \
         curl -sS --max-time 20 -H 'Host: b.test' http://a.test/; echo \"host $?\"; \
         curl -sS --max-time 20 http://a.test:8080/; echo \"port $?\"; \
         wget -q -T 20 -t 1 -O - https://b.test/; echo \"wget $?\"; \
         GIT_TERMINAL_PROMPT=0 git ls-remote https://b.test/x; echo \"git $?\"; \
         echo \"took $(( ($(date +%s%N) - start) / 1000000 ))\""
    );
    let options = "--allow a.test:80,443/tcp --allow *.wild.test:443 --allow alias.test:80";
    let finished = net.world.lone_guest(options, &script).finish(LONG);
    let output = format!("{}{}", finished.stdout, finished.stderr);
    assert_eq!(finished.stdout.matches("page\n").count(), 5, "{output}");
    assert!(output.contains("b'page\\n'") && output.contains("received 4000000"), "{output}");
    // curl: 6 the name does not resolve, 7 the connection is refused, 35 it is reset, 0 a page says why.
    for line in ["b 6", "other 6", "raw 7", "pinned 7", "shared 35", "host 0", "port 7"] {
        assert!(output.contains(&format!("{line}\n")), "{line}: {output}");
    }
    assert!(output.contains("wget 4\n") && output.contains("git 128\n"), "{output}");
    net.wait_for_question("a.test");
    for name in ["b.test", "other.test"] {
        assert!(!net.was_asked_for(name), "{name} left the host");
    }
    net.end();
}

#[test]
fn hello_for_a_denied_name_is_reset_in_any_form() {
    require!(OPENSSL, DNSMASQ);
    let net = net!();
    let client = |name: &str, how: &str| format!("python3 egress.py hello {FAR_V4} {name} {how}; ");
    let resolve = "python3 -c 'import socket; socket.gethostbyname(\"a.test\")'; ";
    let hows = ["whole", "bytes", "records"];
    let mut script = resolve.to_owned();
    for name in ["a.test", "b.test"] {
        hows.iter().for_each(|how| script += &client(name, how));
    }
    script += &client("a.test", "nameless");
    script += &client("a.test", "ech");
    let output = net.guest("--allow a.test:443", &script);
    let lines: Vec<&str> = output.lines().map(|line| line.split(' ').next().unwrap()).collect();
    let (served, reset) = ("answered", "ConnectionResetError");
    assert_eq!(lines[..6], [served, served, served, reset, reset, reset], "{output}");
    assert_eq!(lines[6..], [served, served], "{output}");

    let strict = net.guest("--allow a.test:443 --strict-sni", &script);
    let lines: Vec<&str> = strict.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(lines[..6], [served, served, served, reset, reset, reset], "{strict}");
    assert_eq!(lines[6..], [reset, reset], "{strict}");
    net.end();
}

#[test]
fn denied_hello_leaves_no_byte_at_the_server() {
    require!(OPENSSL, DNSMASQ);
    let net = net!();
    let request = |host: &str| format!("GET / HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n");
    let script = format!(
        "python3 -c 'import socket; socket.gethostbyname(\"a.test\")'; \
         python3 egress.py send {FAR_V4} 9000 '{}'; python3 egress.py send {FAR_V4} 22 'SSH-2.0-client'",
        request("b.test"),
    );
    let output = net.guest("--allow a.test:9000,22", &script);
    let mut lines = output.lines();
    assert!(lines.next().unwrap().starts_with("ConnectionResetError"), "{output}");
    assert!(lines.next().unwrap().starts_with("answered"), "{output}");
    net.servers.wait_for_output("counted 0\n");
    net.end();
}

/// The second hello of a client, after a HelloRetryRequest, must name the same server. Not every server compares them.
#[test]
fn second_hello_for_a_denied_name_is_reset_in_any_form() {
    require!(OPENSSL, DNSMASQ);
    let net = net!();
    let hows = ["whole", "bytes", "records"];
    let mut script = "python3 -c 'import socket; socket.gethostbyname(\"a.test\")'; ".to_owned();
    for name in ["a.test", "b.test"] {
        for how in hows {
            script += &format!("python3 egress.py second {FAR_V4} a.test {name} {how}; ");
        }
    }
    script += &format!("python3 egress.py second {FAR_V4} a.test b.test 'at once'");
    let output = net.guest("--allow a.test:9000", &script);
    let lines: Vec<&str> = output.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(lines[..3], ["closed"; 3], "{output}");
    // The reset meets the client while it sends, half-closes or receives.
    let is_reset =
        |line: &&str| ["ConnectionResetError", "BrokenPipeError", "OSError"].contains(line);
    assert!(lines.len() == 7 && lines[3..].iter().all(is_reset), "{output}");
    let counted = || -> Vec<usize> {
        let text = net.servers.stdout.text();
        let counts = text.lines().filter_map(|line| line.strip_prefix("counted "));
        counts.map(|count| count.parse().unwrap()).collect()
    };
    assert!(eventually(LONG, || counted().len() == 7), "{:?}", counted());
    let counts = counted();
    // Two hellos with a change_cipher_spec between them.
    let hello = (counts[0] - 6) / 2;
    assert!(hello > 150 && counts[..3].iter().all(|count| *count >= 2 * hello), "{counts:?}");
    assert!(counts[3..6].iter().all(|count| (hello..=hello + 6).contains(count)), "{counts:?}");
    assert_eq!(counts[6], 0, "{counts:?}");
    net.end();
}

#[test]
fn quic_reaches_allowed_name_only() {
    use ringfence_policy::quic::testing::{Initial, crypto, first_datagram, hello};
    require!(OPENSSL, DNSMASQ);
    let net = net!();
    let write = |name: &str, bytes: &[u8]| std::fs::write(net.world.file(name), bytes).unwrap();
    write("a", &first_datagram(b"12345678", "a.test"));
    write("b", &first_datagram(b"87654321", "b.test"));
    let whole = hello("a.test");
    let half = |number, at: usize, part: &[u8]| {
        let mut frames = crypto(at, part);
        frames.resize(900 + at, 0);
        Initial::new(b"inhalves", number).seal(&frames)
    };
    // The end of the hello comes first.
    write("end", &half(0, 100, &whole[100..]));
    write("start", &half(1, 0, &whole[..100]));
    write("short", &[0x40; 99]);
    let script = format!(
        "python3 -c 'import socket; socket.gethostbyname(\"a.test\")'; \
         for files in 'a short' 'end start' b short 'a b'; do python3 egress.py files {FAR_V4} 443 $files; done; \
         python3 egress.py files {FAR_V4} 8443 short"
    );
    let output = net.guest("--allow a.test:443", &script);
    let lines: Vec<&str> = output.lines().map(|line| line.rsplit_once(' ').unwrap().0).collect();
    let lengths: Vec<_> = ["end", "start"]
        .map(|name| std::fs::metadata(net.world.file(name)).unwrap().len().to_string())
        .into();
    assert_eq!(lines[0], "answered 1200,99", "{output}");
    assert_eq!(lines[1], format!("answered {}", lengths.join(",")), "{output}");
    for (at, line) in lines[2..].iter().enumerate() {
        let refused = ["ConnectionRefusedError", "PermissionError", "OSError"];
        assert!(refused.contains(line), "{at}: {output}");
    }
    // The allowed hellos came twice, the denied one never. The last one may arrive after its client has ended.
    let served = || net.servers.stdout.text();
    let came = || served().matches("datagram 1200\n").count();
    assert!(eventually(LONG, || came() >= 2), "{}", served());
    assert_eq!(came(), 2, "{}", served());
    net.end();
}

#[test]
fn other_resolvers_and_private_addresses_are_refused_at_once() {
    require!(CURL, OPENSSL, DIG, DNSMASQ);
    let net = net!();
    let script = format!(
        "for port in 53 853; do python3 egress.py send {FAR_V4} $port xx; python3 egress.py send {OUTSIDE_V4} $port xx; done; \
         python3 egress.py datagram {FAR_V4} 53; python3 egress.py datagram {FAR_V4} 443; \
         python3 egress.py send 169.254.169.254 80 x; python3 egress.py send ::ffff:{OTHER_V4} 80 x; \
         for name in rebind.test metadata.test tunnel.example $(printf 'x%.0s' $(seq 60)).tunnel.example; do \
           dig +tries=1 +time=20 $name | grep -o 'status: [A-Z]*'; done; \
         dig +tries=1 +time=20 +short alias.test; \
         dig +tries=1 +time=20 a.test HTTPS | grep -o 'status: [A-Z]*, \\|ANSWER: 0'; "
    );
    let output = net.guest("--allow *.test", &script);
    let lines: Vec<&str> = output.lines().collect();
    for line in &lines[..8] {
        let (what, took) = line.split_once(' ').unwrap();
        // The uplink itself answers TCP at the name server, and reads a query that is too long.
        let refused =
            ["ConnectionRefusedError", "PermissionError", "OSError", "ConnectionResetError"];
        assert!(refused.contains(&what), "{output}");
        assert!(took.parse::<u32>().unwrap() < 2000, "a time-out, not a refusal: {output}");
    }
    assert_eq!(lines[8..12], ["status: REFUSED"; 4], "{output}");
    assert!(lines.contains(&FAR_V4), "an alias is followed: {output}");
    assert!(lines.contains(&"status: NOERROR, ") && lines.contains(&"ANSWER: 0"), "{output}");
    assert!(!net.was_asked_for("tunnel"), "a denied name left the host");
    net.end();
}

#[test]
fn rule_for_addresses_opens_them_without_names() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    let script = format!(
        "curl -sS --max-time 20 http://{OTHER_V4}/; set +e; curl -sS --max-time 20 http://{FAR_V4}/; echo \"far $?\""
    );
    let output = net.guest(&format!("--allow {OTHER_V4}:80"), &script);
    assert!(output.contains("page\n") && output.contains("far 7\n"), "{output}");
    let output = net.guest(
        "--deny b.test",
        &format!(
            "curl -sS --max-time 20 http://{OTHER_V4}/; set +e; curl -s --max-time 20 -k https://a.test/; \
             curl -sS --max-time 20 --resolve b.test:443:{FAR_V4} https://b.test/; echo \"b $?\""
        ),
    );
    assert!(output.matches("page\n").count() == 2 && output.contains("b 35\n"), "{output}");
    net.end();
}

#[test]
fn published_port_is_not_affected_by_a_policy() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    let guest = net.world.lone_guest(
        "--allow a.test:443 -p 8080:8080",
        "exec python3 egress.py serve 0.0.0.0 & python3 -m http.server 8080 >/dev/null 2>&1",
    );
    let fetch = "for i in $(seq 400); do curl -sS --max-time 5 -o got http://192.0.2.2:8080/ && exit 0; sleep 0.1; done; exit 1";
    net.world.outside(&["sh", "-c", fetch]).succeed(LONG);
    drop(guest.end());
    net.end();
}

#[test]
fn log_has_each_verdict_and_learned_policy_allows_the_same_again() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    let script = format!(
        "! curl -s --max-time 20 http://169.254.169.254/; \
         curl -sS --max-time 20 http://a.test/; curl -sS --max-time 20 http://{OTHER_V4}/; \
         for i in 1 2 3 4 5; do curl -s --max-time 20 http://a.test:8080/ || true; done"
    );
    let output =
        net.guest("--name learner --egress-log all.log --egress-learn learned.toml", &script);
    assert_eq!(output.matches("page\n").count(), 2, "{output}");
    let learned = net.world.lab.read("learned.toml");
    for rule in ["\"a.test:80/tcp\"", "\"a.test:8080/tcp\"", "\"198.51.100.2:80/tcp\""] {
        assert!(learned.contains(rule), "{learned}");
    }
    assert_eq!(learned.matches(",\n").count(), 3, "{learned}");
    let script = format!("{script}; curl -s --max-time 20 http://b.test/ || echo \"b $?\"");
    let output = net.guest("--name again --policy learned.toml --egress-log closed.log", &script);
    assert!(output.matches("page\n").count() == 2 && output.contains("b 6\n"), "{output}");
    let log = net.world.lab.read("closed.log");
    let lines: Vec<serde_json::Value> =
        log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let find = |event: &str, verdict: &str, name: &str| {
        lines.iter().find(|line| {
            line["event"] == event && line["verdict"] == verdict && line["name"] == name
        })
    };
    let own = lines.iter().find(|line| line["address"] == "169.254.169.254" && line["port"] == 80);
    let own = own.unwrap_or_else(|| panic!("{log}"));
    assert!(own["event"] == "connect" && own["verdict"] == "deny", "{log}");
    assert!(own["reason"].as_str().unwrap().contains("the host's own"), "{log}");
    let allowed = find("connect", "allow", "a.test").unwrap_or_else(|| panic!("{log}"));
    assert!(allowed["guest"] == "again" && allowed["address"] == FAR_V4, "{log}");
    assert!(allowed["reason"].as_str().unwrap().contains("learned.toml:"), "{log}");
    assert_eq!(find("resolve", "deny", "b.test").unwrap()["reason"], "no rule", "{log}");
    let closed = lines.iter().find(|line| line["event"] == "close" && line["name"] == "a.test");
    let closed = closed.unwrap_or_else(|| panic!("{log}"));
    assert!(
        closed["bytes_out"].as_u64() > Some(50) && closed["bytes_in"].as_u64() > Some(50),
        "{log}"
    );
    let counted = |line: &serde_json::Value| line["port"] == 8080 && line["count"] == 4;
    assert!(lines.iter().any(counted), "repetitions are folded: {log}");
    net.end();
}

/// Command that opens connections to names, reports their ends, and requests a page over the last one.
pub(super) const HOLD: &str = "
import select, socket, sys
held = {name: socket.create_connection((name, 80), timeout=20) for name in sys.argv[1:]}
print('open', flush=True)
while len(held) > 1:
    for sock in select.select(list(held.values()), [], [])[0]:
        name = next(name for name in held if held[name] is sock)
        try:
            print(name, len(sock.recv(1)), flush=True)
        except ConnectionResetError:
            print(name, 'reset', flush=True)
        del held[name]
for name, sock in held.items():
    request = 'GET / HTTP/1.1\\r\\nHost: %s\\r\\nConnection: close\\r\\n\\r\\n' % name
    try:
        sock.sendall(request.encode())
        print(name, b''.join(iter(lambda: sock.recv(4096), b'')).decode().split()[-1], flush=True)
    except ConnectionResetError:
        print(name, 'reset', flush=True)
try:
    socket.create_connection(('other.test', 80), timeout=20)
    print('other again')
except OSError as error:
    print('other refused', flush=True)
";

#[test]
fn new_policy_of_running_guest_ends_only_the_connections_that_it_denies() {
    require!(OPENSSL, DNSMASQ);
    let net = net!();
    std::fs::write(net.world.file("hold.py"), HOLD).unwrap();
    std::fs::write(net.world.file("bad.toml"), "allow = [\n 'b d.org',\n]\n").unwrap();
    std::fs::write(net.world.file("new.toml"), "allow = ['a.test:80']\n").unwrap();
    let set = |file: &str| {
        let program = net.world.lab.program().to_owned();
        net.world.host(&[&program, "policy", "set", "held", file]).finish(LONG)
    };
    assert_eq!(set("new.toml").status, Some(125), "there is no such guest");
    for options in ["--allow *.test", "--allow *.test --queues 2", "", "--queues 2"] {
        let options = format!("--name held {options}");
        let guest = net.world.lone_guest(&options, "exec python3 hold.py a.test other.test");
        guest.wait_for_output("open");
        let bad = set("bad.toml");
        assert_eq!(bad.status, Some(125), "{}", bad.stderr);
        assert!(bad.stderr.contains("bad.toml:2: "), "{}", bad.stderr);
        let good = set("new.toml");
        assert_eq!(good.status, Some(0), "{}", good.stderr);
        let finished = guest.finish(LONG);
        let output = format!("{}{}", finished.stdout, finished.stderr);
        // Without an earlier policy, nobody knows for which name a connection was opened.
        let first = if options.contains("allow") { "a.test page" } else { "a.test reset" };
        for line in ["other.test reset\n", first, "other refused\n"] {
            assert!(output.contains(line), "{options}: {line}: {output}");
        }
    }
    net.end();
}

#[test]
fn wrong_rule_ends_run_with_125_and_a_caret() {
    let lab = Lab::new();
    let run = |options: &str| lab.run(options, &["true"]).finish(LONG);
    let finished = run("--allow example.org:http");
    assert_eq!(finished.status, Some(125), "{}", finished.stderr);
    assert!(
        finished.stderr.contains("\n  example.org:http\n              ^"),
        "{}",
        finished.stderr
    );
    std::fs::write(lab.file("bad.toml"), "allow = [\n  'ok.org',\n  'b d.org',\n]\n").unwrap();
    let finished = run(&format!("--policy {}", lab.file("bad.toml").display()));
    assert_eq!(finished.status, Some(125), "{}", finished.stderr);
    assert!(
        finished.stderr.contains("bad.toml:3: ") && finished.stderr.contains("\n  b d.org\n   ^")
    );
    assert_eq!(run("--policy-preset pypi --uplink none").status, Some(125));
}

#[test]
fn policy_command_checks_and_explains() {
    let lab = Lab::new();
    let file = lab.file("p.toml");
    let file = file.to_str().unwrap();
    std::fs::write(file, "allow = ['a.org:443']\n").unwrap();
    let run = |words: &[&str]| {
        let words: Vec<&str> = [lab.program(), "policy"].iter().chain(words).copied().collect();
        lab.spawn(&words).finish(LONG)
    };
    let checked = run(&["check", file]);
    assert!(
        checked.status == Some(0) && checked.stdout.contains("1 rules, everything else is denied")
    );
    let allowed = run(&["explain", file, "a.org:443"]);
    assert!(allowed.status == Some(0) && allowed.stdout.contains("p.toml:1"), "{}", allowed.stdout);
    let denied = run(&["explain", file, "b.org:443"]);
    assert!(denied.status == Some(1) && denied.stdout.contains("denied, no rule"));
    let more = lab.file("more.toml");
    std::fs::write(&more, "include = ['p.toml'] # the team's rules\nallow = ['.b.org:80-90']\n")
        .unwrap();
    let more = more.to_str().unwrap();
    for (destination, is_allowed) in [
        ("a.org:443", true),
        ("b.org:85", true),
        ("x.b.org:80", true),
        ("b.org:91", false),
        ("x.a.org:443", false),
    ] {
        let explained = run(&["explain", more, destination]);
        assert_eq!(explained.status == Some(0), is_allowed, "{}", explained.stdout);
    }
    std::fs::write(file, "allow = ['a b']\n").unwrap();
    assert_eq!(run(&["check", file]).status, Some(125));
    let included = run(&["check", more]);
    assert!(included.status == Some(125) && included.stderr.contains("p.toml:1: "));
    for (rule, advice) in [
        ("https://a.example/", "write a.example:443"),
        ("b\u{fc}cher.example", "write xn--bcher-kva.example"),
        ("::1:80", "write [::1]:80"),
    ] {
        let refused = lab.run(&format!("--allow {rule}"), &["true"]).finish(LONG);
        assert!(
            refused.status == Some(125) && refused.stderr.contains(advice),
            "{}",
            refused.stderr
        );
    }
}
