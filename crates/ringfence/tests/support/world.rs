//! A host and an outside network, in network namespaces of their own. A veth pair connects `wan0` of the host
//! to `out0` of the outside. No packet leaves these namespaces.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use super::needs::{Need, skip_for_the_kernel};
use super::{Lab, MOMENT, Running};

/// Address families of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Families {
    Both,
    V4,
    V6,
}

/// Addresses of the host on the link, and of the other end, which is the host's router.
pub const HOST_V4: &str = "192.0.2.2";
pub const HOST_V6: &str = "2001:db8:1::2";
pub const OUTSIDE_V4: &str = "192.0.2.1";
pub const OUTSIDE_V6: &str = "2001:db8:1::1";
/// Addresses behind the router.
pub const FAR_V4: &str = "198.51.100.1";
pub const FAR_V6: &str = "2001:db8:ffff::1";

/// Program with a server and a client for TCP and UDP.
const PEER: &str = include_str!("peer.py");

/// Host with a network, and the outside. Dropping it ends the namespaces.
pub struct World {
    pub lab: Lab,
    host: Child,
    outside: Child,
    is_root: bool,
}

/// Starts a process that holds namespaces until its standard input ends.
fn holder(words: &[&str]) -> Child {
    let mut child = Command::new(words[0])
        .args(&words[1..])
        .args(["sh", "-c", "echo ready; exec cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let stdout = child.stdout.take().unwrap();
    BufReader::new(stdout).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n", "{words:?} made no namespaces");
    child
}

impl World {
    /// Creates a world. Prints a reason and returns `None` if the machine allows none.
    pub fn new(families: Families) -> Option<World> {
        World::of(families, env!("CARGO_BIN_EXE_ringfence"))
    }

    /// Creates a world in which `program` takes the place of the `ringfence` command.
    pub fn of(families: Families, program: impl Into<PathBuf>) -> Option<World> {
        for need in
            [Need::Guests, Need::Program("ip", "iproute2"), Need::Program("python3", "python3")]
        {
            if let Some(reason) = need.missing() {
                super::needs::skip_for(need, &reason);
                return None;
            }
        }
        let is_root = rustix::process::geteuid().is_root();
        let mut words = vec!["unshare", "--net", "--mount"];
        if !is_root {
            words.extend(["--user", "--map-root-user"]);
        }
        let host = holder(&words);
        let words = enter(&host, is_root, &["--net"]);
        let words = words.iter().map(String::as_str).chain(["unshare", "--net"]);
        let outside = holder(&words.collect::<Vec<_>>());
        let world = World { lab: Lab::of(program), host, outside, is_root };
        std::fs::write(world.lab.file("peer.py"), PEER).unwrap();
        let made = world.cable("wan0", "out0").finish(MOMENT);
        if made.status != Some(0) {
            skip_for_the_kernel(&format!("there can be no veth here: {}", made.stderr.trim()));
            return None;
        }
        world.configure(families);
        Some(world)
    }

    /// Connects host and outside by a link with these names of its ends.
    pub fn cable(&self, host: &str, outside: &str) -> Running {
        let id = self.outside.id();
        let command = format!("ip link add {host} type veth peer name {outside} netns {id}");
        self.host(&["sh", "-c", &command])
    }

    fn configure(&self, families: Families) {
        let range = if self.is_root { "0 2147483647" } else { "0 0" };
        // Addresses are usable at once, without duplicate address detection.
        let mut host = format!(
            "ip link set lo up; echo {range} > /proc/sys/net/ipv4/ping_group_range; \
             echo 0 > /proc/sys/net/ipv6/conf/wan0/accept_dad; "
        );
        let mut outside = "ip link set lo up; \
             echo 0 > /proc/sys/net/ipv6/conf/out0/accept_dad; "
            .to_owned();
        if families != Families::V6 {
            host += &format!("ip addr add {HOST_V4}/24 dev wan0; ");
            outside +=
                &format!("ip addr add {OUTSIDE_V4}/24 dev out0; ip addr add {FAR_V4}/32 dev lo; ");
        }
        if families != Families::V4 {
            host += &format!("ip addr add {HOST_V6}/64 dev wan0 nodad; ");
            outside += &format!(
                "ip addr add {OUTSIDE_V6}/64 dev out0 nodad; ip addr add {FAR_V6}/128 dev lo nodad; "
            );
        }
        self.outside(&["sh", "-ec", &(outside + "ip link set out0 up")]).succeed(MOMENT);
        host += "ip link set wan0 up; ";
        if families != Families::V6 {
            host += &format!("ip route add default via {OUTSIDE_V4}; ");
        }
        if families != Families::V4 {
            host += &format!("ip -6 route add default via {OUTSIDE_V6}; ");
        }
        self.host(&["sh", "-ec", &host]).succeed(MOMENT);
        self.name_servers(&[]);
    }

    /// Sets the host's name servers.
    pub fn name_servers(&self, servers: &[&str]) {
        let text: String = servers.iter().map(|ip| format!("nameserver {ip}\n")).collect();
        self.etc("resolv.conf", &text);
    }

    /// Mounts a shared file over one of the host's `/etc`, in the host's mount namespace. A later change of the shared
    /// file changes it.
    pub fn etc(&self, name: &str, text: &str) {
        std::fs::write(self.lab.file(name), text).unwrap();
        let mount = format!("mount --bind {name} /etc/{name}");
        self.host(&["sh", "-ec", &mount]).succeed(MOMENT);
    }

    /// Starts a command on the host.
    pub fn host(&self, words: &[impl AsRef<str>]) -> Running {
        self.spawn(self.enter_host(), words)
    }

    /// Returns the words that start a command on the host.
    pub fn host_words(&self, words: &[&str]) -> Vec<String> {
        let mut all = self.enter_host();
        all.extend(words.iter().map(|word| (*word).to_owned()));
        all
    }

    fn enter_host(&self) -> Vec<String> {
        let files = self.lab.file("").to_str().unwrap().to_owned();
        let mut all = enter(&self.host, self.is_root, &["--net", "--mount"]);
        all.extend(["env".into(), format!("--chdir={files}")]);
        all
    }

    /// Starts a command outside.
    pub fn outside(&self, words: &[impl AsRef<str>]) -> Running {
        self.spawn(enter(&self.outside, self.is_root, &["--net"]), words)
    }

    fn spawn(&self, mut all: Vec<String>, words: &[impl AsRef<str>]) -> Running {
        all.extend(words.iter().map(|word| word.as_ref().to_owned()));
        self.lab.spawn(&all.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Returns the path of the host's user namespace.
    pub fn user_namespace(&self) -> PathBuf {
        format!("/proc/{}/ns/user", self.host.id()).into()
    }

    /// Starts `peer.py MODE ADDRESS PORT` outside, and waits until it listens.
    pub fn server(&self, mode: &str, address: &str, port: u16) -> Running {
        let server = self.outside(&["python3", "peer.py", mode, address, &port.to_string()]);
        server.wait_for_output("listening");
        server
    }

    /// Starts `ringfence run OPTIONS -- sh -ec SCRIPT` on the host, with `--link $RINGFENCE_TEST_LINK` if set.
    pub fn guest(&self, options: &str, script: &str) -> Running {
        match std::env::var("RINGFENCE_TEST_LINK") {
            Ok(link) if !link.is_empty() => {
                self.plain_guest(&format!("--link {link} {options}"), script)
            }
            _ => self.plain_guest(options, script),
        }
    }

    /// Starts a guest with the default link.
    pub fn plain_guest(&self, options: &str, script: &str) -> Running {
        let mut words = vec![self.lab.program(), "run"];
        // Guests of one test are neighbours.
        if !options.contains("--switch") {
            words.extend(["--switch", "default"]);
        }
        words.extend(options.split_whitespace().chain(["--", "sh", "-ec", script]));
        self.host(&words)
    }

    /// Starts a guest that is on no switch and has only the host's network.
    pub fn lone_guest(&self, options: &str, script: &str) -> Running {
        self.guest(&format!("--uplink host --switch none {options}"), script)
    }

    /// Returns the path of a shared file.
    pub fn file(&self, name: &str) -> PathBuf {
        self.lab.file(name)
    }
}

/// Returns the words that start `dnsmasq` in the foreground on some addresses, with options for its names.
pub fn dnsmasq(addresses: &[&str], options: &[&str]) -> Vec<String> {
    let words = [
        "dnsmasq",
        "--keep-in-foreground",
        "--conf-file=/dev/null",
        "--no-resolv",
        "--no-hosts",
        "--bind-interfaces",
        "--user=root",
        // A user namespace may forbid a change of the group.
        "--group=",
        "--pid-file=",
        "--log-facility=-",
    ];
    let addresses = addresses.iter().map(|address| format!("--listen-address={address}"));
    let words = words.iter().chain(options).map(|word| (*word).to_owned());
    words.chain(addresses).collect()
}

/// Returns the words that start a name server which knows one name.
pub fn name_server(address: &str) -> Vec<String> {
    dnsmasq(&[address], &[&format!("--host-record=www.far.example,{FAR_V4},{FAR_V6}")])
}

/// Returns the words that run a command in the namespaces of `holder`.
fn enter(holder: &Child, is_root: bool, namespaces: &[&str]) -> Vec<String> {
    let mut words = vec!["nsenter".to_owned(), format!("--target={}", holder.id())];
    if !is_root {
        words.extend(["--user".to_owned(), "--preserve-credentials".to_owned()]);
    }
    words.extend(namespaces.iter().map(|namespace| (*namespace).to_owned()));
    words
}

impl Drop for World {
    fn drop(&mut self) {
        for holder in [&mut self.outside, &mut self.host] {
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}
