//! Namespaces for tests with real kernels at both ends.
//!
//! A test runs in namespaces of its own, in a child process: its own test binary, restarted by `unshare -rn`
//! (util-linux). It configures interfaces with `ip` (iproute2). It can start a [`Peer`]: the same test
//! once more, in a second network namespace, which executes commands.
//!
//! If the machine lacks a requirement, the test prints `SKIPPED: reason` and checks nothing. With
//! `RINGFENCE_TEST_REQUIRE=1` it fails instead.

#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

pub mod peer;
pub mod tcp;
pub mod world;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

pub use peer::Peer;

const ROLE: &str = "RINGFENCE_TEST_ROLE";

/// Runs the test `name`, whose body is `test`, in namespaces of its own.
pub fn in_namespaces(name: &str, test: impl FnOnce(&dyn Fn() -> Peer)) {
    match std::env::var(ROLE).as_deref() {
        Ok("test") => test(&|| Peer::start(name)),
        Ok("peer") => peer::execute(),
        _ => start(name),
    }
}

/// Prints that the test is skipped; fails if no test may be skipped.
pub fn skip(reason: &str) {
    let required = std::env::var_os("RINGFENCE_TEST_REQUIRE").is_some_and(|value| value == "1");
    assert!(!required, "RINGFENCE_TEST_REQUIRE is set, and {reason}");
    println!("SKIPPED: {reason}");
}

/// Starts the test in its namespaces, and forwards its output line by line.
fn start(name: &str) {
    if let Some(reason) = missing() {
        return skip(&reason);
    }
    let mut test = again("-rn", name, "test").stdout(Stdio::piped()).spawn().unwrap();
    let mut passed = false;
    for line in BufReader::new(test.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        passed |= line.contains("1 passed");
        // Test runners must count this test once.
        if !line.starts_with("test result: ") {
            println!("{line}");
        }
    }
    assert!(test.wait().unwrap().success() && passed, "in its namespaces the test failed");
}

/// Returns the command of this test in another role, in the namespaces that `options` of `unshare` make.
fn again(options: &str, name: &str, role: &str) -> Command {
    let mut command = Command::new("unshare");
    command.arg(options).arg(std::env::current_exe().unwrap());
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
pub fn ip(args: &str) {
    let output = Command::new("ip").args(args.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {args}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Brings an interface up in this process's network namespace, with the addresses 10.9.0.HOST and
/// fd00:9::HOST. Waits until both are usable: the kernel adds an IPv6 address asynchronously.
pub fn set_up(name: &str, host: u8, mtu: u16) {
    ip(&format!("link set {name} address 02:00:00:00:00:0{host} mtu {mtu} up"));
    ip(&format!("address add 10.9.0.{host}/24 dev {name}"));
    ip(&format!("address add fd00:9::{host}/64 dev {name} nodad"));
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let routes = Command::new("ip").args(["-6", "route", "show", "table", "local"]).output();
        let routes = String::from_utf8(routes.unwrap().stdout).unwrap();
        if routes.contains(&format!("local fd00:9::{host} ")) {
            return;
        }
        assert!(Instant::now() < until, "fd00:9::{host} stays unknown: {routes}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
