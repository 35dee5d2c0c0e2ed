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
use ringfence_uplink::egress::{NoteQueue, Recording};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::config::Alias;
use crate::egress::document;
use crate::forwarded_ports::{ForwardedPortOrder, ForwardedPortTable};
use crate::messages::{AnswerToUplink, FromUplink};
use crate::multicast_groups::JoinedGroup;
use crate::recorder::{self, RecorderOfGuest};
use crate::totals::TotalsSource;

/// Launcher's order to an uplink process that carries packets already.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum UplinkOrder {
    /// Adds or removes a port.
    Port(ForwardedPortOrder),
    /// Replaces the egress policy by that in the descriptor ([`document`]). The denials of a guest that had none are
    /// recorded under this name.
    Policy { recorded_as: Option<String> },
    /// Answers a question ([`FromUplink::Question`]). There is no answer to that.
    Answer { id: u64, answer: AnswerToUplink },
    /// Records all verdicts of the egress policy from now on, or only denials. There is no answer.
    RecordAll(bool),
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
    /// Requests the totals.
    Totals,
    /// Has the uplink carry the last data of a guest whose programs have ended; answered with [`FromUplink::Drained`]. It
    /// takes up to [`DRAIN_MAX`](ringfence_uplink::runner::DRAIN_MAX).
    Drain,
}

/// Work of [`Orders::serve`] that is left to its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Served {
    /// None: all orders that have arrived were carried out.
    All,
    /// The caller must drain the links, and send the answer.
    Drain,
}

/// Objects that orders concern, besides the engine.
pub(super) struct Orders {
    pub(super) ports: ForwardedPortTable,
    pub(super) totals: TotalsSource,
    pub(super) recorder: RecorderOfGuest,
}

impl Orders {
    /// Receives and carries out the orders that have arrived, up to one that the caller must carry out.
    ///
    /// # Errors
    ///
    /// Returns [`ChannelError::Closed`] when the other end is closed.
    pub(super) fn serve(
        &mut self,
        channel: &Channel,
        uplink: &mut Uplink,
    ) -> Result<Served, ChannelError> {
        while let Some((order, fds)) = channel.try_receive::<UplinkOrder>()? {
            let answer = match order {
                UplinkOrder::Port(order) => self.ports.carry_out(order, fds, uplink)?,
                UplinkOrder::Policy { recorded_as } => {
                    let notes = self.first_queue(channel, recorded_as);
                    Some(FromUplink::Policy { error: set_policy(fds, uplink, notes).err() })
                }
                UplinkOrder::Answer { id, answer } => {
                    uplink.answer_question(id, answer.into(), monotonic());
                    None
                }
                UplinkOrder::RecordAll(all) => {
                    if let Some(egress) = self.totals.policy.get() {
                        egress.record(if all { Recording::All } else { Recording::Denials });
                    }
                    None
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
                UplinkOrder::Totals => Some(FromUplink::Totals(Box::new(self.totals.read()))),
                UplinkOrder::Drain => return Ok(Served::Drain),
            };
            if let Some(answer) = answer {
                channel.send_now(&answer, &[])?;
            }
        }
        Ok(Served::All)
    }
}

impl Orders {
    /// Starts the recorder of a guest that has no policy yet, and returns its queue. Without a thread for it, the guest has
    /// a policy without records.
    fn first_queue(&self, channel: &Channel, recorded_as: Option<String>) -> Option<NoteQueue> {
        let guest = recorded_as.filter(|_| self.totals.policy.get().is_none())?;
        let (queue, notes) = recorder::queue();
        let started = self.recorder.start(channel, guest, queue.clone(), notes);
        started.ok().map(|()| queue)
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

fn set_policy(
    fds: Descriptors,
    uplink: &mut Uplink,
    notes: Option<NoteQueue>,
) -> Result<(), String> {
    let [file] = expect_fds(fds).map_err(|error| error.to_string())?;
    let source = document::read(&file).map_err(|error| error.to_string())?;
    let policy = Policy::new(source).map_err(|error| error.to_string())?;
    uplink.set_policy(policy, notes, monotonic());
    Ok(())
}
