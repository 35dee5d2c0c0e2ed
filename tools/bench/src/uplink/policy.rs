//! `bench uplink --policy`: the outside network of the benchmark, with many names, and an egress policy that allows them.
//!
//! ```text
//!   the host's namespace                                       the outside
//!    uplink without a policy ─┐                                 name server: n0.bench.example, n1...
//!                             ├── bench-far ══ bench-near ───── server at every address of those names
//!    uplink with a policy ────┘
//! ```
//!
//! A policy leads to no address of the host, so the server is a process in a network namespace of its own. The client
//! asks for every name before it begins: each answer pins its addresses. Then it connects to all of them in turn. Its
//! first bytes are an HTTP request for the name, with and without a policy.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail};

use super::args::UplinkPeer;
use super::end::EndMessage;
use super::names::{FIRST, NAMES, file, name};
use super::peers::{self, Behind, Cable, CableEnd, PORT};

/// Addresses of host and outside on their cable.
const NEAR: &str = "203.0.113.1";
const FAR: &str = "203.0.113.2";
/// Range of the names' addresses.
const RANGE: &str = "198.18.0.0/15";
fn text() -> String {
    let mut text = "allow = [\n".to_owned();
    for number in 0..NAMES.count {
        let _ = writeln!(text, "    \"{}:{PORT}/tcp\",", name(number));
    }
    text + "]\n"
}

/// Outside network: a namespace with the servers. Ends on drop.
pub(super) struct Outside {
    _server: Behind,
    /// Removed on drop.
    files: [PathBuf; 2],
}

impl Outside {
    /// Starts the outside, and makes its name server that of this mount namespace, which is private to the benchmark.
    pub(super) fn start(congestion: &str) -> anyhow::Result<Outside> {
        let (policy, resolver) = (file(), file().with_extension("resolv"));
        std::fs::write(&policy, text()).context("writing the policy")?;
        std::fs::write(&resolver, format!("nameserver {FAR}\n")).context("writing resolv.conf")?;
        let mut command = Command::new("unshare");
        command.args(["--net", "--"]).arg(std::env::current_exe()?);
        command.args(["internal", "bench-uplink-end", "outside", congestion, &PORT.to_string()]);
        let server = Behind::of(command, UplinkPeer::Veth)?;
        let pid = server.child_in_its_own_net()?;
        let cable = Cable {
            outside: CableEnd { interface: "bench-far", address: NEAR },
            inside: CableEnd { interface: "bench-near", address: FAR },
            mtu: 65520,
        };
        cable.lay(pid)?;
        peers::run(&["ip", "route", "replace", RANGE, "via", FAR])?;
        let pid = pid.to_string();
        let inside =
            ["nsenter", "-t", &pid, "--net", "ip", "route", "add", "local", RANGE, "dev", "lo"];
        peers::run(&inside)?;
        let bind = ["mount", "--bind", &resolver.to_string_lossy(), "/etc/resolv.conf"];
        peers::run(&bind)?;
        match server.hear(Duration::ZERO)? {
            EndMessage::Listening(_) => Ok(Outside { _server: server, files: [policy, resolver] }),
            other => bail!("the server said {other:?}"),
        }
    }

    /// Returns the destination that stands for all names in an order.
    pub(super) fn to(&self) -> SocketAddr {
        SocketAddr::new(IpAddr::V4(FIRST), PORT)
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        // The mount stays until the benchmark ends, or is covered by the next one.
        for file in &self.files {
            let _ = std::fs::remove_file(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policy_has_a_rule_for_each_name() {
        let policy = ringfence_policy::file::parse("p.toml", &text()).unwrap();
        assert_eq!(policy.rules.len(), 1000);
        ringfence_policy::Policy::new(policy).unwrap();
    }
}
