//! Upstream proxies: a guest reaches other hosts by a proxy alone, by name, and not the proxy itself.

use crate::net;
use crate::require;
use crate::support::egress::{CURL, DNSMASQ, LONG, Net, OPENSSL, OTHER_V4};
use crate::support::needs::Need;
use crate::support::world::{FAR_V4, OUTSIDE_V4};
use crate::support::{Running, eventually};

/// Proxies outside: each mode of `proxy.py` at one port.
const PROXIES: &str = "http:3128 http:3129:user:pass:word socks:1080 socks:1081:user:pass:word slow:3130 joined:3131 garbage:3132 \
     endless:3133 closing:3134 silent:3135";

/// Starts the proxies. The host has neither a name server nor a route to other hosts.
fn proxies(net: &Net) -> Running {
    std::fs::write(net.world.file("proxy.py"), include_str!("../support/proxy.py")).unwrap();
    std::fs::write(net.world.file("password"), "user:pass:word\n").unwrap();
    std::fs::write(net.world.file("wrong"), "user:word\n").unwrap();
    net.world.name_servers(&[]);
    net.world.host(&["ip", "route", "del", "default"]).succeed(LONG);
    let mut words = vec!["python3", "proxy.py", OUTSIDE_V4];
    words.extend(PROXIES.split_ascii_whitespace());
    let proxies = net.world.outside(&words);
    proxies.wait_for_output("listening");
    proxies
}

/// Returns the option for the proxy at a port.
fn by(scheme: &str, port: u16) -> String {
    format!("--upstream-proxy {scheme}://{OUTSIDE_V4}:{port}")
}

/// Reads the greeting of a server that speaks first.
const GREETING: &str = "python3 -c 'import socket; s = socket.create_connection((\"a.test\", 22), 60); print(s.recv(99)); \
     s.sendall(b\"client\"); print(s.recv(99))'; ";

#[test]
fn programs_reach_names_that_only_the_proxy_knows() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    let proxies = proxies(&net);
    let script = format!(
        "curl -sS --max-time 60 http://only.proxy.test/; \
         curl -sS --max-time 60 --cacert cert.pem https://a.test/; \
         head -c 4000000 /dev/zero | curl -sS --max-time 60 --data-binary @- http://a.test/; \
         curl -sS --max-time 60 http://{OTHER_V4}/; {GREETING}"
    );
    let password = "--upstream-proxy-credentials password";
    for options in [
        by("http", 3128),
        format!("{} {password}", by("http", 3129)),
        by("http", 3130),
        by("socks5h", 1080),
        format!("{} {password}", by("socks5h", 1081)),
    ] {
        let output = net.guest(&options, &script);
        assert_eq!(
            output, "page\npage\nreceived 4000000\npage\nb'SSH-2.0-server\\r\\n'\nb'client'\n",
            "{options}"
        );
    }
    // The server's first bytes come with the proxy's answer.
    assert_eq!(net.guest(&by("http", 3131), GREETING), "b'SSH-2.0-server\\r\\n'\nb'client'\n");
    // On a switch, the programs ask the guest's own stub.
    let on_switch =
        net.world.guest(&by("http", 3128), "curl -sS --max-time 60 http://only.proxy.test/");
    assert_eq!(on_switch.succeed(LONG), "page\n");
    for target in ["only.proxy.test:80", "a.test:443", "a.test:22", &format!("{OTHER_V4}:80")] {
        let asked = proxies.stdout.text().matches(&format!("asked {target}\n")).count();
        assert!(asked >= 5, "{target}: {asked}");
    }
    assert!(!net.was_asked_for("a.test"), "no name server is asked");
    drop(proxies.end());
    net.end();
}

#[test]
fn policy_decides_before_the_proxy_is_asked_and_the_proxy_is_out_of_reach() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    let proxies = proxies(&net);
    let curl = "curl -sS --max-time 60";
    let script = format!(
        "{curl} --cacert cert.pem https://a.test/; set +e; \
         {curl} http://only.proxy.test/; echo \"name $?\"; \
         {curl} http://a.test/; echo \"port $?\"; \
         {curl} http://{FAR_V4}/; echo \"literal $?\"; \
         {curl} http://169.254.169.254/; echo \"metadata $?\"; \
         {curl} http://0xa9fea9fe/; echo \"number $?\"; \
         ip=$(python3 -c 'import socket; print(socket.gethostbyname(\"a.test\"))'); echo \"substitute $ip\"; \
         {curl} --resolve b.test:443:$ip https://b.test/; echo \"hello $?\"; \
         {curl} -p -x http://{OUTSIDE_V4}:3128 http://only.proxy.test/; echo \"proxy $?\"; \
         {curl} -x socks5h://{OUTSIDE_V4}:1080 http://only.proxy.test/; echo \"other $?\"; \
         python3 egress.py datagram {FAR_V4} 443; python3 egress.py datagram {OUTSIDE_V4} 53; \
         ping -c 1 -W 60 {FAR_V4} >/dev/null 2>&1; echo \"ping $?\"; echo done; sleep 60"
    );
    let options =
        format!("--name strict {} --allow a.test:443 --allow {OUTSIDE_V4}:3128", by("http", 3128));
    let guest = net.world.lone_guest(&options, &script);
    guest.wait_for_output("done\n");
    let output = guest.stdout.text();
    assert_eq!(output.matches("page\n").count(), 1, "{output}");
    // curl: 6 the name does not resolve, 7 the connection is refused, 35 and 56 it is reset.
    for line in [
        "name 6",
        "port 7",
        "literal 7",
        "metadata 7",
        "number 7",
        "substitute 198.18.1.0",
        "hello 35",
        "proxy 7",
        "other 7",
        "ping 1",
    ] {
        assert!(output.contains(&format!("{line}\n")), "{line}: {output}");
    }
    let refused = ["ConnectionRefusedError ", "PermissionError ", "OSError "];
    let of_datagrams =
        output.lines().filter(|line| refused.iter().any(|start| line.starts_with(start)));
    assert_eq!(of_datagrams.count(), 2, "{output}");
    let asked: Vec<String> = proxies.stdout.text().lines().map(str::to_owned).collect();
    assert!(asked[1..].iter().all(|line| line == "asked a.test:443"), "{asked:?}");
    let listed = net.policy("why strict");
    for reason in [
        "only the uplink itself connects to the upstream proxy",
        "the upstream proxy carries TCP alone",
    ] {
        assert!(listed.contains(reason), "{reason}: {listed}");
    }
    let status = net.world.host(&[net.world.lab.program(), "status", "strict"]).succeed(LONG);
    let counted = "; upstream proxy: 0 connections failed, 3 packets refused\n";
    assert!(status.contains(counted), "{status}");
    drop(guest.end());
    drop(proxies.end());
    net.end();
}

#[test]
fn failure_of_the_proxy_is_a_refused_connection_with_its_reason() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    let proxies = proxies(&net);
    let wrong = "--upstream-proxy-credentials wrong";
    for (options, name, reason) in [
        (by("http", 3128), "forbidden.test", "forbids this destination (HTTP status 403)"),
        (by("http", 3128), "unknown.test", "cannot reach the destination (HTTP status 502)"),
        (by("http", 3129), "a.test", "see --upstream-proxy-credentials (HTTP status 407)"),
        (format!("{} {wrong}", by("http", 3129)), "a.test", "(HTTP status 407)"),
        (by("http", 3132), "a.test", "answer is not HTTP/1"),
        (by("http", 3133), "a.test", "answer is too long"),
        (by("http", 3134), "a.test", "has closed the connection"),
        (by("http", 1080), "a.test", "has closed the connection"),
        (by("http", 9999), "a.test", "cannot be reached: Connection refused"),
        (by("socks5h", 1080), "forbidden.test", "forbids this destination (SOCKS reply 2)"),
        (by("socks5h", 1080), "unknown.test", "cannot reach the destination (SOCKS reply 4)"),
        (by("socks5h", 1081), "a.test", "asks for credentials"),
        (format!("{} {wrong}", by("socks5h", 1081)), "a.test", "refuses the credentials"),
        (by("socks5h", 3132), "a.test", "answer is not SOCKS version 5"),
    ] {
        let script = format!(
            "set +e; curl -sS --max-time 60 http://{name}/; echo \"curl $?\"; echo done; sleep 60"
        );
        let guest = net.world.lone_guest(&format!("--name failing {options}"), &script);
        guest.wait_for_output("done\n");
        assert!(guest.stdout.text().contains("curl 7\n"), "{options}: {}", guest.stdout.text());
        let is_told = || guest.stderr.text().contains(reason);
        assert!(eventually(LONG, is_told), "{options}: {}", guest.stderr.text());
        assert!(!guest.stderr.text().contains('\x1b'), "bytes of the proxy are not shown");
        let listed = net.policy("why failing");
        assert!(listed.starts_with(&format!("{name}:80 ")) && listed.contains(reason), "{listed}");
        drop(guest.end());
    }
    drop(proxies.end());
    net.end();
}

#[test]
fn proxy_on_the_host_is_tried_at_each_address_of_its_name_and_stays_out_of_reach() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    let outside = proxies(&net);
    // The proxy of the host has a way to the outside, as one that listens at the loopback has.
    net.world.host(&["ip", "route", "add", "default", "via", OUTSIDE_V4]).succeed(LONG);
    net.world.etc("hosts", "::1 localhost proxy.host\n127.0.0.1 localhost proxy.host\n");
    let proxy = net.world.host(&["python3", "proxy.py", "127.0.0.1", "http:3128"]);
    proxy.wait_for_output("listening");
    let curl = "curl -sS --max-time 60";
    let script = format!(
        "{curl} http://only.proxy.test/; set +e; \
         {curl} -p -x http://192.0.2.99:3128 http://a.test/; echo \"loopback $?\"; \
         {curl} -p -x http://192.0.2.2:3128 http://a.test/; echo \"own $?\"; \
         {curl} -p -x http://proxy.example:3128 http://a.test/; echo \"done $?\""
    );
    let options = "--upstream-proxy http://proxy.host:3128 --host-loopback 192.0.2.99 --allow-local 192.0.2.2";
    let output = net.guest(options, &script);
    assert_eq!(output, "page\nloopback 7\nown 7\ndone 7\n");
    drop((proxy.end(), outside.end()));
    net.end();
}

#[test]
fn namespaces_of_pasta_and_slirp4netns_reach_names_by_the_proxy() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    let proxies = proxies(&net);
    for name in ["pasta", "slirp4netns"] {
        let program = net.world.lab.program().to_owned();
        std::os::unix::fs::symlink(program, net.world.file(name)).unwrap();
    }
    let proxy = by("http", 3128);
    let requests = "curl -sS --max-time 60 http://only.proxy.test/; curl -s --max-time 60 http://b.test/ || echo denied $?";
    let pasta = format!(
        "echo nameserver 198.18.0.53 > servers; mount --bind servers /etc/resolv.conf; \
         ./pasta --config-net {proxy} --allow only.proxy.test:80 -- sh -ec '{requests}'"
    );
    let slirp = format!(
        "touch netns; unshare --net=netns true; \
         ./slirp4netns -c -r 3 --netns-type=path {proxy} --allow only.proxy.test:80 $PWD/netns tap0 3>ready & slirp=$!; \
         until [ -s ready ]; do sleep 0.05; done; \
         echo nameserver 10.0.2.3 > servers; mount --bind servers /etc/resolv.conf; \
         nsenter --net=netns sh -ec '{requests}'; kill $slirp; wait $slirp"
    );
    for script in [pasta, slirp] {
        let words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", &script];
        let output = net.world.host(&words).succeed(LONG);
        assert_eq!(output, "page\ndenied 6\n", "{script}");
    }
    assert!(!proxies.stdout.text().contains("b.test"));
    drop(proxies.end());
    net.end();
}

#[test]
fn virtual_machine_reaches_names_by_the_proxy() {
    require!(CURL, OPENSSL, DNSMASQ, Need::Program("busybox", "busybox"));
    let net = net!();
    let proxies = proxies(&net);
    super::fronts::link_program(&net, "passt");
    super::fronts::prepare_machine(&net);
    let options = format!(
        "{} --upstream-proxy-credentials password --allow only.proxy.test:80 --allow a.test:22 \
         --one-off --foreground -s vm.socket",
        by("socks5h", 1081)
    );
    let words: Vec<&str> = ["./passt"].into_iter().chain(options.split_whitespace()).collect();
    let front = net.world.host(&words);
    front.wait_for_error("listens at");
    let script = format!(
        "ip link set eth0 up; busybox udhcpc -i eth0 -n -q -f -s ./on-lease >lease 2>/dev/null
         sed -n 's/^dns \\([^ ]*\\).*/nameserver \\1/p' lease > servers; mount --bind servers /etc/resolv.conf
         curl -sS --max-time 60 http://only.proxy.test/; {GREETING} set +e
         curl -s --max-time 60 http://b.test/; echo \"name $?\"
         curl -s --max-time 60 http://{OTHER_V4}/; echo \"literal $?\"
         curl -s -p -x http://{OUTSIDE_V4}:3128 --max-time 60 http://only.proxy.test/; echo \"proxy $?\"
         python3 egress.py datagram {FAR_V4} 443"
    );
    let machine = ["unshare", "--mount", "python3", "machine.py", "vm.socket", &script];
    let output = net.world.host(&machine).succeed(LONG);
    let expected = "page\nb'SSH-2.0-server\\r\\n'\nb'client'\nname 6\nliteral 7\nproxy 7\n";
    assert!(output.starts_with(expected), "{output}");
    let refused = ["ConnectionRefusedError ", "PermissionError ", "OSError "];
    let last = output.lines().last().unwrap();
    assert!(refused.iter().any(|start| last.starts_with(start)), "{output}");
    let finished = front.finish(LONG);
    assert!(finished.stderr.contains("passt: egress: "), "{}", finished.stderr);
    let asked = proxies.stdout.text();
    assert!(asked.contains("asked only.proxy.test:80\n") && !asked.contains("b.test"), "{asked}");
    drop(proxies.end());
    net.end();
}
