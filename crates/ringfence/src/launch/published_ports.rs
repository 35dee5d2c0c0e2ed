//! Published ports of a running guest: their list, their changes (`ringfence port`), and the sockets for relays.
//!
//! ```text
//! client ──AddPort, RemovePort──> launcher ──ForwardedPortOrder, one at a time──> uplink
//!        <─PortsChanged, Failed──         <────── FromUplink::Port ─────
//!                                         ──ToGuest::Sockets──> init
//!                                         <─FromGuest::Sockets─
//! ```
//!
//! The launcher opens listening sockets with the user's rights. It never waits for the uplink or for init: an answer
//! continues the change. There is at most one change at a time. A change that fails leaves the ports as they were.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::os::fd::OwnedFd;

use anyhow::bail;
use ringfence_sandbox::channel::Channel;

use super::report::Reporter;
use ringfence_hostnet::text::printable;
use ringfence_uplink_process::egress::live::ClientId;
use ringfence_uplink_process::forward::{
    self, Families, Forward, ForwardProtocol, ForwardSpec, PORTS_MAX,
};
use ringfence_uplink_process::forwarded_ports::{ForwardedPorts, SOCKETS_MAX, first_ports};

/// Published ports of a guest.
#[derive(Debug, Default)]
pub(super) struct PublishedPorts {
    list: Vec<PublishedPort>,
    running: ForwardedPorts,
    change: Option<PublishedPortChange>,
    /// Set while sockets of the guest's network are on their way.
    pub(super) awaits_sockets: bool,
    /// Set once the guest was asked for sockets.
    pub(super) has_relays: bool,
}

/// Specification of ports, and the numbers of its sockets in the uplink.
#[derive(Debug)]
struct PublishedPort {
    spec: ForwardSpec,
    ids: Vec<u32>,
}

/// Change that a client has asked for.
#[derive(Debug)]
struct PublishedPortChange {
    client: ClientId,
    spec: ForwardSpec,
    is_new: bool,
    to_open: VecDeque<(Forward, OwnedFd)>,
    opened: Vec<u32>,
    to_close: Vec<u32>,
    /// Number of the port of the order that the uplink has not answered yet, and `true` if it opens that port.
    ordered: Option<(u32, bool)>,
    failure: Option<String>,
}

/// Result of a change, for its client.
pub(super) type Changed = (ClientId, Result<(), String>);

impl PublishedPortChange {
    fn new(client: ClientId, spec: ForwardSpec, is_new: bool) -> PublishedPortChange {
        PublishedPortChange {
            client,
            spec,
            is_new,
            to_open: VecDeque::new(),
            opened: Vec::new(),
            to_close: Vec::new(),
            ordered: None,
            failure: None,
        }
    }

    /// Opens no further port, and closes those of this change.
    fn fail(&mut self, why: String) {
        self.failure.get_or_insert(why);
        self.to_open.clear();
        self.to_close.append(&mut self.opened);
    }
}

impl PublishedPorts {
    /// Opens the sockets of all specifications. Returns the ports, and the forwards and sockets with which the uplink is
    /// started.
    ///
    /// # Errors
    ///
    /// Returns the first socket that fails, or a specification without an address of the guest.
    pub(super) fn listen(
        specs: &[ForwardSpec],
        families: Families,
        defaults: &[IpAddr],
        reporter: Reporter,
    ) -> anyhow::Result<(PublishedPorts, Vec<Forward>, Vec<OwnedFd>)> {
        let mut made = Vec::new();
        let mut list = Vec::new();
        for spec in specs {
            let first = made.len();
            made.extend(listen(spec, families, defaults, reporter)?);
            if made.len() > SOCKETS_MAX {
                bail!("more than {PORTS_MAX} ports cannot be forwarded to one guest");
            }
            let ids = first_ports(made.len()).skip(first).collect();
            list.push(PublishedPort { spec: spec.clone(), ids });
        }
        let ports =
            PublishedPorts { list, running: ForwardedPorts::new(made.len()), ..Default::default() };
        let (forwards, sockets) = made.into_iter().unzip();
        Ok((ports, forwards, sockets))
    }

    /// Returns the specifications as text.
    pub(super) fn texts(&self) -> Vec<String> {
        self.list.iter().map(|port| port.spec.to_string()).collect()
    }

    /// Returns `true` if relays are possible: a TCP port is published.
    pub(super) fn has_tcp(&self) -> bool {
        self.list.iter().any(|port| port.spec.protocol == ForwardProtocol::Tcp)
    }

    /// Returns `true` if no more than one change is under way: this one.
    fn begin(&mut self, change: PublishedPortChange) -> Result<(), String> {
        if self.change.is_some() {
            return Err("another change of its ports is under way; try again".to_owned());
        }
        self.change = Some(change);
        Ok(())
    }

    /// Starts to publish ports.
    pub(super) fn add(
        &mut self,
        client: ClientId,
        spec: &ForwardSpec,
        sockets: Vec<(Forward, OwnedFd)>,
    ) -> Result<(), String> {
        let mut change = PublishedPortChange::new(client, spec.clone(), true);
        change.to_open = sockets.into();
        self.begin(change)
    }

    /// Starts to remove ports.
    pub(super) fn remove(&mut self, client: ClientId, spec: &ForwardSpec) -> Result<(), String> {
        let at = self.list.iter().position(|port| port.spec == *spec);
        let at = at.ok_or_else(|| format!("{spec} is not published"))?;
        let mut change = PublishedPortChange::new(client, spec.clone(), false);
        change.to_close.clone_from(&self.list[at].ids);
        self.begin(change)?;
        self.list.remove(at);
        Ok(())
    }

    /// Handles the uplink's answer to an order. Others are ignored.
    pub(super) fn answered(
        &mut self,
        uplink: &Channel,
        id: u32,
        error: Option<String>,
    ) -> Option<Changed> {
        let change = self.change.as_mut()?;
        let (_, opens) = change.ordered.filter(|(ordered, _)| *ordered == id)?;
        change.ordered = None;
        match error {
            Some(why) if opens => {
                self.running.has_failed();
                change.fail(format!("the uplink refuses the port: {}", printable(&why)));
            }
            None if opens => change.opened.push(id),
            // A port that the uplink does not have is closed.
            _ => {}
        }
        self.advance(uplink)
    }

    /// Sends the next order of the change. Returns the result if there is none.
    pub(super) fn advance(&mut self, uplink: &Channel) -> Option<Changed> {
        let change = self.change.as_mut()?;
        while change.ordered.is_none() {
            let (ordered, opens) = if let Some((forward, socket)) = change.to_open.pop_front() {
                (self.running.order_open(uplink, forward, &socket), true)
            } else if let Some(id) = change.to_close.pop() {
                (self.running.order_close(uplink, id).map(|()| id), false)
            } else {
                let change = self.change.take()?;
                return Some((change.client, self.finish(change)));
            };
            match ordered {
                Ok(id) => change.ordered = Some((id, opens)),
                Err(error) => change.fail(error.to_string()),
            }
        }
        None
    }

    fn finish(&mut self, change: PublishedPortChange) -> Result<(), String> {
        let PublishedPortChange { spec, is_new, opened: ids, failure, .. } = change;
        match failure {
            Some(why) => Err(why),
            None => {
                self.list.extend(is_new.then_some(PublishedPort { spec, ids }));
                Ok(())
            }
        }
    }
}

/// Opens the sockets of one specification.
pub(super) fn listen(
    spec: &ForwardSpec,
    families: Families,
    defaults: &[IpAddr],
    reporter: Reporter,
) -> anyhow::Result<Vec<(Forward, OwnedFd)>> {
    let addresses = forward::addresses(spec, families, defaults);
    if addresses.is_empty() || !addresses.iter().all(|ip| families.have(ip)) {
        bail!("-p {spec}: the guest has no address of that family");
    }
    let places: Vec<String> = addresses.iter().map(|ip| format_address(*ip)).collect();
    reporter.step(format_args!("-p {spec}: listens at {}", places.join(" and ")));
    Ok(forward::listen(spec, families, defaults)?)
}

/// Formats the address of a forwarded port for messages.
fn format_address(ip: IpAddr) -> String {
    let family = if ip.is_ipv4() { "IPv4" } else { "IPv6" };
    match ip {
        _ if ip.is_unspecified() => format!("every {family} address of the host ({ip})"),
        _ => ip.to_string(),
    }
}

impl PublishedPorts {
    /// Returns `true` if the change needs the first sockets of the guest's network.
    pub(super) fn needs_relays_for_change(&self) -> bool {
        let is_tcp = |change: &PublishedPortChange| {
            change.is_new && change.spec.protocol == ForwardProtocol::Tcp
        };
        !self.has_relays && self.change.as_ref().is_some_and(is_tcp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_uplink_process::forwarded_ports::ForwardedPortOrder;
    use ringfence_uplink_process::orders::UplinkOrder;

    fn spec(text: &str) -> ForwardSpec {
        text.parse().unwrap()
    }

    fn sockets(number: u16) -> Vec<(Forward, OwnedFd)> {
        let socket = || std::net::UdpSocket::bind("127.0.0.1:0").unwrap().into();
        let forward = |guest_port| Forward {
            protocol: ForwardProtocol::Udp,
            ipv6: false,
            guest_port,
            to_host: false,
        };
        (1..=number).map(|port| (forward(port), socket())).collect()
    }

    fn order(channel: &Channel) -> Option<ForwardedPortOrder> {
        match channel.try_receive::<UplinkOrder>().unwrap() {
            Some((UplinkOrder::Port(order), _)) => Some(order),
            Some((other, _)) => panic!("{other:?}"),
            None => None,
        }
    }

    #[test]
    fn ports_are_published_one_after_the_other_and_removed_again() {
        let (near, far) = Channel::pair().unwrap();
        let mut ports = PublishedPorts::default();
        ports.add(7, &spec("1-2/udp"), sockets(2)).unwrap();
        assert!(ports.advance(&near).is_none());
        assert!(matches!(order(&far), Some(ForwardedPortOrder::Open { id: 1, .. })));
        assert!(order(&far).is_none(), "the second order waits for the answer to the first");
        assert!(ports.add(8, &spec("9/udp"), sockets(1)).unwrap_err().contains("another change"));
        // An answer to another order changes nothing.
        assert!(ports.answered(&near, 9, None).is_none() && order(&far).is_none());
        assert!(ports.answered(&near, 1, None).is_none() && ports.texts().is_empty());
        assert!(matches!(order(&far), Some(ForwardedPortOrder::Open { id: 2, .. })));
        assert_eq!(ports.answered(&near, 2, None), Some((7, Ok(()))));
        assert_eq!(ports.texts(), ["1-2:1-2/udp"]);
        assert!(ports.remove(8, &spec("1-3/udp")).unwrap_err().contains("not published"));
        ports.remove(8, &spec("1-2/udp")).unwrap();
        assert!(ports.advance(&near).is_none());
        for id in [2, 1] {
            assert_eq!(order(&far), Some(ForwardedPortOrder::Close { id }));
            let done = ports.answered(&near, id, None);
            assert_eq!(done.is_some(), id == 1);
        }
        assert!(ports.texts().is_empty() && ports.change.is_none());
    }

    #[test]
    fn change_that_fails_closes_what_it_has_opened() {
        let (near, far) = Channel::pair().unwrap();
        let mut ports = PublishedPorts::default();
        ports.add(7, &spec("1-3/udp"), sockets(3)).unwrap();
        assert!(ports.advance(&near).is_none() && ports.answered(&near, 1, None).is_none());
        assert!(ports.answered(&near, 2, Some("full".into())).is_none());
        assert!(matches!(order(&far), Some(ForwardedPortOrder::Open { id: 1, .. })));
        assert!(matches!(order(&far), Some(ForwardedPortOrder::Open { id: 2, .. })));
        assert_eq!(order(&far), Some(ForwardedPortOrder::Close { id: 1 }));
        let (client, result) = ports.answered(&near, 1, None).unwrap();
        assert_eq!((client, order(&far)), (7, None));
        assert!(result.unwrap_err().contains("full"));
        assert!(ports.texts().is_empty());
        // The next change is possible.
        ports.add(7, &spec("1/udp"), sockets(1)).unwrap();
    }
}
