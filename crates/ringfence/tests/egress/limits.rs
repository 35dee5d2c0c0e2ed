//! Limits of rules on bytes and connections, by real programs.

use crate::support::egress::{CURL, DNSMASQ, LONG, OPENSSL};
use crate::support::eventually;
use crate::{net, require};

/// Opens connections to a counter of bytes, and sends datagrams to an echo.
const CLIENT: &str = "
import socket, time
def connect():
    try:
        return socket.create_connection(('other.test', 9000), 20)
    except ConnectionRefusedError:
        return None
first = connect()
print('second', connect() is None)
first.close()
while connect() is None:
    time.sleep(0.05)
print('after the first')
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.settimeout(20)
sender.connect(('a.test', 443))
echoed = 0
try:
    for _ in range(100):
        sender.send(bytes(1000))
        echoed += len(sender.recv(2000))
except OSError as error:
    print('datagrams', echoed, type(error).__name__)
";

#[test]
fn bytes_and_connections_of_a_guest_end_at_the_limits_of_its_rules() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    let rules = "allow = ['a.test:80 bytes=200K', 'other.test:80 connections=2', 'other.test:9000 at-once=1', \
                 'a.test:443/udp bytes=8500']\n";
    std::fs::write(net.world.file("p.toml"), rules).unwrap();
    std::fs::write(net.world.file("client.py"), CLIENT).unwrap();
    let script = "set +e; head -c 100000 /dev/zero > part; head -c 10000000 /dev/zero > whole; \
         curl -sS --max-time 60 --data-binary @part http://a.test/; \
         curl -sS --max-time 60 -H Expect: --data-binary @whole http://a.test/; echo \"upload $?\"; \
         curl -sS --max-time 60 http://a.test/; echo \"used up $?\"; \
         for i in 1 2 3; do curl -sS --max-time 60 http://other.test/; echo \"other $?\"; done; \
         python3 client.py; echo ready; exec sleep 60";
    let guest = net.world.lone_guest("--name bounded --policy p.toml --egress-log log", script);
    guest.wait_for_output("ready\n");
    let output = format!("{}{}", guest.stdout.text(), guest.stderr.text());
    assert!(output.starts_with("received 100000\n"), "{output}");
    // The reset meets curl while it sends or while it receives.
    assert!(["upload 55\n", "upload 56\n"].iter().any(|line| output.contains(line)), "{output}");
    assert!(output.contains("used up 7\n"), "{output}");
    assert_eq!(output.matches("page\nother 0\n").count(), 2, "{output}");
    assert!(output.contains("other 7\nsecond True\nafter the first\n"), "{output}");
    assert!(output.contains("datagrams 4000 "), "{output}");
    let announced = "guest bounded: denied other.test:80 (198.51.100.2), limit on connections of allow other.test:80 connections=2";
    assert!(eventually(LONG, || guest.stderr.text().contains(announced)), "{output}");

    let reasons = [
        "limit on bytes of allow a.test:80 bytes=200K (p.toml:1)",
        "limit on connections of allow other.test:80 connections=2 (p.toml:1)",
        "limit on connections at once of allow other.test:9000 at-once=1 (p.toml:1)",
        "limit on bytes of allow a.test:443/udp bytes=8500 (p.toml:1)",
    ];
    let all_are_listed = || {
        let listed = net.policy("why bounded");
        reasons.iter().all(|reason| listed.contains(reason))
    };
    assert!(eventually(LONG, all_are_listed), "{}", net.policy("why bounded"));
    let program = net.world.lab.program().to_owned();
    let status = net.world.host(&[&program, "status", "bounded", "--json"]).succeed(LONG);
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["egress"]["limits_reached"], 2, "{status}");
    let log = net.world.lab.read("log");
    let ended = log.lines().find(|line| line.contains("\"close\"") && line.contains("\"deny\""));
    assert!(ended.is_some_and(|line| line.contains("bytes_out")), "{log}");
    let received = net.servers.stdout.text();
    assert!(received.matches("datagram 1000").count() == 4, "{received}");
    drop(guest.end());
    for (option, rule) in [("--allow", "a.test bytes=0"), ("--deny", "a.test bytes=1")] {
        let words = [&*program, "run", option, rule, "--", "true"];
        let wrong = net.world.host(&words).finish(LONG);
        assert!(wrong.status == Some(125) && wrong.stderr.contains('^'), "{}", wrong.stderr);
    }
    net.end();
}
