//! Orders to a running uplink, and their execution by its first engine.
//!
//! The uplink accepts orders only on the channel of the process that started it.

use std::net::IpAddr;

use ringfence_policy::Policy;
use ringfence_sandbox::channel::{Channel, ChannelError, expect_fds};
use ringfence_sys::clock::monotonic;
use ringfence_sys::descriptors::Descriptors;
use ringfence_uplink::Uplink;
use ringfence_uplink::config::NameServers;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::config::Alias;
use crate::egress::document;
use crate::forwarded_ports::{ForwardedPortOrder, ForwardedPortTable};
use crate::messages::FromUplink;
use crate::multicast_groups::JoinedGroup;
use crate::totals::TotalsSource;

/// Launcher's order to an uplink process that carries packets already.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum UplinkOrder {
    /// Adds or removes a port.
    Port(ForwardedPortOrder),
    /// Replaces the egress policy by that in the descriptor ([`document`]).
    Policy,
    /// Replaces the guest's name servers. There is no answer.
    NameServers {
        /// Stand-ins for name servers that the guest cannot query itself.
        resolvers: Vec<Alias>,
        /// Addresses that the guest is offered.
        offered: Vec<IpAddr>,
        /// Addresses that the guest knows otherwise.
        unoffered: Vec<IpAddr>,
    },
    /// Replaces the sockets of multicast groups by those in the descriptors. There is no answer.
    Multicast(Vec<JoinedGroup>),
    /// Requests the totals of the egress policy.
    Totals,
}

/// Objects that orders concern, besides the engine.
pub(super) struct Orders {
    pub(super) ports: ForwardedPortTable,
    pub(super) totals: TotalsSource,
}

impl Orders {
    /// Receives and carries out the orders that have arrived.
    ///
    /// # Errors
    ///
    /// Returns [`ChannelError::Closed`] when the other end is closed.
    pub(super) fn serve(
        &mut self,
        channel: &Channel,
        uplink: &mut Uplink,
    ) -> Result<(), ChannelError> {
        while let Some((order, fds)) = channel.try_receive::<UplinkOrder>()? {
            let answer = match order {
                UplinkOrder::Port(order) => self.ports.carry_out(order, fds, uplink)?,
                UplinkOrder::Policy => {
                    Some(FromUplink::Policy { error: set_policy(fds, uplink).err() })
                }
                UplinkOrder::NameServers { resolvers, offered, unoffered } => {
                    let resolvers = pairs(&resolvers);
                    let servers = NameServers { resolvers, offered, unoffered };
                    uplink.set_name_servers(servers, monotonic());
                    None
                }
                UplinkOrder::Multicast(joined) => {
                    if let Err(error) = rejoin(&joined, fds, uplink) {
                        tracing::warn!(%error, "multicast groups could not be joined again");
                    }
                    None
                }
                UplinkOrder::Totals => Some(FromUplink::Totals(self.totals.read())),
            };
            if let Some(answer) = answer {
                channel.send_now(&answer, &[])?;
            }
        }
        Ok(())
    }
}

/// Returns each stand-in with the address for which it stands.
pub(super) fn pairs(aliases: &[Alias]) -> Vec<(IpAddr, IpAddr)> {
    aliases.iter().map(|alias| (alias.guest, alias.host)).collect()
}

/// Replaces the sockets of multicast groups. After an error some groups are not joined.
fn rejoin(joined: &[JoinedGroup], fds: Descriptors, uplink: &mut Uplink) -> Result<(), Errno> {
    uplink.leave_groups();
    for (joined, socket) in joined.iter().zip(fds.into_vec()) {
        uplink.join(socket, joined.group())?;
    }
    Ok(())
}

fn set_policy(fds: Descriptors, uplink: &mut Uplink) -> Result<(), String> {
    let [file] = expect_fds(fds).map_err(|error| error.to_string())?;
    let source = document::read(&file).map_err(|error| error.to_string())?;
    let policy = Policy::new(source).map_err(|error| error.to_string())?;
    uplink.set_policy(policy, monotonic());
    Ok(())
}
