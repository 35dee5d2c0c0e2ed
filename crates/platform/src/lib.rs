//! Platform abstraction: grants, event channels and a store behind one trait.
//!
//! Frontends and backends reach the machine only through [`Platform`]. There are two implementations:
//! [`local`] uses ordinary Linux processes, without a hypervisor and without root. [`xen`] uses Xen,
//! from dom0, a driver domain or a guest.
//!
//! # Roles
//!
//! * A [`Granter`] grants pages to one peer and revokes them. The peer may read (or write) a page at
//!   any instant until it is revoked.
//! * A [`Grantee`] accesses the pages that one peer granted: it maps them, or copies without a
//!   mapping. Each element of a batch has its own status (XSA-361).
//! * A [`Channel`] carries one pending bit in each direction. Notifications merge until the receiver
//!   clears the bit.
//! * A [`TranslationTable`] is the granter's end of a grant window, in which the granter issues and
//!   revokes grants without the grantee; see [`window`].
//! * The [store](ringfence_xenstore) carries the xenbus handshake. Every value in it is the peer's
//!   untrusted text.
//!
//! # Devices of the kernel
//!
//! [`vhost`] is a peer that the kernel plays: its worker reaches lent memory by virtqueues. [`iotlb`] is the table of
//! addresses through which that worker may have to go.
//!
//! # Example
//!
//! Two domains in one process, one page and one event:
//!
//! ```
//! use ringfence_platform::local::LocalPlatform;
//! use ringfence_platform::local::hub::{Hub, HubLimits};
//! use ringfence_platform::{Access, Channel, CopyOps, Grantee, Granter, Platform};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (hub, handle) = Hub::new(HubLimits::default())?;
//! let thread = std::thread::spawn(move || hub.run());
//! let guest = LocalPlatform::connect(handle.admit(None, false)?.1)?;
//! let backend = LocalPlatform::connect(handle.admit(None, false)?.1)?;
//!
//! let lease = guest.granter(backend.domid())?.lend(Access::ReadOnly)?;
//! lease.memory().copy_from(0, b"hello")?;
//! let mut ops = CopyOps::new();
//! let mut bytes = [0; 5];
//! let mut list = ops.begin();
//! list.read(lease.gref(), 0, &mut bytes)?;
//! backend.grantee(guest.domid())?.copy(list);
//! assert_eq!(&bytes, b"hello");
//!
//! let near = guest.alloc_unbound(backend.domid())?;
//! let far = backend.bind_interdomain(guest.domid(), near.port())?;
//! far.clear()?;
//! near.notify()?;
//! assert!(far.clear()?);
//! # handle.stop();
//! # thread.join().unwrap()?;
//! # Ok(())
//! # }
//! ```

mod choice;
pub mod copy;
mod error;
mod events;
mod grants;
pub mod iotlb;
pub mod local;
mod services;
mod table;
pub mod vhost;
pub mod window;
pub mod xen;

pub use choice::PlatformChoice;
pub use copy::{CopyList, CopyOps};
pub use error::{BoxedError, PlatformError};
pub use events::{Channel, ChannelError, EventPort};
pub use grants::{Grantee, Granter, Lease, LendError, RevokeError, StillLent, take_back};
pub use ringfence_sys::counters::Counters;
pub use ringfence_wire::grant::{Access, DomId, GrantStatus, Gref};
pub use services::Platform;
pub use window::{
    PageId, RoundPlace, TranslationTable, WindowError, WindowHandle, WindowName, WindowPlace,
    WindowRound, WindowShape, WindowView,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
