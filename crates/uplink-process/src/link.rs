//! Link between the guest and the uplink: kernel vhost-net, reads and writes of the TAP, or the socket of a virtual
//! machine, by which frames or its memory come.
//!
//! The launcher opens the vhost device. The uplink's process sets it up, because the kernel's
//! worker accesses the memory of the process that did. The set-up happens before system calls are
//! restricted.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringfence_link::capture::Capture;
use ringfence_link::clients::Clients;
use ringfence_link::datagram::DatagramLink;
use ringfence_link::frame_ring::FrameShape;
use ringfence_link::stream::StreamLink;
use ringfence_link::tap::TapLink;
use ringfence_link::vhost_net::{Protection, VhostLink};
use ringfence_link::vhost_user::{ClientReport, VhostUserLink, VhostUserOptions};
pub use ringfence_link::vhost_user::{PAIRS_MAX, PoolRule};
use ringfence_platform::Counters;
use ringfence_platform::vhost::{self, VhostError};
use ringfence_sys::tap::TapOffloads;
use serde::{Deserialize, Serialize};

/// Choice of the link between guest and uplink.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LinkOrder {
    /// Reads and writes of the TAP.
    Tap,
    /// Reads and writes of the TAP, with the reason why it is not vhost-net.
    TapFor(String),
    /// vhost-net with the passed devices, one for each queue. The TAP if that fails.
    #[default]
    VhostOrTap,
    /// vhost-net; an error if that fails.
    Vhost,
    /// vhost-net whose worker can access only the pages of packets in flight.
    VhostFine,
    /// Connected socket of a virtual machine, in place of the TAP.
    Connected(Transport),
    /// Listening socket, to which virtual machines connect one after another, or only one.
    Clients { transport: Transport, one_off: bool },
}

/// Transport of a virtual machine's frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Transport {
    /// Frames on the socket, each behind its length.
    #[default]
    Stream,
    /// Virtqueues in memory that the hypervisor passes over the socket.
    VhostUser {
        pool: PoolRule,
        /// Number of queue pairs.
        pairs: u16,
    },
    /// Frames on a datagram socket, which another process connects to its client.
    Datagram,
}

/// Function that receives each change of the state of a virtual machine's client. It must not block.
pub type MachineReporter = Box<dyn Fn(ClientReport) + Send>;

impl LinkOrder {
    /// Returns `true` if vhost-net devices are passed, one for each queue.
    pub fn has_devices(&self) -> bool {
        matches!(self, LinkOrder::VhostOrTap | LinkOrder::Vhost | LinkOrder::VhostFine)
    }

    /// Returns `true` if the guest is a virtual machine on a socket.
    pub fn is_machine(&self) -> bool {
        matches!(self, LinkOrder::Connected(_) | LinkOrder::Clients { .. })
    }

    /// Chooses vhost-net if it is available, and opens its devices for so many queues. With
    /// `insist` there is no fallback to the TAP.
    ///
    /// # Errors
    ///
    /// Returns [`VhostError`] if vhost-net is unavailable and `insist` is set.
    pub fn choose(queues: u32, insist: bool) -> Result<(LinkOrder, Vec<OwnedFd>), VhostError> {
        let devices: Result<Vec<_>, _> = (0..queues).map(|_| vhost::open()).collect();
        match devices {
            Ok(devices) if insist => Ok((LinkOrder::Vhost, devices)),
            Ok(devices) => Ok((LinkOrder::VhostOrTap, devices)),
            Err(error) if insist => Err(error),
            Err(error) => Ok((LinkOrder::TapFor(error.to_string()), Vec::new())),
        }
    }
}

/// One of the ways in which an engine exchanges frames with its guest.
pub enum QueueLink {
    /// Reads and writes of the TAP.
    Tap(TapLink),
    /// Virtqueues of vhost-net.
    Vhost(Box<VhostLink>),
    /// Stream socket of a virtual machine.
    Stream(StreamLink),
    /// Virtqueues of a virtual machine.
    VhostUser(Box<VhostUserLink>),
    /// Datagram socket of a virtual machine.
    Datagram(DatagramLink),
}

/// A created link, and the reason for a fallback.
pub struct Made {
    pub link: QueueLink,
    pub remark: Option<String>,
}

/// Failures on the way from the launcher's descriptors to a link.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// vhost-net cannot be used.
    #[error("--link vhost: {0}")]
    Vhost(#[from] VhostError),
    /// The TAP cannot be used.
    #[error("the link to the guest: {0}")]
    Tap(#[from] io::Error),
}

impl QueueLink {
    /// Creates the link of a virtual machine on `socket`, or returns the socket for another kind of link.
    ///
    /// # Errors
    ///
    /// Returns [`LinkError`] if the link cannot be created.
    pub fn of_machine(
        order: &LinkOrder,
        socket: OwnedFd,
        mtu: u16,
        system: &Arc<Counters>,
        report: MachineReporter,
    ) -> Result<Result<Made, OwnedFd>, LinkError> {
        let (transport, clients) = match order {
            LinkOrder::Connected(transport) => (*transport, Clients::Connected(socket)),
            &LinkOrder::Clients { transport, one_off } => {
                (transport, Clients::Listener { socket, one_off })
            }
            _ => return Ok(Err(socket)),
        };
        let (shape, system) = (FrameShape::default(), Arc::clone(system));
        let link = match transport {
            Transport::Stream => QueueLink::Stream(StreamLink::new(clients, mtu, shape, system)?),
            Transport::VhostUser { pool, pairs } => {
                let options = VhostUserOptions { pairs, pool, report: Some(report) };
                let link = VhostUserLink::new(clients, mtu, shape, system, options)?;
                QueueLink::VhostUser(Box::new(link))
            }
            Transport::Datagram => {
                let (Clients::Connected(socket) | Clients::Listener { socket, .. }) = clients;
                QueueLink::Datagram(DatagramLink::new(socket, mtu, shape, system)?)
            }
        };
        Ok(Ok(Made { link, remark: None }))
    }

    /// Creates the link of the queue `tap`. `device` is a vhost-net device, used as `order` says.
    pub fn make(
        order: &LinkOrder,
        tap: OwnedFd,
        device: Option<OwnedFd>,
        offloads: TapOffloads,
        mtu: u16,
        system: &Arc<Counters>,
    ) -> Result<Made, LinkError> {
        let shape = FrameShape::default();
        let mut why = match order {
            LinkOrder::TapFor(why) => Some(why.clone()),
            _ => None,
        };
        if let Some(device) = device {
            let protection = match order {
                LinkOrder::VhostFine => Protection::Fine,
                _ => Protection::Fixed,
            };
            let system = Arc::clone(system);
            let made =
                VhostLink::start_protected(device, &tap, offloads, mtu, shape, system, protection);
            match made {
                Ok(link) => {
                    return Ok(Made { link: QueueLink::Vhost(Box::new(link)), remark: None });
                }
                Err(error) if *order != LinkOrder::VhostOrTap => return Err(error.into()),
                Err(error) => why = Some(error.to_string()),
            }
        }
        let remark =
            why.map(|why| format!("by reading and writing a TAP, not by vhost-net: {why}"));
        let link = TapLink::new(tap, offloads, mtu, shape, Arc::clone(system))?;
        Ok(Made { link: QueueLink::Tap(link), remark })
    }

    /// Captures the link's frames into a file from now on. Returns `false` if the link has no capture.
    pub fn capture(&mut self, file: OwnedFd) -> bool {
        match self {
            QueueLink::Tap(link) => link.capture(Capture::new(file)),
            QueueLink::Stream(link) => link.capture(Capture::new(file)),
            QueueLink::VhostUser(link) => link.capture(Capture::new(file)),
            QueueLink::Datagram(link) => link.capture(Capture::new(file)),
            QueueLink::Vhost(_) => return false,
        }
        true
    }

    /// Returns the name of the link for messages.
    pub fn name(&self) -> &'static str {
        match self {
            QueueLink::Tap(_) => "tap",
            QueueLink::Stream(_) => "a stream socket",
            QueueLink::VhostUser(_) => "vhost-user",
            QueueLink::Datagram(_) => "a datagram socket",
            QueueLink::Vhost(link) => match link.device().space() {
                Some(_) => "vhost-net, reaching only what is under way",
                None => "vhost-net",
            },
        }
    }
}
