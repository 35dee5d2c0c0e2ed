//! What carries the guest's packets to its uplink: kernel vhost-net where it may be used, else the
//! TAP's file. The launcher opens the device; the uplink's process sets it up, since a worker of the
//! kernel works in the memory of whoever did, and does so before system calls are restricted.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringfence_platform::Counters;
use ringfence_sys::tap::TapOffloads;
use ringfence_sys::vhost::{self, VhostError};
use ringfence_uplink::link::tap::TapLink;
use ringfence_uplink::link::vhost_net::frames::FrameShape;
use ringfence_uplink::link::vhost_net::{Protection, VhostLink};
use serde::{Deserialize, Serialize};

/// What is to carry packets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum LinkOrder {
    /// Reads and writes of the TAP.
    Tap,
    /// The same, and why it is not vhost-net.
    TapFor(String),
    /// vhost-net, by the devices that come along, one for each queue; the TAP where that fails.
    #[default]
    VhostOrTap,
    /// vhost-net or nothing.
    Vhost,
    /// The same, and what its worker reaches is what is under way.
    VhostFine,
}

impl LinkOrder {
    /// Whether devices of vhost-net come along, one for each queue.
    pub(crate) fn has_devices(&self) -> bool {
        !matches!(self, LinkOrder::Tap | LinkOrder::TapFor(_))
    }

    /// vhost-net if it can be had, or only if `insist`; and its devices for so many queues.
    ///
    /// # Errors
    ///
    /// [`VhostError`] when there is none and nothing else will do.
    pub(crate) fn choose(
        queues: u32,
        insist: bool,
    ) -> Result<(LinkOrder, Vec<OwnedFd>), VhostError> {
        let devices: Result<Vec<_>, _> = (0..queues).map(|_| vhost::open()).collect();
        match devices {
            Ok(devices) if insist => Ok((LinkOrder::Vhost, devices)),
            Ok(devices) => Ok((LinkOrder::VhostOrTap, devices)),
            Err(error) if insist => Err(error),
            Err(error) => Ok((LinkOrder::TapFor(error.to_string()), Vec::new())),
        }
    }
}

/// What carries packets.
pub enum Link {
    /// Reads and writes.
    Tap(TapLink),
    /// Virtqueues.
    Vhost(Box<VhostLink>),
}

/// A link, what it is called, and why it is not the one that was wanted most.
pub struct Made {
    /// The link.
    pub link: Link,
    pub(crate) remark: Option<String>,
}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// vhost-net cannot be used.
    #[error("--link vhost: {0}")]
    Vhost(#[from] VhostError),
    /// The TAP interface cannot be used.
    #[error("the link to the guest: {0}")]
    Tap(#[from] io::Error),
}

impl Link {
    /// A link by the queue behind `tap`; `device` is of vhost-net, to be used as `order` says.
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
                Ok(link) => return Ok(Made { link: Link::Vhost(Box::new(link)), remark: None }),
                Err(error) if *order != LinkOrder::VhostOrTap => return Err(error.into()),
                Err(error) => why = Some(error.to_string()),
            }
        }
        let remark =
            why.map(|why| format!("by reading and writing a TAP, not by vhost-net: {why}"));
        let link = TapLink::new(tap, offloads, mtu, shape, Arc::clone(system))?;
        Ok(Made { link: Link::Tap(link), remark })
    }

    /// What it is called, for people.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Link::Tap(_) => "tap",
            Link::Vhost(link) => match link.device().space() {
                Some(_) => "vhost-net, reaching only what is under way",
                None => "vhost-net",
            },
        }
    }
}
