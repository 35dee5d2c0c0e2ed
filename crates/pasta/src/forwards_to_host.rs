//! Ports of the namespace's loopback that lead to the host's (`-T`, `-U`).
//!
//! ```text
//! session                           process in the namespace            uplink
//!   NamespaceInterface::to_host ──>   listens at 127.0.0.1 and ::1
//!                               <──   Report::ToHost + sockets
//!   UplinkConfig::forwards  ───────────────────────────────────>    accepts, connects to the host's loopback, splices; copies datagrams
//! ```
//!
//! With `auto` the ports are those of listeners at the host's loopback ([`super::auto`]).
//!
//! The sockets belong to the network of the namespace, so nobody else reaches them. The uplink accepts connections at
//! them, and leads each to its port of the host, and to no other.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, bail};
use ringfence_sandbox::channel::{Channel, ChannelError};
use serde::{Deserialize, Serialize};

use super::args::PastaArgs;
use super::auto_forwards::without_none;
use super::namespace::Report;
use super::network::Listeners;
use crate::forward_spec::Listen;
use ringfence_hostnet::text::printable;
use ringfence_uplink_process::forward::{self, Forward, ForwardProtocol, PORTS_MAX};

/// Number of sockets in one message.
const BATCH: usize = 32;
/// Time limit for each message.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Port of the namespace and the port of the host to which it leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ForwardToHost {
    protocol: ForwardProtocol,
    from: u16,
    to: u16,
}

/// Returns the ports that the options name.
pub(super) fn ports(args: &PastaArgs) -> anyhow::Result<Vec<ForwardToHost>> {
    let mut found = Vec::new();
    for (option, protocol, specs, is_off) in [
        ("-T", ForwardProtocol::Tcp, &args.tcp_ns, args.no_tcp),
        ("-U", ForwardProtocol::Udp, &args.udp_ns, args.no_udp),
    ] {
        for listen in without_none(specs) {
            if is_off {
                bail!("{option} {listen}: the protocol is switched off");
            }
            check(option, listen)?;
            let ports = listen.ports();
            found.extend(ports.map(|(from, to, _)| ForwardToHost { protocol, from, to }));
            if found.len() > PORTS_MAX {
                bail!("{option} {listen}: more than {PORTS_MAX} ports cannot lead to the host");
            }
        }
    }
    Ok(found)
}

fn check(option: &str, listen: &Listen) -> anyhow::Result<()> {
    let has_address = listen.mappings.iter().any(|mapping| mapping.address.is_some());
    if listen.all {
        bail!(
            "{option} {listen}: each port needs a socket, and at most {PORTS_MAX} ports are possible: name them"
        );
    }
    if listen.address.is_some() || listen.interface.is_some() || has_address {
        bail!("{option} {listen}: ports lead from the namespace's loopback to the host's only");
    }
    Ok(())
}

/// Listens at the ports, in the namespace of this process, and sends the sockets to the session. An address family that
/// the namespace lacks is left out.
///
/// # Errors
///
/// Returns the first address at which listening failed, as text.
pub(super) fn open(channel: &Channel, ports: &[ForwardToHost]) -> Result<(), String> {
    let mut made: Vec<(Forward, OwnedFd)> = Vec::new();
    for ip in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
        for port in ports {
            let at = SocketAddr::new(ip, port.from);
            match forward::bind(port.protocol, at) {
                Ok(socket) => {
                    let (protocol, ipv6, guest_port) = (port.protocol, ip.is_ipv6(), port.to);
                    made.push((Forward { protocol, ipv6, guest_port, to_host: true }, socket));
                }
                Err(error) if ip.is_ipv6() && lacks_family(&error) => {}
                Err(error) => {
                    return Err(format!(
                        "cannot listen at {at}/{} in the namespace: {error}",
                        port.protocol
                    ));
                }
            }
        }
    }
    send(channel, &made).map_err(|error| error.to_string())
}

fn lacks_family(error: &std::io::Error) -> bool {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::ADDRNOTAVAIL | Errno::AFNOSUPPORT))
}

fn send(channel: &Channel, made: &[(Forward, OwnedFd)]) -> Result<(), ChannelError> {
    for batch in made.chunks(BATCH) {
        let fds: Vec<_> = batch.iter().map(|(_, socket)| socket.as_fd()).collect();
        let forwards = batch.iter().map(|(forward, _)| *forward).collect();
        channel.send(&Report::ToHost(forwards), &fds)?;
    }
    channel.send(&Report::ToHost(Vec::new()), &[])
}

/// Receives the sockets, and adds them to those of the uplink.
pub(super) fn receive(channel: &Channel, listeners: &mut Listeners) -> anyhow::Result<()> {
    loop {
        let received = channel.receive_within::<Report>(TIMEOUT);
        match received.context("the process in the namespace")? {
            (Report::ToHost(forwards), _) if forwards.is_empty() => return Ok(()),
            (Report::ToHost(forwards), fds) if forwards.len() == fds.len() => {
                listeners.forwards.extend(forwards);
                listeners.sockets.extend(fds.into_vec());
            }
            (Report::Failed(why), _) => bail!("{}", printable(&why)),
            _ => bail!("the process in the namespace sent no listening sockets"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(line: &str) -> anyhow::Result<Vec<(u16, u16)>> {
        let words: Vec<std::ffi::OsString> = line.split_whitespace().map(Into::into).collect();
        let ports = ports(&super::super::parse(&words).unwrap())?;
        Ok(ports.iter().map(|port| (port.from, port.to)).collect())
    }

    #[test]
    fn ports_towards_the_host_are_those_of_the_option() {
        assert_eq!(found("17").unwrap(), []);
        assert_eq!(found("-T none -U none 17").unwrap(), []);
        assert_eq!(found("-T 5555 17").unwrap(), [(5555, 5555)]);
        assert_eq!(found("-T 80-82:90-92,~81 17").unwrap(), [(80, 90), (82, 92)]);
        assert_eq!(found("-U 53:5353 -T 80 17").unwrap(), [(80, 80), (53, 5353)]);
        assert_eq!(found("-T auto,80 -U auto 17").unwrap(), [(80, 80)]);
        for line in [
            "-T all 17",
            "-T 127.0.0.1/80 17",
            "-T %eth0/80 17",
            "-T 80:192.0.2.1/80 17",
            "-T 80 --no-tcp 17",
            "-T 1-2000 17",
            "-T auto --no-tcp 17",
            "-T 127.0.0.1/auto 17",
            "-U all 17",
            "-U 127.0.0.1/53 17",
            "-U 53 --no-udp 17",
            "-T 1-600 -U 1-600 17",
        ] {
            assert!(found(line).is_err(), "{line}");
        }
    }

    #[test]
    fn sockets_arrive_with_their_ports() {
        let (near, far) = Channel::pair().unwrap();
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let from = free.local_addr().unwrap().port();
        let refused = open(&far, &[ForwardToHost { protocol: ForwardProtocol::Tcp, from, to: 7 }]);
        assert!(refused.unwrap_err().contains(&format!("127.0.0.1:{from}")));
        drop(free);
        open(&far, &[ForwardToHost { protocol: ForwardProtocol::Tcp, from, to: 7 }]).unwrap();
        let mut listeners = Listeners::default();
        receive(&near, &mut listeners).unwrap();
        assert_eq!(listeners.forwards.len(), listeners.sockets.len());
        assert!(listeners.forwards[0].to_host && listeners.forwards[0].guest_port == 7);
    }
}
