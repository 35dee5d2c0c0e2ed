//! Namespaces for tests with real kernels at both ends.
//!
//! A test runs in namespaces of its own ([`ringfence_sys::testing`]). It can start a [`Peer`]: the same test once more, in
//! a second network namespace, which executes commands.

#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

pub mod peer;
pub mod tcp;
pub mod world;

use std::process::Command;
use std::time::{Duration, Instant};

pub use peer::Peer;
pub use ringfence_sys::testing::ip;
use ringfence_sys::testing::{TEST, again, role, start};

/// Runs the test `name`, whose body is `test`, in namespaces of its own.
pub fn in_namespaces(name: &str, test: impl FnOnce(&dyn Fn() -> Peer)) {
    match role().as_deref() {
        Some(TEST) => test(&|| Peer::start(name)),
        Some(_) => peer::execute(),
        None => start(name),
    }
}

/// Brings an interface up in this process's network namespace, with the addresses 10.9.0.HOST and
/// fd00:9::HOST. Waits until both are usable: the kernel adds an IPv6 address asynchronously.
pub fn set_up(name: &str, host: u8, mtu: u16) {
    ip(&format!("link set {name} address 02:00:00:00:00:0{host} mtu {mtu} up"));
    ip(&format!("address add 10.9.0.{host}/24 dev {name}"));
    ip(&format!("address add fd00:9::{host}/64 dev {name} nodad"));
    let until = Instant::now() + Duration::from_secs(60);
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
