//! Names of `bench uplink --policy`: their addresses, their name server, and the connections to them.

use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

/// Names of the policy, one rule each, and addresses of each name.
pub(super) const NAMES: Names = Names { count: 1000, each: 10 };
/// First address of the names, in the range for benchmarks (RFC 2544).
pub(super) const FIRST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
/// Time limit for all names to be resolved.
const PATIENCE: Duration = Duration::from_secs(20);
/// Step from one connection's address to the next one's, so that neighbours in the table do not follow each other.
const STRIDE: usize = 7919;

/// Set of names that a client resolves first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Names {
    pub(super) count: u32,
    /// Addresses of each name.
    pub(super) each: u32,
}

impl Names {
    /// Returns the addresses of a name.
    fn of(self, number: u32) -> impl Iterator<Item = Ipv4Addr> {
        (number * self.each..(number + 1) * self.each)
            .map(|at| Ipv4Addr::from_bits(FIRST.to_bits() + at))
    }
}

/// Returns the name with this number.
pub(super) fn name(number: u32) -> String {
    format!("n{number}.bench.example")
}

/// Destination of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) to: SocketAddr,
    /// Name for the first bytes, if there is one.
    pub(super) name: Option<String>,
}

/// Destinations of a case, used in turn.
pub(super) struct Targets(Vec<Target>);

impl Targets {
    /// Resolves the names of a case. Without names there is one destination.
    pub(super) fn find(to: SocketAddr, names: Option<Names>) -> anyhow::Result<Targets> {
        let Some(names) = names else { return Ok(Targets(vec![Target { to, name: None }])) };
        let until = Instant::now() + PATIENCE;
        let mut targets = Vec::new();
        for number in 0..names.count {
            let name = name(number);
            // The final dot leaves out search domains.
            let asked = format!("{name}.:{}", to.port());
            let addresses = loop {
                match asked.to_socket_addrs() {
                    Ok(addresses) => break addresses,
                    Err(error) if Instant::now() > until => return Err(error).context(asked),
                    Err(_) => std::thread::sleep(Duration::from_millis(20)),
                }
            };
            let before = targets.len();
            targets.extend(addresses.map(|to| Target { to, name: Some(name.clone()) }));
            let found = targets.len() - before;
            ensure!(found == names.each as usize, "{name} has {found} addresses");
        }
        Ok(Targets(targets))
    }

    /// Returns the destination of a connection.
    pub(super) fn of(&self, connection: usize) -> &Target {
        &self.0[connection.wrapping_mul(STRIDE) % self.0.len()]
    }
}

/// Returns the place of the policy file.
pub(super) fn file() -> PathBuf {
    std::env::temp_dir().join(format!("ringfence-bench-policy-{}.toml", std::process::id()))
}

/// Answers queries for the names without end.
pub(super) fn serve_names() -> anyhow::Result<()> {
    let socket = UdpSocket::bind(("0.0.0.0", 53)).context("the name server")?;
    let mut bytes = [0; 4096];
    loop {
        let (length, client) = socket.recv_from(&mut bytes).context("receiving a query")?;
        if let Some(reply) = reply(&bytes[..length]) {
            socket.send_to(&reply, client).context("answering a query")?;
        }
    }
}

/// Returns the answer to a query: the addresses of a name for type A, none for other types.
fn reply(query: &[u8]) -> Option<Vec<u8>> {
    let question = query.get(12..)?;
    let label = question.get(1..=usize::from(*question.first()?))?;
    let number: u32 = core::str::from_utf8(label).ok()?.strip_prefix('n')?.parse().ok()?;
    if number >= NAMES.count {
        return None;
    }
    let end = question.iter().position(|byte| *byte == 0)? + 1 + 4;
    let question = question.get(..end)?;
    let is_for_addresses = question.get(end - 4..end - 2)? == [0, 1];
    let addresses: Vec<_> = NAMES.of(number).filter(|_| is_for_addresses).collect();
    let mut reply = query.get(..2)?.to_vec();
    reply.extend([0x81, 0x80, 0, 1, 0, u8::try_from(addresses.len()).ok()?, 0, 0, 0, 0]);
    reply.extend(question);
    for address in addresses {
        // The name of the question, type A, class IN, one hour.
        reply.extend(b"\xc0\x0c\0\x01\0\x01\0\0\x0e\x10\0\x04");
        reply.extend(address.octets());
    }
    Some(reply)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_server_gives_each_name_its_addresses() {
        let query = |kind| {
            [
                &b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x03n17\x05bench\x07example\0\0"[..],
                &[kind],
                b"\0\x01",
            ]
            .concat()
        };
        let answer = reply(&query(1)).unwrap();
        assert_eq!((answer[7], answer.len()), (10, query(1).len() + 10 * 16));
        assert!(answer.ends_with(&[198, 18, 0, 179]));
        assert_eq!(reply(&query(28)).unwrap()[7], 0);
        assert_eq!(reply(b"\0\0"), None);
    }

    #[test]
    fn connections_take_every_target_in_turn() {
        let to = |port| Target { to: ([127, 0, 0, 1], port).into(), name: None };
        let targets = Targets((0..1000).map(to).collect());
        let mut ports: Vec<u16> = (0..1000).map(|at| targets.of(at).to.port()).collect();
        ports.sort_unstable();
        assert_eq!(ports, (0..1000).collect::<Vec<u16>>());
    }
}
