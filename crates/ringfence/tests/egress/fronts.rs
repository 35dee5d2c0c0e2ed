//! Egress policies of `ringfence pasta`, `slirp4netns` and `passt`: containers' namespaces, a command and a virtual machine
//! reach the names of a policy file and nothing else, and their verdicts are recorded.

use crate::support::egress::{CURL, DNSMASQ, LONG, Net, OPENSSL, OTHER_V4};
use crate::support::needs::Need;
use crate::support::world::{FAR_V4, Families, World};
use crate::support::{MOMENT, WITH_FULL_PIPE, eventually};
use crate::{net, require};

/// Name server's address in Podman's containers.
pub(super) const DNS_FORWARD: &str = "169.254.1.1";

/// Runs `ringfence policy` in the user namespace of the process whose number is in a file, as `podman unshare` does. Returns its
/// output.
pub(super) fn policy_inside(net: &Net, words: &str) -> String {
    let (pid, program) = (net.world.lab.read("pid"), net.world.lab.program());
    let enter = format!("nsenter --user --preserve-credentials --target {}", pid.trim());
    let words = format!("{enter} {program} policy {words}");
    net.world.host(&words.split(' ').collect::<Vec<_>>()).succeed(LONG)
}

/// Asserts that `ringfence policy why` lists what [`requests`] were denied, once they are done.
pub(super) fn check_list_of_denials(listed: impl Fn() -> String) {
    let denials = ["b.test: ", "to allow it: --allow b.test:443", "198.51.100.2:80: "];
    let all_are_listed = || denials.iter().all(|denial| listed().contains(denial));
    assert!(eventually(LONG, all_are_listed), "{}", listed());
}

/// Requests of a guest. The last lines tell the statuses of curl.
pub(super) fn requests() -> String {
    format!(
        "curl -sS --max-time 20 --cacert cert.pem https://a.test/; set +e
         curl -sS --max-time 20 --cacert cert.pem https://b.test/; echo \"b $?\"
         curl -sS --max-time 20 http://{OTHER_V4}/; echo \"raw $?\"
         curl -sS --max-time 20 --resolve b.test:443:{FAR_V4} https://b.test/; echo \"shared $?\"\n"
    )
}

/// Asserts that the requests had their outcomes, and that no denied name left the host.
pub(super) fn check(net: &Net, output: &str) {
    assert_eq!(output.matches("page\n").count(), 1, "{output}");
    for line in ["b 6\n", "raw 7\n", "shared 35\n"] {
        assert!(output.contains(line), "{line}: {output}");
    }
    net.wait_for_question("a.test");
    assert!(!net.was_asked_for("b.test"));
}

/// Returns the records of a file, once the last denied request is among them.
fn records(net: &Net, file: &str, guest: &str) -> Vec<serde_json::Value> {
    let read = || -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(net.world.file(file)).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let is_denied = |line: &serde_json::Value| line["verdict"] == "deny" && line["sni"] == "b.test";
    assert!(eventually(MOMENT, || read().iter().any(is_denied)), "{:?}", read());
    let lines = read();
    assert!(lines.iter().all(|line| line["guest"] == guest), "{lines:?}");
    lines
}

pub(super) fn link_program(net: &Net, name: &str) {
    let program = net.world.lab.program().to_owned();
    std::os::unix::fs::symlink(program, net.world.file(name)).unwrap();
    std::fs::write(net.world.file("p.toml"), "allow = ['a.test:80,443']\n").unwrap();
}

#[test]
fn container_has_the_policy_that_podman_passes_and_its_published_ports() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    link_program(&net, "pasta");
    let script = format!(
        "touch netns; unshare --net=netns true
         # As Podman does with pasta_options = [\"--policy\", \"p.toml\", \"--egress-log\", \"log\"].
         ./pasta --config-net --policy p.toml --egress-log log -P pid -t 8080-8080:80-80 --dns-forward {DNS_FORWARD} \
             -u none -T none -U none --no-map-gw --log-file messages --netns $PWD/netns </dev/null >said 2>&1
         echo nameserver {DNS_FORWARD} > servers; mount --bind servers /etc/resolv.conf
         cat > inside.sh <<'END'\n{}END
         nsenter --net=netns sh -ec '. ./inside.sh'
         nsenter --net=netns python3 -m http.server 80 >/dev/null 2>&1 & web=$!
         until [ -e asked ] && [ -s second ]; do nsenter --net=netns curl -s --max-time 20 http://other.test/ > second || :; sleep 0.05; done
         nsenter --net=netns curl -s --max-time 20 http://a.test/ >> second || echo \"second $?\" >> second
         kill $web; wait $web || :
         umount -l netns; rm netns
         until grep egress: messages; do sleep 0.05; done",
        requests()
    );
    let words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", &script];
    let container = net.world.host(&words);
    let fetch = "for i in $(seq 400); do curl -sS --max-time 5 -o got http://192.0.2.2:8080/ && exit 0; sleep 0.1; done; exit 1";
    net.world.outside(&["sh", "-c", fetch]).succeed(LONG);
    // The session is in another user namespace than this command, as that of a container of Podman.
    check_list_of_denials(|| policy_inside(&net, "why netns"));
    if rustix::process::geteuid().is_root() {
        // From the initial user namespace, as the user's shell does with a container of Podman.
        check_list_of_denials(|| net.policy("why netns"));
    }
    let guests = policy_inside(&net, "guests");
    assert!(
        guests.contains("netns ") && guests.contains("  pasta    1 rule (p.toml)\n"),
        "{guests}"
    );
    let (pid, program) = (net.world.lab.read("pid"), net.world.lab.program());
    let enter = ["nsenter", "--user", "--preserve-credentials", "--target", pid.trim()];
    let watch = net.world.host(&[&enter[..], &[program, "policy", "watch", "netns"]].concat());
    watch.wait_for_output("other.test");
    std::fs::write(net.world.file("q.toml"), "allow = ['other.test:80']\n").unwrap();
    assert!(policy_inside(&net, "set netns q.toml").contains("1 rules of q.toml"));
    let allowed = r#""verdict":"allow","name":"other.test""#;
    watch.wait_for_output(allowed);
    assert!(policy_inside(&net, "guests").contains("1 rule (q.toml)"));
    std::fs::write(net.world.file("asked"), "").unwrap();
    let output = container.succeed(LONG);
    check(&net, &output);
    let said = std::fs::read_to_string(net.world.file("said")).unwrap();
    assert!(said.is_empty(), "{said}");
    assert!(
        output.contains(" connections allowed, 1 denied, 1 ended by their first bytes"),
        "{output}"
    );
    assert_eq!(net.world.lab.read("second"), "page\nsecond 6\n");
    let log = net.world.lab.read("messages");
    assert!(log.contains("denied b.test, no rule; `--allow b.test:443`\n"), "{log}");
    // The verdicts end with the session.
    watch.succeed(LONG);
    records(&net, "log", "netns");
    net.end();
}

#[test]
fn container_of_slirp4netns_has_the_policy_of_its_options() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    link_program(&net, "slirp4netns");
    let script = format!(
        "touch netns; unshare --net=netns true
         ./slirp4netns --disable-host-loopback --mtu=65520 -c -r 3 --netns-type=path --policy p.toml --egress-log log \
             $PWD/netns tap0 3>ready & slirp=$!; echo $slirp > pid
         until [ -s ready ]; do sleep 0.05; done
         echo nameserver 10.0.2.3 > servers; mount --bind servers /etc/resolv.conf
         cat > inside.sh <<'END'\n{}END
         nsenter --net=netns sh -ec '. ./inside.sh'
         until [ -e listed ]; do sleep 0.05; done; kill $slirp; wait $slirp",
        requests()
    );
    let words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", &script];
    let container = net.world.host(&words);
    container.wait_for_output("shared 35");
    check_list_of_denials(|| policy_inside(&net, "why netns"));
    std::fs::write(net.world.file("listed"), "").unwrap();
    check(&net, &container.succeed(LONG));
    records(&net, "log", "netns");
    let words = ["./slirp4netns", "--allow", "b@d", "1", "tap0"];
    let wrong = net.world.host(&words).finish(LONG);
    assert!(wrong.status == Some(1) && wrong.stderr.contains('^'), "{}", wrong.stderr);
    net.end();
}

#[test]
fn command_of_pasta_asks_the_name_servers_of_the_host_under_a_policy() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    link_program(&net, "pasta");
    let start = |options: &str, script: &str| {
        let words = ["./pasta", "--config-net"].into_iter().chain(options.split_whitespace());
        net.world.host(&words.chain(["--", "sh", "-ec", script]).collect::<Vec<_>>())
    };
    // The namespace has the host's resolv.conf; --dns-forward is not given.
    let finished = start("--allow a.test:443 --egress-log -", &requests()).finish(LONG);
    check(&net, &finished.stdout);
    let denied = r#""reason":"no rule""#;
    assert!(finished.stderr.contains(denied), "{}", finished.stderr);
    assert!(finished.stderr.contains("pasta: egress: 2 connections allowed, 1 denied"));
    // Root's session has given up root's rights.
    let running = start("--deny b.test", "getent hosts b.test || echo ready; exec sleep 1000");
    running.wait_for_output("ready");
    assert!(eventually(MOMENT, || net.policy("why pasta").contains("b.test: ")));
    std::fs::write(net.world.file("q.toml"), "deny = ['c.test']\n").unwrap();
    assert!(net.policy("set pasta q.toml").contains("1 rules of q.toml"));
    running.end();
    let learned = start("--quiet --egress-learn learned.toml", "curl -sS http://a.test/");
    assert_eq!(learned.finish(LONG).stdout, "page\n");
    let learned = std::fs::read_to_string(net.world.file("learned.toml")).unwrap();
    assert!(learned.contains("\"a.test:80/tcp\""), "{learned}");
    // Wrong options end it before anything starts.
    let wrong = start("--allow b@d", "true").finish(LONG);
    assert!(wrong.status == Some(1) && wrong.stderr.contains('^'), "{}", wrong.stderr);
    net.end();
}

/// Client that asks the session whose socket is given for its description.
const CLIENT: &str = "
import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.settimeout(10)
try:
    s.connect(sys.argv[1])
    s.send(b'\"Describe\"')
    print(s.recv(4096).decode() or 'nothing')
except OSError as error:
    print(type(error).__name__)";

/// Program that listens in the place of a session.
const FAKE: &str = "
import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(sys.argv[1])
s.listen()
print('listens', flush=True)
print(s.accept()[0].recv(4096))";

#[test]
fn process_of_other_namespaces_reaches_no_session_and_stands_in_for_none() {
    let Some(world) = World::new(Families::V4) else { return };
    let program = world.lab.program().to_owned();
    let words = [&*program, "pasta", "--config-net", "--deny", "b.test", "--", "sleep", "1000"];
    let session = world.host(&words);
    let socket = || {
        let listed = std::fs::read_dir(world.lab.runtime_dir()).into_iter().flatten();
        let mut paths = listed.map(|entry| entry.unwrap().path());
        // One that does not listen yet has another name.
        paths.find(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            name.ends_with(".session") && !name.starts_with('.')
        })
    };
    assert!(eventually(MOMENT, || socket().is_some()));
    let socket = socket().unwrap();
    let ask = |namespaces: &[&str]| {
        let client = ["python3", "-c", CLIENT, socket.to_str().unwrap()];
        world.host(&[namespaces, &client].concat()).succeed(MOMENT)
    };
    let described =
        "{\"Session\":{\"name\":\"pasta\",\"program\":\"pasta\",\"policy\":\"1 rule (--deny)\"}}\n";
    assert_eq!(ask(&[]), described);
    let other = ["unshare", "--user", "--map-root-user", "--pid", "--fork"];
    // The second one is as a command of `pasta --no-pidns`, the third one as a container of root without user namespaces.
    for namespaces in [&other[..], &other[..3], &["unshare", "--pid", "--fork"]] {
        let refused = ask(namespaces);
        let kinds = ["nothing\n", "ConnectionResetError\n", "BrokenPipeError\n"];
        assert!(kinds.contains(&&*refused), "{namespaces:?}: {refused}");
    }

    let path = world.lab.runtime_dir().join("1-1.session");
    let fake = ["python3", "-c", FAKE, path.to_str().unwrap()];
    let fake = world.host(&[&other[..], &fake].concat());
    fake.wait_for_output("listens");
    let finished = world.host(&[&program, "policy", "guests"]).finish(MOMENT);
    assert_eq!(finished.stdout.lines().count(), 2, "{}", finished.stdout);
    assert!(finished.stderr.contains("in another PID namespace"), "{}", finished.stderr);
    assert!(fake.succeed(MOMENT).ends_with("b''\n"), "it got a request");
    session.end();
}

#[test]
fn session_is_found_before_its_network_is_announced() {
    let Some(world) = World::new(Families::V4) else { return };
    let program = world.lab.program().to_owned();
    let sockets = world.lab.runtime_dir().join("*.session");
    let session = ["pasta", "--config-net", "--deny", "b.test", "--", "sleep", "600"];
    let words = ["python3", "-c", WITH_FULL_PIPE, sockets.to_str().unwrap(), &program];
    let session = world.host(&[&words[..], &session].concat());
    session.wait_for_output("found");
    session.wait_for_output("pasta: ");
    session.finish(MOMENT);
}

#[test]
fn log_on_standard_error_is_refused_in_the_background() {
    let lab = crate::support::Lab::new();
    let words = [lab.program(), "pasta", "--egress-log", "-", "--netns", "/proc/self/ns/net"];
    let refused = lab.spawn(&words).finish(LONG);
    assert!(refused.status == Some(1), "{}", refused.stderr);
    assert!(refused.stderr.contains("--foreground"), "{}", refused.stderr);
}

/// Script of the DHCP client.
const ON_LEASE: &str = "[ \"$1\" = bound ] || exit 0
ip addr add $ip/$mask dev eth0; ip route add default via $router dev eth0 onlink; echo \"dns $dns\"
";

/// Writes the program that stands for a virtual machine, and the script of its DHCP client.
pub(super) fn prepare_machine(net: &Net) {
    std::fs::write(net.world.file("machine.py"), include_str!("../support/machine.py")).unwrap();
    super::asking::script(net, "on-lease", ON_LEASE);
}

#[test]
fn virtual_machine_reaches_the_names_of_its_policy_file_only() {
    require!(CURL, OPENSSL, DNSMASQ, Need::Program("busybox", "busybox"));
    let net = net!();
    link_program(&net, "passt");
    prepare_machine(&net);
    super::asking::script(
        &net,
        "ask.sh",
        "echo $RINGFENCE_ASK_RULE >> asked; case $RINGFENCE_ASK_RULE in c.test:*) echo run;; *) echo deny;; esac",
    );
    // Root's session has given up root's rights.
    let anybody = std::os::unix::fs::PermissionsExt::from_mode(0o666);
    std::fs::write(net.world.file("asked"), "").unwrap();
    std::fs::set_permissions(net.world.file("asked"), anybody).unwrap();
    let options = "--policy p.toml --ask exec:./ask.sh --strict-sni --egress-log log --one-off --foreground -s vm.socket";
    let words: Vec<&str> = ["./passt"].into_iter().chain(options.split_whitespace()).collect();
    let front = net.world.host(&words);
    front.wait_for_error("listens at");
    let script = format!(
        "ip link set eth0 up; busybox udhcpc -i eth0 -n -q -f -s ./on-lease 2>/dev/null
         {}getent hosts c.test; until [ -e listed ]; do sleep 0.05; done; python3 egress.py hello {FAR_V4} a.test nameless; python3 egress.py datagram {FAR_V4} 53",
        requests()
    );
    let machine = net.world.host(&["python3", "machine.py", "vm.socket", &script]);
    machine.wait_for_output("shared 35");
    check_list_of_denials(|| net.policy("why vm.socket"));
    std::fs::write(net.world.file("listed"), "").unwrap();
    let output = machine.succeed(LONG);
    check(&net, &output);
    assert!(output.contains("dns 192.0.2.1\n"), "{output}");
    let last: Vec<&str> = output.lines().rev().take(2).collect();
    assert!(last[1].starts_with("ConnectionResetError"), "no server name: {output}");
    let refused = ["ConnectionRefusedError", "PermissionError", "OSError"];
    assert!(refused.contains(&last[0].split(' ').next().unwrap()), "{output}");
    let finished = front.finish(LONG);
    assert_eq!(finished.status, Some(0), "{}", finished.stderr);
    assert!(finished.stderr.contains("passt: egress: "), "{}", finished.stderr);
    let asked = net.world.lab.read("asked");
    for rule in ["b.test:443\n", "198.51.100.2:80\n", "c.test:443\n"] {
        assert!(asked.contains(rule), "{rule}: {asked}");
    }
    assert!(output.contains("198.51.100.3"), "{output}");
    assert!(finished.stderr.contains("approved c.test:443 for this run\n"), "{}", finished.stderr);
    let lines = records(&net, "log", "vm.socket");
    let is_allowed = |line: &serde_json::Value| {
        line["event"] == "connect" && line["verdict"] == "allow" && line["name"] == "a.test"
    };
    assert!(lines.iter().any(is_allowed), "{lines:?}");
    net.end();
}
