//! Socket of `pasta --conf-path`: clients, such as pesto, read the forwarding rules of a running `pasta`, and replace them.
//!
//! ```text
//! client                       session
//!   connects      ──────────>
//!                 <──────────  greeting and rules       ([`crate::forward_rules`])
//!   new rules     ──────────>  closes ports that are gone, opens new ones  ──>  uplink
//!                 <──────────  end of the stream, behind a line with the reason if nothing has changed
//! ```
//!
//! The line with the reason is Ringfence's own; the real pesto does not read it. The table has the ports of `-t` and `-u`
//! as well, so a client can remove them. It has no ports at an interface and none of `auto`, which stay as they are.
//!
//! Clients are served one after the other, as an update replaces the rules that its client has read. Each has
//! ten seconds. The session's thread serves them, and no call blocks. Only the user that started the session can
//! connect.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Instant;

use crate::forward_rules::{
    INBOUND, RULES_MAX, Rule, RuleTable, UPDATE_MAX, Update, capabilities, parse_updates,
    write_tables,
};
use ringfence_sandbox::channel::Channel;

use super::args::PastaArgs;
use super::auto_forwards::without_none;
use super::client::{ClientRead, SocketClient, listen};
use super::network::Listeners;
use ringfence_uplink_process::forward::{ForwardProtocol, PORTS_MAX};
use ringfence_uplink_process::forwarded_ports::{
    ForwardedPortFailure, ForwardedPorts, first_ports,
};

enum Progress {
    Waiting,
    /// Connection that is closed, or whose time is over.
    Gone,
    Sent(Result<Vec<Update>, String>),
}

/// Reads the update of a client, as far as it has arrived.
fn read(client: &mut SocketClient) -> Progress {
    loop {
        match client.read() {
            ClientRead::Read => {}
            ClientRead::Waiting => return Progress::Waiting,
            ClientRead::End | ClientRead::Gone => return Progress::Gone,
        }
        match parse_updates(&client.bytes) {
            Ok(Some(updates)) => return Progress::Sent(Ok(updates)),
            Err(error) => return Progress::Sent(Err(error.to_string())),
            Ok(None) if client.bytes.len() > UPDATE_MAX => return Progress::Gone,
            Ok(None) => {}
        }
    }
}

/// Listening socket of the host.
type At = (ForwardProtocol, SocketAddr);

/// Port of the namespace to which a socket leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wanted {
    guest_port: u16,
    is_optional: bool,
}

/// Open port: that of the namespace, and the number of the socket at the uplink.
#[derive(Clone, Copy, Debug)]
struct Open {
    guest_port: u16,
    id: u32,
}

/// Control socket, and the ports of its table.
#[derive(Debug)]
pub(crate) struct ControlServer {
    listener: UnixListener,
    client: Option<SocketClient>,
    rules: Vec<Rule>,
    open: BTreeMap<At, Open>,
    addresses: Vec<IpAddr>,
    capabilities: u32,
}

impl ControlServer {
    /// Creates the socket at `path`. A socket that an earlier process left there is replaced.
    pub(crate) fn bind(
        path: &Path,
        args: &PastaArgs,
        addresses: Vec<IpAddr>,
    ) -> anyhow::Result<ControlServer> {
        let listener = listen("--conf-path", path)?;
        let families = [
            (addresses.iter().any(IpAddr::is_ipv4), capabilities::IPV4),
            (addresses.iter().any(IpAddr::is_ipv6), capabilities::IPV6),
            (!args.no_tcp, capabilities::TCP),
            (!args.no_udp, capabilities::UDP),
        ];
        let capabilities = families.iter().filter(|(has, _)| *has).map(|(_, bit)| bit).sum();
        let (client, rules, open) = Default::default();
        Ok(ControlServer { listener, client, rules, open, addresses, capabilities })
    }

    /// Takes the ports of the options into the table. `listeners` are those with which the uplink is started.
    pub(crate) fn take_first(&mut self, args: &PastaArgs, listeners: &Listeners) {
        for (is_udp, specs) in [(false, &args.tcp_ports), (true, &args.udp_ports)] {
            let listens = without_none(specs).filter(|one| !one.auto && one.interface.is_none());
            let rules = listens.flat_map(|one| Rule::of_option(is_udp, one, self.capabilities));
            self.rules.extend(rules);
        }
        // A longer table has no place in the protocol.
        self.rules.truncate(RULES_MAX);
        let wanted = self.wanted(&self.rules).unwrap_or_default();
        let Listeners { forwards, sockets } = listeners;
        for ((id, forward), fd) in first_ports(forwards.len()).zip(forwards).zip(sockets) {
            let address = rustix::net::getsockname(fd).ok();
            let Some(at) = address.and_then(|address| SocketAddr::try_from(address).ok()) else {
                continue;
            };
            let (at, guest_port) = ((forward.protocol, at), forward.guest_port);
            if !forward.to_host && wanted.get(&at).is_some_and(|one| one.guest_port == guest_port) {
                self.open.insert(at, Open { guest_port, id });
            }
        }
    }

    /// Returns the descriptors to wait for.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let client = self.client.as_ref().map(|client| client.stream.as_fd());
        std::iter::once(client.unwrap_or(self.listener.as_fd()))
    }

    /// Returns the time at which [`ControlServer::serve`] must be called next.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.client.as_ref().map(|client| client.until)
    }

    /// Serves clients as far as they have sent.
    ///
    /// # Errors
    ///
    /// Returns a failure of the uplink, after which the session cannot go on.
    pub(crate) fn serve(
        &mut self,
        channel: &Channel,
        ports: &mut ForwardedPorts,
    ) -> Result<(), ForwardedPortFailure> {
        loop {
            let Some(mut client) = self.client.take().or_else(|| self.accept()) else {
                return Ok(());
            };
            match read(&mut client) {
                Progress::Waiting => {
                    self.client = Some(client);
                    return Ok(());
                }
                Progress::Gone => {}
                Progress::Sent(sent) => {
                    let done = match sent {
                        Ok(updates) => self.update(&updates, channel, ports)?,
                        Err(why) => Err(why),
                    };
                    if let Err(why) = done {
                        // The real pesto has gone already.
                        let _ = writeln!(client.stream, "{why}");
                    }
                }
            }
        }
    }

    /// Accepts a client, and sends it the rules.
    fn accept(&self) -> Option<SocketClient> {
        while let Ok((stream, _)) = self.listener.accept() {
            let (number, name) = INBOUND;
            let (capabilities, rules) = (self.capabilities, self.rules.clone());
            let table = RuleTable { number, name: name.to_owned(), capabilities, rules };
            let Ok(mut client) = SocketClient::new(stream) else { continue };
            // A new socket has room for the longest table.
            if client.stream.write_all(&write_tables(&[table])).is_ok() {
                return Some(client);
            }
        }
        None
    }

    /// Replaces the rules, or leaves them as they are and returns the reason.
    fn update(
        &mut self,
        updates: &[Update],
        channel: &Channel,
        ports: &mut ForwardedPorts,
    ) -> Result<Result<(), String>, ForwardedPortFailure> {
        if let Some(other) = updates.iter().find(|update| update.number != INBOUND.0) {
            return Ok(Err(format!("there is no table {}", other.number)));
        }
        let rules = updates.first().map(|update| update.rules.clone()).unwrap_or_default();
        let wanted = match self.wanted(&rules) {
            Ok(wanted) => wanted,
            Err(why) => return Ok(Err(why)),
        };
        let is_kept = |(at, open): (&At, &Open)| {
            wanted.get(at).is_some_and(|one| one.guest_port == open.guest_port)
        };
        let gone: Vec<(At, Open)> =
            self.open.iter().filter(|one| !is_kept(*one)).map(|(at, open)| (*at, *open)).collect();
        for (at, open) in &gone {
            ports.close(channel, open.id)?;
            self.open.remove(at);
        }
        let new: Vec<(At, Wanted)> =
            wanted.into_iter().filter(|(at, _)| !self.open.contains_key(at)).collect();
        let failed = self.open_all(&new, channel, ports)?;
        if let Some(why) = failed {
            // Their ports were this session's until now.
            let before = gone.iter().map(|(at, Open { guest_port, .. })| {
                (*at, Wanted { guest_port: *guest_port, is_optional: true })
            });
            self.open_all(&before.collect::<Vec<_>>(), channel, ports)?;
            return Ok(Err(why));
        }
        self.rules = rules;
        Ok(Ok(()))
    }

    /// Opens all of these ports, or none and returns the reason. Optional ones may be missing.
    fn open_all(
        &mut self,
        wanted: &[(At, Wanted)],
        channel: &Channel,
        ports: &mut ForwardedPorts,
    ) -> Result<Option<String>, ForwardedPortFailure> {
        let mut opened = Vec::new();
        for (at, Wanted { guest_port, is_optional }) in wanted {
            let (protocol, address) = *at;
            match ports.listen(channel, protocol, address, *guest_port) {
                Ok(id) => opened.push((*at, Open { guest_port: *guest_port, id })),
                Err(error) if error.is_of_port() && *is_optional => {}
                Err(error) if error.is_of_port() => {
                    opened.iter().try_for_each(|(_, open)| ports.close(channel, open.id))?;
                    return Ok(Some(error.to_string()));
                }
                Err(error) => return Err(error),
            }
        }
        self.open.extend(opened);
        Ok(None)
    }

    /// Returns the sockets of rules, or the reason why one is not possible.
    fn wanted(&self, rules: &[Rule]) -> Result<BTreeMap<At, Wanted>, String> {
        let mut wanted = BTreeMap::new();
        for rule in rules {
            self.check(rule)?;
            let addresses = match rule.address {
                Some(ip) => vec![ip],
                None => vec![Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()],
            };
            let protocol = if rule.is_udp { ForwardProtocol::Udp } else { ForwardProtocol::Tcp };
            for (port, guest_port) in rule.ports() {
                for ip in &addresses {
                    let at = (protocol, SocketAddr::new(*ip, port));
                    let one = Wanted { guest_port, is_optional: rule.is_optional };
                    if wanted.insert(at, one).is_some() {
                        return Err(format!("{rule}: another rule has port {port} already"));
                    }
                }
            }
            if wanted.len() > 2 * PORTS_MAX {
                return Err(format!("{rule}: at most {PORTS_MAX} ports are possible"));
            }
        }
        Ok(wanted)
    }

    /// Rejects rules that a running `pasta` cannot have.
    fn check(&self, rule: &Rule) -> Result<(), String> {
        let has = |one: u32| self.capabilities & one != 0;
        let has_family = match rule.address {
            Some(IpAddr::V4(_)) => has(capabilities::IPV4),
            Some(IpAddr::V6(_)) => has(capabilities::IPV6),
            None => has(capabilities::IPV4) && has(capabilities::IPV6),
        };
        let has_protocol = has(if rule.is_udp { capabilities::UDP } else { capabilities::TCP });
        let is_own = rule.target.is_none_or(|ip| self.is_target(rule, ip));
        let why = if rule.interface.is_some() {
            "a running pasta listens at addresses only, not at an interface"
        } else if rule.follows_listeners {
            "a running pasta takes named ports only, not `auto`"
        } else if !has_protocol {
            "the protocol is switched off"
        } else if !has_family {
            "the namespace has no address of this family"
        } else if !is_own {
            "ports lead to the namespace's own address only"
        } else if usize::from(rule.last - rule.first) >= PORTS_MAX {
            return Err(format!("{rule}: at most {PORTS_MAX} ports are possible"));
        } else {
            return Ok(());
        };
        Err(format!("{rule}: {why}"))
    }

    /// Returns `true` if ports of a rule lead to this address without its being named.
    fn is_target(&self, rule: &Rule, ip: IpAddr) -> bool {
        let first = self.addresses.iter().find(|own| own.is_ipv4() == ip.is_ipv4());
        first == Some(&ip) && rule.address.is_some_and(|at| at.is_ipv4() == ip.is_ipv4())
    }
}

#[cfg(test)]
mod tests;
