//! Egress policies under attack by the command: tunnels in names, lies of a name server, forms of addresses, changes of
//! its own policy and addresses, and their totals in `ringfence ps`.

use crate::support::egress::{CURL, DNSMASQ, LONG, OPENSSL, OTHER_V4};
use crate::support::eventually;
use crate::support::needs::{Need, PING};
use crate::support::world::{FAR_V4, FAR_V6, Families, OUTSIDE_V4, World};
use crate::{net, require};

const IODINE: Need = Need::Program("iodine", "iodine");
const IODINED: Need = Need::Program("iodined", "iodine");
const DIG: Need = Need::Program("dig", "bind9-dnsutils");

/// Asks for names, and prints how many were answered, and the seconds that it took.
const TUNNEL: &str = "
import socket, struct, sys, time
server, count, pattern = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.settimeout(10)
sock.connect((server, 53))
start, codes = time.monotonic(), {}
for number in range(count):
    labels = pattern.replace('N', str(number)).split('.')
    name = b''.join(bytes([len(label)]) + label.encode() for label in labels) + b'\\0'
    sock.send(struct.pack('>HHHHHH', number, 0x100, 1, 0, 0, 0) + name + b'\\0\\1\\0\\1')
    code = sock.recv(512)[3] & 15
    codes[code] = codes.get(code, 0) + 1
print(codes.get(0, 0), codes.get(5, 0), round(time.monotonic() - start + 1))
";

#[test]
fn tunnel_in_names_carries_nothing_under_denied_domain_and_little_under_wildcard() {
    require!(OPENSSL, DNSMASQ);
    let net = net!();
    std::fs::write(net.world.file("tunnel.py"), TUNNEL).unwrap();
    let long = "x".repeat(50);
    let ask =
        |count: u32, pattern: &str| format!("python3 tunnel.py {OUTSIDE_V4} {count} {pattern}; ");
    let script = [
        ask(300, &format!("{long}.N.tunnel.example")),
        // The part that a wildcard stands for has at most 64 characters.
        ask(20, &format!("{long}.N.aaaaaaaaaaaaaaaa.wild.test")),
        ask(600, &format!("{}.N.wild.test", &long[..20])),
    ]
    .concat();
    let output = net.guest("--allow *.wild.test:443", &script);
    let counts: Vec<Vec<u64>> = output
        .lines()
        .map(|line| line.split(' ').map(|count| count.parse().unwrap()).collect())
        .collect();
    assert_eq!(counts[0][..2], [0, 300], "{output}");
    assert_eq!(counts[1][..2], [0, 20], "{output}");
    // A hundred names at once, then two a second.
    let (answered, refused, seconds) = (counts[2][0], counts[2][1], counts[2][2]);
    assert!(answered <= 100 + 2 * seconds && answered + refused == 600, "{output}");
    assert!(!net.was_asked_for("tunnel") && !net.was_asked_for("aaaaaaaaaaaaaaaa"));
    net.end();
}

/// The domain of the tunnel belongs to the tunnel's server: without a policy, the tunnel comes up.
#[test]
#[ignore = "long: a tunnel that tries for long"]
fn iodine_moves_nothing_under_a_policy_and_everything_without() {
    require!(IODINE, IODINED, OPENSSL, DNSMASQ, PING, Need::Root);
    let net = net!();
    let resolver = "192.0.2.9";
    net.world
        .outside(&["ip", "addr", "add", &format!("{resolver}/24"), "dev", "out0"])
        .succeed(LONG);
    let serve = format!(
        "mkdir -p /dev/net; exec $(command -v iodined || echo /usr/sbin/iodined) -f -c -P secret -l {resolver} \
         10.99.0.1/24 t.wild.test 2>&1"
    );
    let server = net.world.outside(&["sh", "-c", &serve]);
    server.wait_for_output("Listening to dns");
    net.world.name_servers(&[resolver]);
    // The client makes an interface of its own in the guest, and never gives up without its own time limit.
    let tunnel = "timeout 30 $(command -v iodine || echo /usr/sbin/iodine) -f -r -P secret OPTIONS t.wild.test 2>&1 & \
         for i in $(seq 100); do ping -c 1 -W 1 10.99.0.1 >/dev/null 2>&1 && echo tunnelled && break; \
             kill -0 $! 2>/dev/null || break; sleep 0.1; done; kill $! 2>/dev/null || true; wait || true";
    let through =
        |options: &str, servers: &str| net.guest(options, &tunnel.replace("OPTIONS", servers));
    let open = through("", "");
    assert!(open.contains("tunnelled"), "{open}");
    for servers in [String::new(), FAR_V4.to_owned()] {
        let closed = through("--allow a.test", &servers);
        assert!(!closed.contains("tunnelled"), "{closed}");
        assert!(closed.contains("iodine"), "the client ran: {closed}");
    }
    drop(server.end());
    net.end();
}

#[test]
fn lies_outside_the_answer_section_and_extreme_times_to_live_open_nothing_more() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    // The name server of the net stays at its addresses; the liar has its own.
    let liar = "192.0.2.9";
    net.world.outside(&["ip", "addr", "add", &format!("{liar}/24"), "dev", "out0"]).succeed(LONG);
    std::fs::write(net.world.file("liar.py"), include_str!("../support/liar.py")).unwrap();
    let server = net.world.outside(&["python3", "liar.py", liar, FAR_V4, OTHER_V4]);
    server.wait_for_output("listening");
    net.world.name_servers(&[liar]);
    let get = |name: &str| format!("curl -sS --max-time 20 http://{name}/; ");
    let script = format!(
        "{}{}{}set +e; curl -sS --max-time 20 http://{OTHER_V4}/; echo \"other $?\"; \
         curl -sS --max-time 20 --resolve a.test:80:{OTHER_V4} http://a.test/; echo \"pinned $?\"; \
         curl -sS --max-time 20 --resolve b.test:80:{OTHER_V4} http://b.test/; echo \"b $?\"",
        get("a.test"),
        get("ttl0.test"),
        get("ttl2147483648.test"),
    );
    let output = net.guest("--allow *.test:80 --deny b.test", &script);
    assert_eq!(output.matches("page\n").count(), 3, "{output}");
    for line in ["other 7\n", "pinned 7\n", "b 7\n"] {
        assert!(output.contains(line), "{line}: {output}");
    }
    server.wait_for_output("asked ttl2147483648.test");
    drop(server.end());
    net.end();
}

#[test]
#[ignore = "long: a minute of refused connections"]
fn literal_addresses_of_both_families_need_a_rule_for_addresses() {
    require!(OPENSSL);
    let Some(world) = World::new(Families::Both) else { return };
    std::fs::write(world.file("egress.py"), include_str!("../support/egress.py")).unwrap();
    let prepare = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 \
                   -subj /CN=a.test -keyout key.pem -out cert.pem 2>openssl.log";
    world.host(&["sh", "-ec", prepare]).succeed(LONG);
    let server = world.outside(&["python3", "egress.py", "serve", FAR_V4]);
    server.wait_for_output("listening");
    let sixth = world.outside(&["python3", "-um", "http.server", "--bind", FAR_V6, "80"]);
    sixth.wait_for_output("Serving");
    let script = format!(
        "for ip in {FAR_V4} {FAR_V6} ::ffff:{FAR_V4} 64:ff9b::198.51.100.1 2002:c633:6401::1 fd00:ec2::254 ::1; do \
           for port in 80 443; do python3 egress.py send $ip $port x; done; done; \
         python3 egress.py datagram {FAR_V6} 443"
    );
    let output = world.lone_guest("--allow a.test", &script).succeed(LONG);
    let refused = ["ConnectionRefusedError", "PermissionError", "OSError"];
    let is_refused = |line: &str| refused.contains(&line.split(' ').next().unwrap());
    assert!(output.lines().count() == 15 && output.lines().all(is_refused), "{output}");
    let rule = format!("--allow [{FAR_V6}]:80 --allow {FAR_V4}:9000");
    let script = format!(
        "python3 egress.py send {FAR_V6} 80 'GET / HTTP/1.0\\r\\n\\r\\n'; python3 egress.py send {FAR_V4} 443 x"
    );
    let output = world.lone_guest(&rule, &script).succeed(LONG);
    let lines: Vec<&str> = output.lines().collect();
    assert!(lines[0].starts_with("answered") && is_refused(lines[1]), "{output}");
    drop((server.end(), sixth.end()));
}

#[test]
fn command_that_rewrites_its_policy_or_takes_another_address_changes_nothing() {
    require!(CURL, OPENSSL, DNSMASQ, DIG, Need::Root);
    let net = net!();
    std::fs::write(net.world.file("own.toml"), "allow = ['a.test:80']\n").unwrap();
    let program = net.world.lab.program().to_owned();
    // The neighbour's policy allows the address; its guest runs meanwhile.
    let neighbour = net.world.lone_guest(
        &format!("--name neighbour --allow {OTHER_V4}:80"),
        &format!("curl -sS --max-time 20 http://{OTHER_V4}/; exec sleep 1000"),
    );
    neighbour.wait_for_output("page");
    let spoofed = "203.0.113.77";
    let script = format!(
        "curl -sS --max-time 20 http://a.test/; echo \"allow = ['*.test', '{OTHER_V4}']\" > own.toml; set +e; \
         curl -sS --max-time 20 http://{OTHER_V4}/; echo \"other $?\"; dig +short +tries=1 +time=5 other.test; \
         {program} policy set own own.toml; echo \"set $?\"; \
         {program} policy set neighbour own.toml; echo \"set $?\"; \
         ip addr add {spoofed}/32 dev up0; ip route replace default dev up0 src {spoofed} onlink; \
         curl -sS --max-time 2 --interface {spoofed} http://{OTHER_V4}/; echo \"spoofed $?\""
    );
    let output = net.guest("--name own --policy own.toml", &script);
    assert_eq!(output.matches("page\n").count(), 1, "{output}");
    assert!(output.contains("other 7\n"), "{output}");
    assert_eq!(output.matches("set 125\n").count(), 2, "{output}");
    // A packet from an address that is not the guest's is dropped: 28 is curl's own limit, 7 and 45 are refusals.
    let is_lost = |status| output.contains(&format!("spoofed {status}\n"));
    assert!([7, 28, 45].into_iter().any(is_lost), "{output}");
    assert!(!net.was_asked_for("other.test"), "a denied name left the host");
    drop(neighbour.end());
    net.end();
}

#[test]
fn neighbours_address_on_the_switch_opens_nothing_of_its_policy() {
    require!(CURL, OPENSSL, DNSMASQ, PING, Need::Root);
    let net = net!();
    let neighbour = net.world.plain_guest(
        &format!("--switch shared --name neighbour --address 10.77.0.7/24 --allow {OTHER_V4}:80"),
        &format!("curl -sS --max-time 20 http://{OTHER_V4}/; exec sleep 1000"),
    );
    neighbour.wait_for_output("page");
    // Over its uplink and over the switch, where the neighbour is no router.
    let script = format!(
        "curl -sS --max-time 20 http://a.test/; ping -c 1 -W 10 10.77.0.7 >/dev/null && echo neighbour; set +e; \
         ip addr add 10.77.0.7/32 dev up0; \
         curl -sS --max-time 2 --interface 10.77.0.7 http://{OTHER_V4}/; echo \"spoofed $?\"; \
         ip addr del 10.77.0.7/32 dev up0; ip route add {OTHER_V4} via 10.77.0.7 dev eth0; \
         curl -sS --max-time 2 http://{OTHER_V4}/; echo \"routed $?\"; ip route del {OTHER_V4}; \
         curl -sS --max-time 20 http://{OTHER_V4}/; echo \"own $?\"; curl -sS --max-time 20 http://a.test/"
    );
    let options = "--switch shared --name own --address 10.77.0.8/24 --allow a.test:80";
    let finished = net.world.plain_guest(options, &script).finish(LONG);
    let output = format!("{}{}", finished.stdout, finished.stderr);
    assert_eq!(output.matches("page\n").count(), 2, "{output}");
    assert!(output.contains("neighbour\n") && output.contains("own 7\n"), "{output}");
    for what in ["spoofed", "routed"] {
        let is_lost = |status| output.contains(&format!("{what} {status}\n"));
        assert!([7, 28, 45].into_iter().any(is_lost), "{what}: {output}");
    }
    drop(neighbour.end());
    net.end();
}

#[test]
fn totals_of_verdicts_are_in_ps_and_in_the_summary() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    let script = format!(
        "set +e; curl -sS --max-time 20 http://a.test/; curl -sS http://b.test/; \
         curl -sS --max-time 20 http://{OTHER_V4}/; curl -sS -H 'Host: b.test' http://a.test/; \
         echo done; while ! test -e stop; do sleep 0.1; done"
    );
    let guest = net.world.lone_guest("-v --name counted --allow a.test:80", &script);
    guest.wait_for_output("done");
    let program = net.world.lab.program().to_owned();
    // The list is complete without totals of an uplink that is late.
    let mut listed = String::new();
    let mut guests = serde_json::Value::Null;
    let has_totals = || {
        listed = net.world.host(&[&program, "ps", "--json"]).succeed(LONG);
        guests = serde_json::from_str(&listed).unwrap();
        guests[0]["egress"].is_object()
    };
    assert!(eventually(LONG, has_totals), "{listed}");
    let totals = &guests[0]["egress"];
    let count = |name: &str| totals[name].as_u64().unwrap();
    assert!(guests[0]["name"] == "counted" && count("connections_allowed") == 2, "{listed}");
    assert!(count("connections_denied") == 1 && count("hellos_denied") == 1, "{listed}");
    assert!(count("queries_allowed") > 0 && count("queries_refused") > 0, "{listed}");
    assert!(count("answers_refused") == 0 && count("pins") == 1, "{listed}");
    let denied = "ringfence_guest_egress_connections_total{guest=\"counted\",";
    let is_denied = |line: &str| line.starts_with(denied) && line.ends_with("verdict=\"deny\"} 1");
    let metrics = || net.world.host(&[&program, "ps", "--metrics"]).succeed(LONG);
    assert!(eventually(LONG, || metrics().lines().any(is_denied)), "{}", metrics());
    assert!(metrics().ends_with("# EOF\n"));
    let status = net.world.host(&[&program, "status", "counted"]).succeed(LONG);
    assert!(status.contains("egress:         2 connections allowed, 1 denied"), "{status}");
    std::fs::write(net.world.file("stop"), "").unwrap();
    let finished = guest.finish(LONG);
    let summary = "egress: 2 connections allowed, 1 denied, 1 ended by their first bytes";
    assert!(finished.stderr.contains(summary), "{}", finished.stderr);
    let plain = net.world.lone_guest("--name plain", "echo up; exec sleep 1000");
    plain.wait_for_output("up");
    let listed = net.world.host(&[&program, "ps", "--json"]).succeed(LONG);
    let guests: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert!(guests[0]["name"] == "plain" && guests[0]["egress"].is_null(), "{listed}");
    drop(plain.end());
    net.end();
}

/// Client that opens TLS connections to one address under two names, and one that shows its name after the policy was replaced.
const SHOW: &str = "
import socket, ssl, sys
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
address = socket.gethostbyname('a.test')
def wrapped(connection, name):
    # Python takes a reset for an end, unless an end without a notice is an error.
    return context.wrap_socket(connection, server_hostname=name, suppress_ragged_eofs=False)
opened = [socket.create_connection((address, 443), 20) for _ in range(3)]
shown = {name: wrapped(opened.pop(), name) for name in ('b.test', 'a.test')}
print('open', flush=True)
def attempt(name, action):
    try:
        print(name, action(), flush=True)
    except TimeoutError:
        print(name, 'stays', flush=True)
    except OSError as error:
        print(name, 'reset', flush=True)
attempt('shown', lambda: shown['b.test'].recv(1))
attempt('late', lambda: wrapped(opened.pop(), 'b.test').version())
def request():
    shown['a.test'].sendall(b'GET / HTTP/1.1\\r\\nHost: a.test\\r\\n\\r\\n')
    answer = b''
    while not answer.endswith(b'page\\n'):
        answer += shown['a.test'].recv(4096) or b'page\\n'
    return answer.decode().split()[0] + ' answer'
attempt('allowed', request)
";

#[test]
fn replaced_policy_ends_connections_that_show_or_may_show_a_denied_name() {
    require!(OPENSSL, DNSMASQ);
    let net = net!();
    std::fs::write(net.world.file("show.py"), SHOW).unwrap();
    std::fs::write(net.world.file("new.toml"), "allow = ['a.test:443']\n").unwrap();
    for (options, allowed) in [
        ("--allow *.test", "allowed HTTP/1.1 answer\n"),
        ("--deny c.test", "allowed HTTP/1.1 answer\n"),
        // Nobody has read which name the connections show.
        ("--egress-log log", "allowed reset\n"),
        ("", "allowed reset\n"),
    ] {
        let guest =
            net.world.lone_guest(&format!("--name shows {options}"), "exec python3 show.py");
        guest.wait_for_output("open\n");
        net.policy("set shows new.toml");
        let output = guest.finish(LONG).stdout;
        for line in ["shown reset\n", "late reset\n", allowed] {
            assert!(output.contains(line), "{options}: {line}: {output}");
        }
    }
    net.end();
}
