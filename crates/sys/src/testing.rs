//! Namespaces for tests with a real kernel, and ports that no other process takes.
//!
//! A test starts itself again in a child process, in namespaces of its own that `unshare` (util-linux) makes, and sets
//! up interfaces by `ip` (iproute2). The environment variable `RINGFENCE_TEST_ROLE` names the role of the child.
//!
//! On a machine that lacks a requirement the test prints `SKIPPED: reason` and checks nothing. It fails instead if
//! `RINGFENCE_TEST_REQUIRE` is 1.

// #syscall none: for tests

pub mod starts;

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

const ROLE: &str = "RINGFENCE_TEST_ROLE";
/// Role of the child process that has the test's body.
pub const TEST: &str = "test";

/// Returns the role of this process. `None` in the process that the test runner started.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Starts the test `name` in namespaces of its own, in the role [`TEST`], and forwards its output line by line.
///
/// # Panics
///
/// If the test fails there.
pub fn start(name: &str) {
    if let Some(reason) = missing() {
        return skip(&reason);
    }
    let child = again("-rn", name, TEST).stdout(Stdio::piped()).spawn();
    let mut child = child.expect("unshare, which was found, starts");
    let mut passed = false;
    for line in BufReader::new(child.stdout.take().expect("the output is piped")).lines() {
        let line = line.expect("the output is text");
        passed |= line.contains("1 passed");
        // Test runners must count this test once.
        if !line.starts_with("test result: ") {
            println!("{line}");
        }
    }
    let status = child.wait().expect("the child is waited for once");
    assert!(status.success() && passed, "in its namespaces the test failed");
}

/// Prints that the test is skipped.
///
/// # Panics
///
/// If no test may be skipped.
pub fn skip(reason: &str) {
    let required = std::env::var_os("RINGFENCE_TEST_REQUIRE").is_some_and(|value| value == "1");
    assert!(!required, "RINGFENCE_TEST_REQUIRE is set, and {reason}");
    println!("SKIPPED: {reason}");
}

/// Returns the command of the test `name` in another role, in the namespaces that `options` of `unshare` make.
///
/// # Panics
///
/// If the path of this program is unknown.
pub fn again(options: &str, name: &str, role: &str) -> Command {
    let program = std::env::current_exe().expect("a test program has a path");
    let mut command = Command::new("unshare");
    command.arg(options).arg(program);
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    command.env(ROLE, role);
    command
}

fn missing() -> Option<String> {
    let tun = std::fs::File::options().read(true).write(true).open("/dev/net/tun");
    if let Err(error) = tun {
        return Some(format!("/dev/net/tun: {error}"));
    }
    match Command::new("unshare").args(["-rn", "true"]).output() {
        Err(_) => return Some("`unshare` is not installed (Debian: util-linux)".to_owned()),
        Ok(output) if !output.status.success() => {
            let why = String::from_utf8_lossy(&output.stderr);
            return Some(format!("user namespaces may not be made: {}", why.trim()));
        }
        Ok(_) => {}
    }
    let ip = Command::new("ip").arg("-V").output();
    let has_ip = ip.is_ok_and(|output| output.status.success());
    (!has_ip).then(|| "`ip` is not installed (Debian: iproute2)".to_owned())
}

/// Runs `ip ARGS` in this process's network namespace.
///
/// # Panics
///
/// If the command fails.
pub fn ip(args: &str) {
    let output =
        Command::new("ip").args(args.split(' ')).output().expect("ip, which was found, starts");
    assert!(output.status.success(), "ip {args}: {}", String::from_utf8_lossy(&output.stderr));
}

/// TCP port of 127.0.0.1 at which no process listens. While this exists, the kernel chooses the port for no other socket,
/// and a program that sets `SO_REUSEADDR` can listen there.
#[derive(Debug)]
pub struct FreePort {
    _socket: OwnedFd,
    address: SocketAddr,
}

impl FreePort {
    /// Takes a port.
    ///
    /// # Panics
    ///
    /// If there is none.
    #[expect(clippy::new_without_default, reason = "it takes a resource")]
    pub fn new() -> FreePort {
        let (kind, flags) = (SocketType::STREAM, SocketFlags::CLOEXEC);
        let socket = rustix::net::socket_with(AddressFamily::INET, kind, flags, None);
        let socket = socket.expect("a descriptor is free");
        sockopt::set_socket_reuseaddr(&socket, true).expect("every socket has this option");
        let any = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0);
        rustix::net::bind(&socket, &any).expect("a port is free");
        let bound = rustix::net::getsockname(&socket).expect("the socket is bound");
        let address = SocketAddr::try_from(bound).expect("an address of IPv4");
        FreePort { _socket: socket, address }
    }

    /// Returns the address with the port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the port's number.
    pub fn number(&self) -> u16 {
        self.address.port()
    }
}
